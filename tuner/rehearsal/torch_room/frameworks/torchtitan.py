"""torchtitan's Trainer, as one rank runs it: batches without data, and an end after some steps."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tuner.rehearsal.torch_room.host_tensors import in_host_memory
from tuner.rehearsal.torch_room.progress import Progress
from tuner.rehearsal.torch_room.storages import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from tuner.rehearsal.torch_room.watch import NoStandInError

_HOLD_NO_MORE = ("1f1b", "interleaved1f1b")
"""Schedules of which a stage holds no more micro-batches, however many a step has."""


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in torchtitan's modules, by their names."""
    return {
        "torchtitan.models.common.attention": lambda module: _take_whole_rows(module, progress),
        "torchtitan.distributed.utils": lambda module: setattr(module, "set_pg_timeouts", lambda *_, **__: None),
        "torchtitan.distributed.pipeline_parallel": lambda module: _cut_schedule(module, progress),
        "torchtitan.models.common.token_dispatcher": lambda module: _balance_experts(module, progress),
        "torchtitan.trainer": lambda module: _follow_trainer(module, progress),
    }


class _Batches:
    """Yields batches without data, of the shapes that torchtitan's loaders of text give."""

    def __init__(self, rows: int, length: int) -> None:
        self._shape = (rows, length)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            with in_host_memory():
                tokens, positions, labels = (torch.empty(self._shape, dtype=torch.long) for _ in range(3))
            yield {"input": tokens, "positions": positions}, labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None: ...


def _follow_trainer(trainers: Any, progress: Progress) -> None:
    """Let the Trainer report its steps, which end after the last; it reads no data, and writes nothing."""
    trainers.wrap_with_cuda_graph = lambda function: function  # a replay would run nothing here
    trainer = trainers.Trainer
    begin, step = trainer.__init__, trainer.train_step

    @functools.wraps(begin)
    def initialise(own: Any, config: Any) -> None:
        progress.has_own_loop = True
        _settle(config, progress)
        begin(own, config)
        parameters = [one for part in own.model_parts for one in part.parameters()]
        progress.watch.storages.assign([one.data for one in parameters], WEIGHTS)
        for one in parameters:
            one.register_post_accumulate_grad_hook(
                lambda parameter: progress.watch.storages.assign(parameter.grad, GRADIENTS)
            )
        _assign_states(own, progress)
        progress.built(sum(_local(one).numel() for one in parameters))
        progress.watch.storages.purpose = ACTIVATIONS
        _cut(own, progress)

    def train_step(own: Any, batches: Any) -> None:
        progress.begin_step()
        step(own, batches)
        _assign_states(own, progress)
        progress.end_step()

    trainer.__init__, trainer.train_step = initialise, train_step


def _settle(config: Any, progress: Progress) -> None:
    """Switch off what reads or writes files, and let the steps be enough."""
    for section, names in (
        ("checkpoint", ("enable",)),
        ("validator", ("enable",)),
        ("profiler", ("enable_profiling", "enable_memory_snapshot")),
        ("metrics", ("enable_tensorboard", "enable_wandb")),
        ("debug", ("enable_structured_logging",)),
    ):
        for name in names:
            if hasattr(getattr(config, section, None), name):
                setattr(getattr(config, section), name, False)
    if type(config.activation_checkpoint).__qualname__.startswith("MemoryBudgetAC"):
        raise NoStandInError("a memory budget of recomputation, which a compiler meets")
    if config.compile.enable and "model" in config.compile.components:
        progress.watch.invented["memory of layers that are compiled: as if they were not"] += 1
    config.training.steps = max(config.training.steps, progress.steps)
    nothing = SimpleNamespace(eos_id=0, bos_id=0, get_vocab_size=lambda: config.model_spec.model.vocab_size)
    type(config.tokenizer).build = lambda *_, **__: nothing
    type(config.dataloader).build = lambda *_, local_batch_size, seq_len, **__: _Batches(local_batch_size, seq_len)


def _cut(trainer: Any, progress: Progress) -> None:
    """Make no more micro-batches than are wanted: fewer rounds of accumulation, and of the pipeline's micro-batches."""
    rounds, each = trainer.gradient_accumulation_steps, trainer.num_pipeline_parallel_microbatches
    whole, most = rounds * each, progress.most_micro_batches
    if most is not None:
        trainer.num_pipeline_parallel_microbatches = _fewer(trainer.config.parallelism, each, most)
        trainer.gradient_accumulation_steps = min(rounds, 2)  # the second finds the gradients of the first
    made = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches
    progress.micro_batches = (made, whole)


def _fewer(parallelism: Any, whole: int, most: int) -> int:
    """Return how many micro-batches of a pipeline are made."""
    is_plain = parallelism.pipeline_parallel_schedule.lower() in _HOLD_NO_MORE
    return min(whole, most) if is_plain and not parallelism.pipeline_parallel_schedule_csv else whole


def _cut_schedule(pipelines: Any, progress: Progress) -> None:
    """Build the schedule for as many micro-batches as are made, after that for all was accepted."""
    _take_micro_batches(sys.modules["torch.distributed.pipelining.schedules"], progress)
    build = pipelines._build_pipeline_schedule

    @functools.wraps(build)
    def build_schedule(*, parallelism: Any, local_batch_size: int, **named: Any) -> Any:
        whole = build(parallelism=parallelism, local_batch_size=local_batch_size, **named)
        size, most = parallelism.pipeline_parallel_microbatch_size, progress.most_micro_batches
        fewer = local_batch_size // size if most is None else _fewer(parallelism, local_batch_size // size, most)
        if fewer == local_batch_size // size:
            return whole
        return build(parallelism=parallelism, local_batch_size=fewer * size, **named)

    pipelines._build_pipeline_schedule = build_schedule


def _take_micro_batches(schedules: Any, progress: Progress) -> None:
    """Let schedules take micro-batches one by one, as torchtitan 0.3 gives them; PyTorch 2.13 cuts a batch itself."""
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = _step(kind.step, progress)


def _step(of_torch: Any, progress: Progress) -> Any:
    """Return the step of a schedule that takes micro-batches."""

    @functools.wraps(of_torch)
    def step(own: Any, *given: Any, **named: Any) -> Any:
        if "kwarg_mbs" not in named:
            return of_torch(own, *given, **named)
        progress.watch.invented["pipelining of a newer PyTorch, which takes micro-batches one by one"] += 1
        for stage in getattr(own, "_stages", None) or [own._stage]:
            stage.has_backward = own._has_backward
            stage.clear_runtime_states()
        names = ("arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs")
        own._step_microbatches(*(named.get(name) for name in names), loss_kwargs=named.get("loss_kwargs"))
        return None

    return step


def _take_whole_rows(attention: Any, progress: Progress) -> None:
    """Say that each row of a batch is one document, which the positions would tell."""
    attention.activate_flash_attention_impl = lambda _: None  # all make the same tensors

    def whole_rows(positions: torch.Tensor, *, include_host_offsets: bool = False) -> Any:
        rows, length = positions.shape
        progress.watch.invented["documents of a row: one, as long as the row"] += 1
        offsets = torch.empty(rows + 1, dtype=torch.int32)
        on_host = tuple(range(0, rows * length + 1, length)) if include_host_offsets else None
        return attention.VarlenMetadata(offsets, offsets, length, length, on_host)

    attention.create_varlen_metadata_for_document = whole_rows


def _balance_experts(dispatchers: Any, progress: Progress) -> None:
    """Give the dispatcher of tokens the counts of a balanced router, which it would read from the device."""
    dispatcher = dispatchers.AllToAllTokenDispatcher
    reorder = dispatcher._local_reorder

    def local_reorder(own: Any, *given: Any) -> Any:
        found = reorder(own, *given)
        own.rehearsed_tokens = found[0].shape[0]
        return found

    def sync(own: Any, _: Any, counts: torch.Tensor, ranks: int) -> Any:
        progress.watch.invented["tokens of each expert: as many as of any other"] += 1
        whole = own.rehearsed_tokens
        sent = [whole // ranks + (rank < whole % ranks) for rank in range(ranks)]
        return torch.ops._c10d_functional.wait_tensor(counts).reshape(-1), sent, [whole // ranks] * ranks

    dispatcher._local_reorder, dispatcher._sync_token_count_exchange = local_reorder, sync


def _assign_states(trainer: Any, progress: Progress) -> None:
    """Say which storages are the optimizer's."""
    for optimizer in trainer.optimizers:
        progress.watch.storages.assign([list(state.values()) for state in optimizer.state.values()], OPTIMIZER)


def _local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
