"""Stand-ins that transformers calls while a model is traced: attention, its masks, and experts with balanced routing.

transformers chooses the three by name from tables that anyone may extend (`ALL_ATTENTION_FUNCTIONS`,
`ALL_MASK_ATTENTION_FUNCTIONS`, `ALL_EXPERTS_FUNCTIONS`), so models need no change. A routing depends on values, which
meta tensors have none of: experts get tokens * top_k rows in all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributions import Distribution
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from costmodels.traced.model import Reach
from costmodels.traced.with_torch.recording import ProductRun, Recorder, attention_run

NAME = "meshtune_traced"
FAR = 1 << 20
"""A length beyond every window, at whose end a mask shows what it hides."""


@contextmanager
def stand_ins(recorder: Recorder) -> Iterator[None]:
    """Put the stand-ins into transformers' tables for a while, and let them tell the recorder.

    Three checks that ask for values are answered too: no sequences are packed, none is padded, and parameters of
    distributions are not verified.
    """
    reaches: dict[int, Reach | None] = {}
    kept: list[torch.Tensor] = []

    def mask(*_: Any, mask_function: Callable[..., Any], **sizes: Any) -> torch.Tensor:
        size = (sizes.get("batch_size", 1), 1, sizes["q_length"], sizes["kv_length"])
        marked = torch.empty(size, dtype=torch.bool, device="meta")
        reaches[id(marked)] = reach_of(mask_function)
        kept.append(marked)  # so that no other tensor gets its id
        return marked

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        causal, window, chosen = (kwargs.get(name) for name in ("is_causal", "sliding_window", "indices"))
        own = Reach(causal=bool(getattr(module, "is_causal", False) if causal is None else causal))
        known = reaches.get(id(attention_mask), None if attention_mask is not None else own)
        reach = known or own
        if window and not reach.window:
            reach = replace(reach, window=int(window))
        if isinstance(chosen, torch.Tensor):
            reach = replace(reach, selected=chosen.shape[-1])
        sinks = kwargs.get("s_aux")
        if sinks is not None:
            sinks.view(-1)  # read by every run, so it is in use
        run = attention_run(query, key, value, reach, has_sinks=sinks is not None, is_mask_known=known is not None)
        recorder.add_attention(run)
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def experts(module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, *_: Any) -> torch.Tensor:
        return balanced_experts(recorder, module, hidden_states, rows=top_k_index.numel())

    tables = (
        (ALL_ATTENTION_FUNCTIONS, attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, mask),
        (ALL_EXPERTS_FUNCTIONS, experts),
    )
    for table, function in tables:
        table.register(NAME, function)
    try:
        with (
            patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
            patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
            patch.object(Distribution, "_validate_args", new=False),
            ExitStack() as stack,
        ):
            for module, function_name, function in _fused():
                stack.enter_context(patch.object(module, function_name, _told(recorder, function_name, function)))
            yield
    finally:
        for table, _ in tables:
            table._global_mapping.pop(NAME, None)


def _fused() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return the functions of models that fused kernels of other packages replace where they are installed.

    Each with its module, its name and its fallback in torch, which alone runs on tensors without values.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    return [
        (module, name, vars(value)["__wrapped__"])
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and "is_new_implementation" in value.__code__.co_freevars
    ]


def _told(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before, recorder.fallback = recorder.fallback, name
        try:
            return function(*args, **kwargs)
        finally:
            recorder.fallback = before

    return call


def reach_of(mask_function: Callable[..., Any]) -> Reach | None:
    """Return which keys a mask lets a query see, from two of its rows far from the beginning; None if values decide."""
    keys = torch.arange(FAR, device="cpu")
    _fill(mask_function)

    def seen(query: int) -> torch.Tensor:
        with torch.device("cpu"):
            zero, place = torch.tensor(0), torch.tensor(query)
            allowed = torch.as_tensor(mask_function(zero, zero, place, keys))
        return allowed.expand(FAR).nonzero().flatten()

    query = FAR // 2 + 1
    try:
        first, next_one = seen(query), seen(query + 1)
    except (RuntimeError, IndexError, NotImplementedError, TypeError):
        return None  # it looks into tensors that have no values, or none so far away
    if not len(first) or not len(next_one):
        return None
    causal = int(first[-1]) <= query
    start = int(first[0])
    if start == 0:
        return Reach(causal=causal)
    if int(next_one[0]) == start:
        return Reach(causal=causal, chunk=_chunk(start, seen))
    return Reach(causal=causal, window=query - start + 1)


def _fill(function: Callable[..., Any]) -> None:
    """Give tensors without values that a mask looks into the values of unpadded text, as far as the mask may look.

    Lengths and numbers of images are negative, which is none; flags hold.
    """
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        if isinstance(held, torch.Tensor) and held.device.type == "meta":
            value = True if held.dtype == torch.bool else -1
            one = torch.full((1,) * held.dim(), value, dtype=held.dtype, device="cpu")
            cell.cell_contents = one.expand(
                *held.shape[:-1], max(FAR, held.shape[-1]) if held.dim() > 1 else held.shape[-1]
            )
        for inner in held if isinstance(held, (tuple, list)) else (held,):
            if isinstance(inner, FunctionType):
                _fill(inner)


def _chunk(start: int, seen: Callable[[int], torch.Tensor]) -> int:
    """Return the length of the chunk that begins at `start`: the distance to the next query that does not see it."""
    low, high = start, FAR - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if int(seen(middle)[0]) == start else (low, middle)
    return high - start


def balanced_experts(recorder: Recorder, module: Any, hidden_states: torch.Tensor, *, rows: int) -> torch.Tensor:
    """Run experts as products of `rows` tokens among all of them, whatever the routing, and return their output.

    The weights [experts, a, b] run in the order in which the module names them: each takes the width that it has in
    common with what comes in, and gives the other. Experts that lack one of the weights do nothing (LongCat's).
    """
    weights = [one for one in module.parameters(recurse=False) if one.dim() == 3]
    for other in (one for one in module.parameters(recurse=False) if one.dim() != 3):
        other.view(-1)  # read by every run, so it is in use
    experts, all_experts = (choose(weight.shape[0] for weight in weights) for choose in (min, max))
    rows = rows * experts // all_experts
    hidden_states.index_select(0, torch.zeros(rows, dtype=torch.long, device="meta"))  # tokens are put in order
    passed = hidden_states.new_empty(rows, hidden_states.shape[-1])
    for weight in weights:
        if passed.shape[-1] not in weight.shape[1:]:
            passed = _gated(module, passed)
        first, second = weight.shape[1:]
        transposed = getattr(module, "is_transposed", first == passed.shape[-1])
        into, out = (first, second) if transposed else (second, first)
        run = ProductRun(
            kind="experts", weight=recorder.weight_name(weight), shape=(1, rows, into, out), groups=experts
        )
        recorder.add_product(run)
        passed = passed.new_empty(rows, out)
        if getattr(module, "has_bias", False):
            passed = passed + passed.new_empty(out)
        if not getattr(module, "has_gate", True) and weight is not weights[-1]:
            passed = module.act_fn(passed)
    return hidden_states + passed.new_empty(hidden_states.shape)


def _gated(module: Any, passed: torch.Tensor) -> torch.Tensor:
    """Return the inner values of half the width, by the method of transformers' experts where the class has it."""
    if hasattr(module, "_apply_gate"):
        gated: torch.Tensor = module._apply_gate(passed)
        return gated
    gate, up = passed.chunk(2, dim=-1)
    result: torch.Tensor = up * module.act_fn(gate)
    return result


@contextmanager
def without_loops(recorder: Recorder, model: nn.Module) -> Iterator[None]:
    """Let experts whose class is not in transformers' table run with balanced routing too, not in a loop."""
    with ExitStack() as stack:
        for module in model.modules():
            weights = [one for one in module.parameters(recurse=False) if one.dim() == 3]
            if type(module).__name__.endswith("Experts") and len(weights) > 1 and not hasattr(module, "has_gate"):
                stack.enter_context(patch.object(module, "forward", _balanced(recorder, model, module)))
        yield


def _balanced(recorder: Recorder, model: Any, module: nn.Module) -> Callable[..., torch.Tensor]:
    config = model.config.get_text_config()

    def forward(hidden_states: torch.Tensor, *routing: torch.Tensor, **_: Any) -> torch.Tensor:
        chosen = [one for one in routing if isinstance(one, torch.Tensor) and not one.is_floating_point()]
        if chosen:
            return balanced_experts(recorder, module, hidden_states, rows=chosen[0].numel())
        copies = next(module.parameters()).shape[0]  # every expert gets all tokens, most of them times zero (Llama 4)
        rows = hidden_states.shape[0] // copies * int(config.num_experts_per_tok)
        return balanced_experts(recorder, module, hidden_states, rows=rows)

    return forward
