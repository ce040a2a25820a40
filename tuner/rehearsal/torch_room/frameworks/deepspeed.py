"""DeepSpeed's engine: its steps, what its optimizers hold, and its compiled kernels (DeepSpeed 0.19)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tuner.rehearsal.torch_room.progress import Progress
from tuner.rehearsal.torch_room.storages import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from tuner.rehearsal.torch_room.watch import NoStandInError, Watch

_HELD = {
    "bit16_groups_flat": WEIGHTS,
    "bf16_groups_flat": WEIGHTS,
    "fp16_groups_flat": WEIGHTS,
    "fp16_partitioned_groups_flat": WEIGHTS,
    "single_partition_of_fp32_groups": OPTIMIZER,
    "fp32_groups_flat_partition": OPTIMIZER,
    "fp32_groups_flat": OPTIMIZER,
    "fp32_partitioned_groups_flat": OPTIMIZER,
    "grad_partitions_flat_buffer": GRADIENTS,
    "fp32_groups_gradients_flat": GRADIENTS,
    "fp32_groups_gradient_flat_partition": GRADIENTS,
}
"""Attributes of its optimizers, with what they hold."""
_WITHOUT_RESULT = ("create_", "destroy_", "adam_", "adagrad_", "lion_", "multi_tensor_")
"""Beginnings of the names of kernels that change their arguments, or make an object."""


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in DeepSpeed's modules, by their names."""
    return {
        "deepspeed.accelerator.cuda_accelerator": _compute_on_cpu,
        "deepspeed.ops.op_builder.builder": lambda module: _replace_kernels(module, progress.watch),
        "deepspeed.runtime.zero.utils": _agree_with_ranks,
        "deepspeed.runtime.zero.stage_1_and_2": lambda module: _see_buckets(module, progress),
        "deepspeed.runtime.engine": lambda module: _follow_engine(module, progress),
    }


class _Kernels:
    """Stands for a compiled operation: kernels of optimizers leave their arguments, others say so."""

    def __init__(self, operation: str, watch: Watch) -> None:
        self._operation, self._watch = operation, watch

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*given: Any, **_: Any) -> Any:
            if not name.startswith(_WITHOUT_RESULT):
                raise NoStandInError(f"the rehearsal knows no kernel {name} of DeepSpeed's {self._operation}")
            if name == "multi_tensor_adam":
                self._watch.note("deepspeed.adam", (sum(one.numel() for one in given[2][0]),))

        return call


def _replace_kernels(module: Any, watch: Watch) -> None:
    """Let no operation be compiled."""
    module.OpBuilder.load = lambda own, *_, **__: _Kernels(own.name, watch)
    module.OpBuilder.is_compatible = lambda *_, **__: True


def _compute_on_cpu(module: Any) -> None:
    """Let the device be the one where the tensors are."""
    module.CUDA_Accelerator.current_device_name = lambda _: "cpu"


def _agree_with_ranks(module: Any) -> None:
    """Let numbers be those of the other ranks, which say nothing."""
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        setattr(module, name, lambda _: None)


def _see_buckets(module: Any, progress: Progress) -> None:
    """Say what the buckets of gradients are for, which live as long as a backward pass."""
    optimizer: Any = module.DeepSpeedZeroOptimizer
    make = optimizer.setup_buckets

    def setup_buckets(own: Any) -> None:
        make(own)
        progress.watch.storages.assign([bucket.buffer for bucket in own.ipg_buckets.values()], GRADIENTS)

    optimizer.setup_buckets = setup_buckets


def _follow_engine(module: Any, progress: Progress) -> None:
    """Let the engine report its steps, each with as many backward passes as gradients are accumulated over."""
    engine: Any = module.DeepSpeedEngine
    begin, step = engine.__init__, engine._take_model_step

    def build(own: Any, *given: Any, **named: Any) -> None:
        progress.has_own_loop = True
        begin(own, *given, **named)
        storages = progress.watch.storages
        storages.assign([_data(one) for one in own.module.parameters()], WEIGHTS)
        _assign(own, progress)
        progress.built(sum(_data(one).numel() for one in own.module.parameters()))
        storages.purpose = ACTIVATIONS
        progress.begin_step()

    def _take_model_step(own: Any, *given: Any, **named: Any) -> None:
        _assign(own, progress)
        step(own, *given, **named)
        _assign(own, progress)
        progress.end_step()
        progress.begin_step()

    engine.__init__, engine._take_model_step = build, _take_model_step


def _data(parameter: Any) -> torch.Tensor:
    """Return what a rank keeps of a parameter: its part, under ZeRO 3."""
    part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    whole: torch.Tensor = parameter.data
    return whole if part is None else part


def _assign(engine: Any, progress: Progress) -> None:
    """Say what the tensors of the engine's optimizer are for, and which of them lie in the host's memory."""
    storages, optimizer = progress.watch.storages, engine.optimizer
    if optimizer is None:
        return
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [list(state.values()) for state in getattr(inner, "state", {}).values()]
    is_on_host = bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))
    for name, purpose in _HELD.items():
        held = getattr(optimizer, name, None)
        if held is not None and is_on_host and purpose == OPTIMIZER:
            storages.leave([held, [one.grad for one in held if isinstance(one, torch.Tensor)]])
        elif held is not None:
            storages.assign(held, purpose)
    (storages.leave if is_on_host else lambda found: storages.assign(found, OPTIMIZER))(states)
    storages.assign(list(_gradients(engine, optimizer)), GRADIENTS)


def _gradients(engine: Any, optimizer: Any) -> Iterator[Any]:
    """Yield all gradients, and the buckets in which they are reduced."""
    for one in engine.module.parameters():
        yield one.grad
    yield from getattr(optimizer, "averaged_gradients", {}).values()
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        yield getattr(bucket, "buffer", None)
    yield list((getattr(optimizer, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", None) or {}).values())
