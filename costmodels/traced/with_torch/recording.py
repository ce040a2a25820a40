"""Record what a forward pass runs, place by place, while it runs on meta tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels.traced.model import PassKind, ProductKind, Reach

aten = torch.ops.aten

_GATHERS = frozenset(
    ("embedding", "index", "index_select", "gather", "scatter", "scatter_add", "index_add", "index_put")
)
_COPIES = frozenset(("_to_copy", "clone", "copy", "copy_", "cat", "stack", "constant_pad_nd", "roll", "repeat", "flip"))
_FREE = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where something runs: the block's key, the module inside the block, the line of the model's source.

    `fallback` is the function in torch that stands in for a fused kernel there, if any.
    """

    block: object
    module: str
    line: str
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class ProductRun:
    """One run of products: (batch, m, k, n), and the weight's path inside the block."""

    kind: ProductKind
    weight: str
    shape: tuple[int, int, int, int]
    groups: int = 1


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """One run of attention."""

    batch: int
    queries: int
    keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    reach: Reach
    has_sinks: bool
    is_mask_known: bool = True


@dataclass(slots=True)
class Tally:
    """Everything that one forward pass ran in the places that are watched."""

    products: dict[Place, list[ProductRun]] = field(default_factory=dict)
    attentions: dict[Place, list[AttentionRun]] = field(default_factory=dict)
    passes: dict[tuple[object, str, PassKind], list[int]] = field(default_factory=dict)
    """Count, bytes read and bytes written for each block, module and kind."""
    used: dict[object, set[str]] = field(default_factory=dict)
    """Paths of the parameters that anything read, for each block."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's class has no types
    """Watches the operators of ATen, and knows in which module of which block each runs."""

    def __init__(self, paths: Mapping[int, tuple[object, Mapping[int, str]]], weights: Mapping[int, str]) -> None:
        """Take for each watched module, by its id, its block's key and the paths of the block's modules by their ids.

        Args:
            paths: For the id of a layer or an end: (key, {id of a module inside: its path}); None is unwatched.
            weights: For the storage of a parameter its path in the model.
        """
        super().__init__()  # type: ignore[no-untyped-call] # torch's class has no types
        self._paths = paths
        self._weights = weights
        self._casts: dict[int, tuple[str, torch.Tensor]] = {}
        self.fallback = ""
        self.tally = Tally()
        self._stack: list[nn.Module] = []
        self._blocks: list[tuple[object, Mapping[int, str]]] = []
        self._norms = 0

    def forget(self) -> None:
        """Begin a record anew, as before the first run."""
        self._casts = {}
        self.tally, self._stack, self._blocks, self._norms = Tally(), [], [], 0
        self.fallback = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow all modules that are called, and all operators that they run."""
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._stack.append(module)
        block = self._paths.get(id(module))
        if block is not None:
            self._blocks.append(block)
        if type(module).__name__.endswith("Norm") and not self._norms:
            self._norms = len(self._stack)
            self._add_pass("norm", _bytes_in(inputs), 0)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002 - torch's hook has these
        if len(self._stack) == self._norms:
            self._norms = 0
            self._add_pass("norm", 0, _bytes_in(output), count=0)
        self._stack.pop()
        if id(module) in self._paths:
            self._blocks.pop()

    def place(self) -> Place | None:
        """Return where the operator of this moment runs, or None outside the blocks."""
        if not self._blocks:
            return None
        block, names = self._blocks[-1]
        if block is None:
            return None
        module = next((names[id(one)] for one in reversed(self._stack) if id(one) in names), "")
        return Place(block=block, module=module, line=_line_of_model(), fallback=self.fallback)

    def add_product(self, run: ProductRun) -> None:
        """Add products that run here and now."""
        place = self.place()
        if place is not None:
            self.tally.products.setdefault(place, []).append(run)
            self.tally.used.setdefault(place.block, set()).add(run.weight)

    def add_attention(self, run: AttentionRun) -> None:
        """Add attention that runs here and now."""
        place = self.place()
        if place is not None:
            self.tally.attentions.setdefault(place, []).append(run)

    def weight_name(self, tensor: torch.Tensor) -> str:
        """Return the path of the parameter that a tensor is or looks into; empty for an activation."""
        storage = tensor.untyped_storage()._cdata
        return self._casts[storage][0] if storage in self._casts else self._weights.get(storage, "")

    def _use(self, block: object, values: Any) -> None:
        for one in values:
            if isinstance(one, torch.Tensor):
                name = self.weight_name(one)
                if name:
                    self.tally.used.setdefault(block, set()).add(name)
            elif isinstance(one, (list, tuple)):
                self._use(block, one)

    def _add_pass(self, kind: PassKind, read: int, written: int, count: int = 1) -> None:
        place = self.place()
        if place is None:
            return
        totals = self.tally.passes.setdefault((place.block, place.module, kind), [0, 0, 0])
        for index, amount in enumerate((count, read, written)):
            totals[index] += amount

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._blocks or self._blocks[-1][0] is None:
            return output
        name = func._schema.name.partition("::")[2]
        self._use(self._blocks[-1][0], args)
        if name == "_to_copy" and self.weight_name(args[0]):  # a weight in another precision is the same weight
            self._casts[output.untyped_storage()._cdata] = (self.weight_name(args[0]), output)
        if name in _RULES:
            self.add_product(_RULES[name](self, args, output))
        elif name.startswith("_scaled_dot_product"):
            self.add_attention(_plain_attention(args, kwargs or {}))
        elif not self._norms and name not in _FREE and not _is_view(func):
            kind: PassKind = "gather" if name.rstrip("_") in _GATHERS else "copy" if name in _COPIES else "pointwise"
            read = _bytes_in(output if kind == "gather" else args)  # of a table only the rows that are looked up
            self._add_pass(kind, read, _bytes_in(output))
        return output


def _line_of_model() -> str:
    """Return the file and line of the innermost frame of a model's own source."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/transformers/models/" in path or "/transformers/integrations/" in path:
            return f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment] # None ends the loop
    return ""


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _bytes_in(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes_in(one) for one in value)
    if isinstance(value, dict):
        return sum(_bytes_in(one) for one in value.values())
    return 0


def _matrix(recorder: Recorder, left: torch.Tensor, right: torch.Tensor) -> ProductRun:
    batch = left.shape[0] if left.dim() == 3 else 1
    shape = (batch, left.shape[-2], left.shape[-1], right.shape[-1])
    return ProductRun(kind="matrix", weight=recorder.weight_name(right) or recorder.weight_name(left), shape=shape)


def _vector(recorder: Recorder, matrix: torch.Tensor) -> ProductRun:
    m, k = matrix.shape
    return ProductRun(kind="matrix", weight=recorder.weight_name(matrix), shape=(1, m, k, 1))


def _convolution(recorder: Recorder, args: Sequence[Any], output: Any) -> ProductRun:
    weight, transposed = args[1], args[6]
    places = (args[0] if transposed else output).numel() // (args[0] if transposed else output).shape[1]
    sums = weight[0].numel()
    channels = weight.shape[0]
    return ProductRun(kind="convolution", weight=recorder.weight_name(weight), shape=(1, places, sums, channels))


def _plain_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionRun:
    query, key, value = args[:3]
    causal = any(one is True for one in args[3:]) or bool(kwargs.get("is_causal"))
    return attention_run(query, key, value, Reach(causal=causal))


def attention_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    reach: Reach,
    *,
    has_sinks: bool = False,
    is_mask_known: bool = True,
) -> AttentionRun:
    """Return the attention of queries [b, heads, queries, d], keys and values [b, heads, keys, d]."""
    return AttentionRun(
        batch=query.shape[0],
        queries=query.shape[-2],
        keys=key.shape[-2],
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        value_head_dim=value.shape[-1],
        reach=reach,
        has_sinks=has_sinks,
        is_mask_known=is_mask_known,
    )


def _grouped(recorder: Recorder, args: Sequence[Any]) -> ProductRun:
    rows, weight = args[:2]
    shape = (1, rows.shape[-2], rows.shape[-1], weight.shape[-1])
    return ProductRun(kind="experts", weight=recorder.weight_name(weight), shape=shape, groups=weight.shape[0])


_RULES: dict[str, Any] = {
    "mm": lambda recorder, args, _: _matrix(recorder, args[0], args[1]),
    "bmm": lambda recorder, args, _: _matrix(recorder, args[0], args[1]),
    "addmm": lambda recorder, args, _: _matrix(recorder, args[1], args[2]),
    "baddbmm": lambda recorder, args, _: _matrix(recorder, args[1], args[2]),
    "mv": lambda recorder, args, _: _vector(recorder, args[0]),
    "addmv": lambda recorder, args, _: _vector(recorder, args[1]),
    "_grouped_mm": lambda recorder, args, _: _grouped(recorder, args),
    "convolution": _convolution,
}
"""How each operator of ATen that multiplies matrices is read."""
