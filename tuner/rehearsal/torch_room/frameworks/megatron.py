"""Megatron-LM's training loop, as one rank runs it: batches without data, phases, and an end after some steps."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tuner.rehearsal.torch_room.groups import with_data
from tuner.rehearsal.torch_room.host_tensors import in_host_memory
from tuner.rehearsal.torch_room.invented import answering
from tuner.rehearsal.torch_room.known_values import count_selected, selecting, shared_numbers
from tuner.rehearsal.torch_room.on_import import RankAskedError
from tuner.rehearsal.torch_room.progress import Progress
from tuner.rehearsal.torch_room.storages import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from tuner.rehearsal.torch_room.watch import NoStandInError

_OF_APEX = ("persist_layer_norm", "layernorm_zero_centered_gamma", "sequence_parallel", "memory_efficient_layer_norm")
"""Settings of a LayerNorm that apex knows and PyTorch does not."""
_BALANCED = "tokens of each expert: as many as of any other"


def changes(progress: Progress) -> dict[str, Callable[[Any], None]]:
    """Return what is exchanged in Megatron-LM's modules, by their names."""
    return {
        "megatron.core.jit": lambda module: _leave_uncompiled(module, progress),
        "megatron.core.fusions.fused_cross_entropy": _copy_softmax,
        "megatron.core.tensor_parallel.random": _forget_states,
        "megatron.training.argument_utils": _keep_docstrings,
        "megatron.training.initialize": lambda module: setattr(module, "_compile_dependencies", lambda: None),
        "megatron.core.transformer.moe.moe_utils": _count_permuted,
        "megatron.core.transformer.moe.token_dispatcher": lambda module: _balance_experts(module, progress),
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter": _compute_meshes,
        "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor": _trust_shards,
        "megatron.core.pipeline_parallel.fine_grained_activation_offload": _know_no_offloading,
        "megatron.core.pipeline_parallel.utils": _pin_nothing,
        "megatron.core.transformer.attention": _compare_nothing,
        "megatron.core.transformer.torch_norm": lambda module: _offer_layer_norm(module, progress),
        "megatron.training.utils": _pack_nothing,
        "megatron.training.training": lambda module: _follow_loop(module, progress),
    }


def _leave_uncompiled(jit: Any, progress: Progress) -> None:
    order = progress.watch.order
    jit.jit_fuser = (lambda function: function) if order is None else order.fuse


def _copy_softmax(fused: Any) -> None:
    """Let the gradient of the fused cross entropy need what it needs as it is compiled: a copy of the softmax in fp32.

    Compiled, its `index_put` writes to a buffer of its own, which goes back to the softmax at the end (seen in the code
    that torch.compile of PyTorch 2.13 makes of `calculate_gradients`; NVIDIA's peaks on H100 have it too).
    """
    calculate = fused.calculate_gradients

    def calculate_gradients(softmax: torch.Tensor, *given: Any) -> Any:
        copied = torch.empty_like(softmax)
        result = calculate(softmax, *given)
        del copied
        return result

    fused.calculate_gradients = calculate_gradients


def _count_permuted(utils: Any) -> None:
    """Let the mask that picks the tokens of experts select as many as the permutation is told to make."""
    permute = utils.permute

    def counted(*given: Any, num_out_tokens: Any = None, **named: Any) -> Any:
        known = count_selected()  # by the dispatcher, whose own count asks for data
        count = num_out_tokens if known is None else known
        with selecting(count or 0):
            return permute(*given, num_out_tokens=count, **named)

    utils.permute = counted


def _forget_states(random: Any) -> None:
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16)
    random._set_cuda_rng_state = lambda *_, **__: None


def _keep_docstrings(utils: Any) -> None:
    """Let the parser read the help of each class of settings once for all ranks: that takes half a second."""
    factory = utils.ArgumentGroupFactory
    read = factory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def of_class(self: Any, source: type) -> dict[str, str]:
        if source not in known:
            known[source] = read(self, source)
        return dict(known[source])

    factory._get_field_docstrings = of_class


def _prepare() -> None:
    """Do for all ranks what each would do: read the parser's help, and import what tokenizers import."""
    with contextlib.suppress(Exception, RankAskedError):
        arguments = importlib.import_module("megatron.training.arguments")
        arguments.add_megatron_arguments(argparse.ArgumentParser())
    with contextlib.suppress(Exception, RankAskedError):
        importlib.import_module("megatron.core.tokenizers.text.libraries")


def _compute_meshes(adapter: Any) -> None:
    """Let meshes of ranks be computed with the numbers of the ranks; random numbers of another rank are not loaded."""
    adapter._load_rng_state_dict = lambda _: None
    for name, held in list(vars(adapter).items()):
        if name.startswith("_get_") and name.endswith("_mesh"):
            setattr(adapter, name, with_data(held))


def _trust_shards(uneven: Any) -> None:
    """Leave out the check that the shards of all ranks cover a tensor: other ranks tell of theirs nothing."""
    uneven.validate_uneven_dtensor = lambda _: None


def _compare_nothing(attention: Any) -> None:
    """Leave out what `--test-mode` compares: weights of norms with those of other ranks."""
    attention.SelfAttention.run_realtime_tests = lambda _: None


def _know_no_offloading(offload: Any) -> None:
    """Say where activations would go to the host that nothing stands for it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NoStandInError("the rehearsal knows no activations that go to the host")

    offload.PipelineOffloadManager.init_model_chunk_offload_handler = refuse


def _pin_nothing(utils: Any) -> None:
    """Leave the process on the processors that it has: none of them is near a device."""
    utils.set_ideal_affinity_for_current_gpu = lambda: None


def _offer_layer_norm(module: Any, progress: Progress) -> None:
    """Let PyTorch's LayerNorm stand for that of apex, which keeps the same, where only apex could make it."""
    if importlib.util.find_spec("apex") is not None:
        return
    make = module.WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, *given: Any, **named: Any) -> Any:
        names = (
            "persist_layer_norm",
            "layernorm_zero_centered_gamma",
            "sequence_parallel",
            "memory_efficient_layer_norm",
        )
        if config.normalization != "LayerNorm" or not any(getattr(config, name) for name in names):
            return make(cls, config, hidden_size, eps, *given, **named)
        if config.memory_efficient_layer_norm:
            raise NoStandInError("the rehearsal knows no LayerNorm of apex that keeps its output")
        progress.watch.invented["apex, which is not installed here"] += 1
        norm: Any = torch.nn.LayerNorm(hidden_size, eps=eps)
        norm.returns_residual = False
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = made


def _pack_nothing(utils: Any) -> None:
    """Let a batch that comes from another rank have no packed sequences: their number is a tensor's."""
    get = getattr(utils, "get_batch_on_this_tp_rank", None)
    if get is None:
        return

    def get_batch_on_this_tp_rank(*given: Any, **named: Any) -> Any:
        with answering(0):
            return get(*given, **named)

    utils.get_batch_on_this_tp_rank = get_batch_on_this_tp_rank


def _follow_loop(training: Any, progress: Progress) -> None:
    """Let the training loop report its steps, which end after the last."""
    _prepare()
    training.build_train_valid_test_data_iterators = lambda *_, **__: _iterators(training.get_args())
    set_up, step = training.setup_model_and_optimizer, training.train_step
    count = training.get_num_microbatches
    stepping: list[bool] = []

    def get_num_microbatches() -> int:
        made = progress.cut_micro_batches(count(), *_needed(training.get_args()))
        return made if stepping else (progress.micro_batches or (made,))[0]  # one number between all steps

    def setup_model_and_optimizer(*given: Any, **named: Any) -> Any:
        progress.has_own_loop = True
        model, optimizer, scheduler = set_up(*given, **named)
        storages = progress.watch.storages
        for chunk in model:
            storages.assign([one.data for one in chunk.parameters()], WEIGHTS)
            storages.assign([held for one in chunk.parameters() for held in _quantized_parts(one)], WEIGHTS)
            for buffer in _buffers(chunk):
                storages.assign(buffer.grad_data, GRADIENTS)
                if buffer.param_data is not None:
                    storages.assign(buffer.param_data, WEIGHTS)
        _assign_states(progress, optimizer)
        progress.built(sum(one.numel() for chunk in model for one in chunk.parameters()))
        storages.purpose = ACTIVATIONS
        return model, optimizer, scheduler

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        progress.begin_step()
        take = optimizer.step

        def take_step(*given: Any, **named: Any) -> Any:
            progress.end_passes()
            return take(*given, **named)

        optimizer.step = take_step
        stepping.append(True)
        try:
            result = step(forward, data, model, optimizer, *given, **named)
        finally:
            stepping.pop()
            del optimizer.step
        _assign_states(progress, optimizer)
        progress.end_step()
        return result

    training.setup_model_and_optimizer, training.train_step = setup_model_and_optimizer, train_step
    training.get_num_microbatches = get_num_microbatches


def _needed(arguments: Any) -> tuple[int, int]:
    """Return after how many micro-batches a stage holds no more than before, and how few its schedule can make.

    In 1F1B a stage holds the micro-batches of its warm-up, one for each stage after it, and one more; the next one
    shows what lives beside them. With chunks it holds those of two rounds at most (megatron-core schedules.py,
    get_pp_rank_microbatches).
    """
    stages, stage = arguments.pipeline_model_parallel_size, 0
    if arguments.virtual_pipeline_model_parallel_size is not None:
        group = getattr(arguments, "microbatch_group_size_per_vp_stage", None) or stages
        return 2 * group, group
    if stages > 1:
        parallel = importlib.import_module("megatron.core.parallel_state")
        stage = parallel.get_pipeline_model_parallel_rank()
    return stages - stage + 1, 1


def _quantized_parts(parameter: Any) -> list[Any]:
    """Return what a weight in FP8 holds: data, a transposed copy, scales."""
    if not hasattr(parameter, "_quantizer"):
        return []
    names, _ = parameter.__tensor_flatten__()
    return [getattr(parameter, name) for name in names]


def _buffers(chunk: Any) -> Iterator[Any]:
    """Yield the buffers of gradients of a chunk that DDP wraps."""
    for owner in (chunk, getattr(chunk, "module", None)):
        for name in ("buffers", "expert_parallel_buffers"):
            held = getattr(owner, name, None)
            if isinstance(held, list):  # the modules' own `buffers` is a method
                yield from held


def _assign_states(progress: Progress, optimizer: Any) -> None:
    """Say which storages are the optimizer's."""
    assign = progress.watch.storages.assign
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            assign([list(group) for group in getattr(each, name, [])], OPTIMIZER)
        inner = getattr(each, "optimizer", None)
        if inner is not None:
            assign([list(state.values()) for state in inner.state.values()], OPTIMIZER)


def _iterators(arguments: Any) -> tuple[Any, None, None]:
    """Return iterators over batches without data, of the shapes that `pretrain_gpt.py` gets from its data sets."""
    arguments.do_train, arguments.do_valid, arguments.do_test = True, False, False
    again = importlib.import_module("megatron.core.rerun_state_machine").RerunDataIterator
    return again(_batches(arguments)), None, None


def _batches(arguments: Any) -> Iterator[dict[str, torch.Tensor | None]]:
    rows, length = shape = (arguments.micro_batch_size, arguments.seq_length)
    of_whole = dict.fromkeys(("tokens", "labels", "position_ids"), (shape, torch.long))
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {**of_whole, "loss_mask": (shape, torch.float32)}
    if arguments.create_attention_mask_in_dataloader:
        shapes["attention_mask"] = (rows, 1, length, length), torch.bool
    while True:
        with in_host_memory():
            made = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in shapes.items()}
        yield {"attention_mask": None} | made


def _balance_experts(module: Any, progress: Progress) -> None:
    """Give the dispatcher of tokens the counts of a balanced router, which it would read from the device."""

    def counted(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point or self.drop_and_pad:
            return tokens_per_expert
        sent = self.routing_map.shape[0] * self.config.moe_router_topk
        self.input_splits = self.output_splits = shared_numbers((self.ep_size,), sent).tolist()
        self.output_splits_tp = shared_numbers((self.tp_size,), sent * self.tp_size)
        self.num_out_tokens = sent
        if self.num_local_experts > 1:
            shape = (self.tp_size * self.ep_size, self.num_local_experts)
            self.num_global_tokens_per_local_expert = shared_numbers(shape, sent * self.tp_size)
        progress.watch.invented[_BALANCED] += 1
        return shared_numbers((self.num_local_experts,), sent * self.tp_size)

    gathering = module.MoEAllGatherTokenDispatcher
    sort = gathering.dispatch_postprocess

    def dispatch_postprocess(self: Any, hidden_states: Any, probs: Any) -> Any:
        local, experts = self.num_local_experts, self.config.num_moe_experts
        held = hidden_states.shape[:-1].numel() * self.router_topk * local // experts
        progress.watch.invented[_BALANCED] += 1
        with selecting(held):
            sorted_states, _, *others = sort(self, hidden_states, probs)
        return sorted_states, shared_numbers((local,), held), *others

    gathering.dispatch_postprocess = dispatch_postprocess
    _balance_flex(module)
    module.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counted


def _balance_flex(module: Any) -> None:
    """Give the managers of the dispatcher `flex` the experts of a balanced router."""
    deep = getattr(module, "_DeepepManager", None)
    if deep is not None:
        sort = deep.get_permuted_hidden_states_by_experts

        def get_permuted(self: Any, hidden_states: torch.Tensor) -> Any:
            with selecting(sum(self.tokens_per_expert.tolist())):
                return sort(self, hidden_states)

        deep.get_permuted_hidden_states_by_experts = get_permuted
        deep._indices_to_multihot = lambda self, indices, probs: _multihot(indices, probs, self.num_local_experts)
        module.fused_indices_to_multihot = _multihot
    hybrid = getattr(module, "_HybridEPManager", None)
    if hybrid is not None and module.hybrid_ep_dispatch is not None:
        dispatch = hybrid.dispatch
        buffer = importlib.import_module("deep_ep").HybridEPBuffer

        def dispatched(self: Any, *given: Any, **named: Any) -> Any:
            buffer.top = self.config.moe_router_topk
            return dispatch(self, *given, **named)

        hybrid.dispatch = dispatched


def _multihot(indices: torch.Tensor, probs: torch.Tensor, experts: int) -> Any:
    """Return which of its experts each row goes to, and the weights, spread over the experts."""
    spread = probs.sum(dim=1, keepdim=True).expand(-1, experts).contiguous()
    return torch.empty((indices.shape[0], experts), dtype=torch.bool), spread
