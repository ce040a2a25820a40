"""Divide a module tree into rows of layers and the ends around them, and find which layers are equal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from costmodels.traced.model import Part

_INDEX_WORDS = re.compile(r"idx|index|seed|layer_number|layer_id|block_id|^_|^training$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """A row of layers: its path, its layers, and for each layer the index of its block."""

    name: str
    list: nn.ModuleList
    layers: tuple[nn.Module, ...]
    kinds: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Rows of a model; the first layer of each kind by the kind's index; the ends by their paths."""

    rows: tuple[ModuleRow, ...]
    representatives: tuple[tuple[str, nn.Module], ...]
    ends: tuple[tuple[str, nn.Module], ...]

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Leave out of each row the layers behind the last that is the first of its kind."""
        whole = [dict(row.list.named_children()) for row in self.rows]
        for row, layers in zip(self.rows, whole, strict=True):
            last = max(row.kinds.index(kind) for kind in row.kinds)
            row.list._modules = dict(list(layers.items())[: last + 1])
        try:
            yield
        finally:
            for row, layers in zip(self.rows, whole, strict=True):
                row.list._modules = layers


def divide(model: nn.Module) -> Division:
    """Divide a model: the outermost lists of modules that have parts themselves are rows, the rest are ends."""
    lists = sorted(_rows(model, ""), key=lambda row: -_size(row[1]))
    kinds: dict[object, int] = {}
    representatives: list[tuple[str, nn.Module]] = []
    rows = []
    for name, row in lists:
        found = []
        for index, layer in enumerate(row):
            signature = (name, *signature_of(layer))
            if signature not in kinds:
                kinds[signature] = len(kinds)
                representatives.append((f"{name}.{index}", layer))
            found.append(kinds[signature])
        rows.append(ModuleRow(name=name, list=row, layers=tuple(row), kinds=tuple(found)))
    row_names = [name for name, _ in lists]
    ends = tuple(_ends(model, "", row_names))
    return Division(rows=tuple(rows), representatives=tuple(representatives), ends=ends)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _rows(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and len(child) and all(next(layer.children(), None) for layer in child):
            yield inner, child
        else:
            yield from _rows(child, inner)


def _ends(module: nn.Module, path: str, rows: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest parts that hold no row; a part around a row stands for what it holds and does itself."""
    if path in rows:
        return
    if path and not any(row.startswith(f"{path}.") for row in rows):
        yield path, module
        return
    yield path, module
    for name, child in module.named_children():
        yield from _ends(child, f"{path}.{name}" if path else name, rows)


def signature_of(layer: nn.Module) -> tuple[object, ...]:
    """Return what makes two layers equal: classes, shapes and the settings of all their parts, except their place."""
    parts = []
    for name, module in layer.named_modules(remove_duplicate=False):
        own = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, str)) and not _INDEX_WORDS.search(key)
        )
        parts.append((name, type(module).__name__, own, settings))
    return tuple(parts)


_WORD = re.compile(r"[A-Z]?[a-z\d]+|[A-Z]+(?![a-z])|.")
_CLASSES: tuple[tuple[str, Part], ...] = (
    (r"Norm$", "norm"),
    (
        r"MLP|Mlp|MoE|Moe|MOE|Experts|FeedForward|FFN|Ffn|FF$|GLU|Router|Gate$|Dense|Intermediate|Output$",
        "channel mixer",
    ),
    (r"Attention|Attn|Mamba|DeltaNet|Mixer|Conv|Recurrent|Rwkv|LSTM|RGLRU|SSM|Retention|Compressor", "token mixer"),
)
_NAMES: tuple[tuple[str, Part], ...] = (
    (r"norm|ln_|layernorm", "norm"),
    (r"mlp|ffn|feed_forward|ff$|fc\d|moe|expert|intermediate|^output$|channel", "channel mixer"),
    (r"attn|attention|mamba|mixer|conv|temporal|ssm|recurrent", "token mixer"),
)


def part_of(layer: nn.Module, path: str) -> Part:
    """Return the part of a layer that the module or parameter at `path` belongs to, by its outermost part's names.

    A class's name begins with its model's, which says nothing of the part: attention of Qwen3-MoE is Qwen3MoeAttention.
    """
    module, names = layer, path.split(".")
    for name in names:
        child = dict(module.named_children()).get(name)
        if child is None:
            return _first(_NAMES, name.lower())
        kind = type(child).__name__
        own = _without_model(kind, type(layer).__name__)
        for rules, said in ((_CLASSES, own), (_NAMES, name.lower()), (_CLASSES, kind)):
            found = _first(rules, said)
            if found != "other":
                return found
        module = child
    return "other"


def _without_model(name: str, beside: str) -> str:
    """Return a class's name without the words that it begins with in common with a class of the same model."""
    words, others = (_WORD.findall(one) for one in (name, beside))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, others, strict=False)))
    return "".join(words[same:])


def is_expert(block: nn.Module, path: str) -> bool:
    """Check whether the parameter at `path` belongs to a routed expert: its modules or their classes say so."""
    module, words = block, []
    for name in path.split(".")[:-1]:
        module = module.get_submodule(name)
        words += [name, type(module).__name__]
    said = " ".join([*words, path]).lower()
    return "expert" in said.replace("shared_expert", "").replace("sharedexpert", "")


def _first(rules: tuple[tuple[str, Part], ...], name: str) -> Part:
    return next((part for pattern, part in rules if re.search(pattern, name)), "other")
