"""Trace a config.json: build, divide, run on a few shapes, fit, describe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_layers import MtpModel

from costmodels.traced.model import EndKind, TracedEnd, TracedModel, TracedParameter, TracedRow
from costmodels.traced.with_torch.building import built, first_line
from costmodels.traced.with_torch.fitted_blocks import fitted_block
from costmodels.traced.with_torch.recording import Recorder
from costmodels.traced.with_torch.rows import Division, divide, is_expert, part_of
from costmodels.traced.with_torch.runs import Runs, run
from costmodels.traced.with_torch.stand_ins import NAME, stand_ins
from hardware.io.errors import ConfigError

_NOT_USED = {
    "auto_map": "no code of a repository runs, transformers' own class stands for it",
    "quantization_config": "weights are those of training, in bf16",
}
"""Keys of published files that change nothing here, each with the reason."""


def trace_transformers(mapping: Mapping[str, Any], *, with_operators: bool = True) -> TracedModel:
    """Return the model that transformers builds of the mapping of a config.json, with what its layers run.

    Args:
        mapping: Values of the file.
        with_operators: Whether anything runs; if not, blocks have parameters alone, and the answer comes at once.

    Raises:
        ConfigError: transformers does not know the model, or refuses it; the key is named.
    """
    try:
        return _traced(mapping, with_operators=with_operators)
    except ConfigError:
        raise
    except Exception as error:
        kind = mapping.get("model_type")
        raise ConfigError(f"cannot be traced: {first_line(error)}", key="model_type", value=kind) from error


def _traced(mapping: Mapping[str, Any], *, with_operators: bool) -> TracedModel:
    """Build the model of a mapping, and describe what its parts hold and run."""
    with stand_ins(Recorder({}, {})):
        model, said = built(mapping, name=NAME)
        mtp, missing = _mtp_modules(model)
    unused = [f"{key} is not used: {why}" for key, why in _NOT_USED.items() if mapping.get(key) is not None]
    notes = (*said, *missing, *unused)
    division = divide(model)
    runs = run(model, division, mtp) if with_operators else Runs(shapes=(), tallies=())
    return _described(model, division, mtp, runs, notes)


def _mtp_modules(model: Any) -> tuple[tuple[nn.Module, ...], tuple[str, ...]]:
    """Return the model's modules of multi-token prediction, which transformers keeps apart from the model."""
    number = getattr(model.config.get_text_config(), "num_mtp_layers", None)
    if not isinstance(number, int) or number < 1:
        return (), ()
    try:
        with torch.device("meta"):
            return tuple(MtpModel(model, number).to(torch.bfloat16).layers), ()
    except Exception as error:  # noqa: BLE001 - not every model with the key is one that transformers can extend
        return (), (f"its {number} modules of multi-token prediction are not counted: {first_line(error)}",)


@dataclass(slots=True)
class _Ledger:
    """Parameters that several layers share, those already described, and the shared ones by their id."""

    shared_ids: set[int]
    seen: set[int] = field(default_factory=set)
    shared: dict[int, TracedParameter] = field(default_factory=dict)

    def described(self, block: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> tuple[TracedParameter, ...]:
        """Return the parameters that no end before has listed; a shared one stands in every layer that holds it."""
        found = []
        for name, parameter in named:
            is_shared = id(parameter) in self.shared_ids
            if id(parameter) in self.seen and not is_shared:
                continue
            self.seen.add(id(parameter))
            one = TracedParameter(
                name=name,
                shape=tuple(parameter.shape),
                part=part_of(block, name),
                is_expert=is_expert(block, name),
                is_shared=is_shared,
            )
            if is_shared:
                self.shared.setdefault(id(parameter), one)
            found.append(one)
        return tuple(found)


def _described(
    model: Any, division: Division, mtp: tuple[nn.Module, ...], runs: Runs, notes: tuple[str, ...]
) -> TracedModel:
    owners: dict[int, set[int]] = {}
    for layer in (layer for row in division.rows for layer in row.layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(id(layer))
    ledger = _Ledger({one for one, layers in owners.items() if len(layers) > 1})
    kinds = tuple(
        fitted_block(path, layer, ledger.described(layer, layer.named_parameters()), ("kind", kind), runs)
        for kind, (path, layer) in enumerate(division.representatives)
    )
    ledger.seen.update(owners)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = _input_table(model)
    buffers = {name for name, _ in model.named_buffers()}
    ends = []
    for path, end in division.ends:
        parameters = ledger.described(end, _own_parameters(end, path, division))
        kind = _kind_of(end, table, head, around=_is_around(path, division))
        tied = _Ledger(set()).described(end, end.named_parameters()) if kind == "head" and not parameters else ()
        block = fitted_block(path, end, parameters, ("end", path), runs, tied=tied)
        ends.append(TracedEnd(kind=kind, block=block))
    for index, module in enumerate(mtp):
        parameters = ledger.described(module, module.named_parameters())
        ends.append(TracedEnd(kind="mtp", block=fitted_block(f"mtp.{index}", module, parameters, ("mtp", index), runs)))
    return TracedModel(
        model_type=model.config.model_type,
        class_name=type(model).__name__,
        version=transformers.__version__,
        rows=tuple(TracedRow(name=row.name, kinds=row.kinds) for row in division.rows),
        kinds=kinds,
        ends=tuple(ends),
        shared=tuple(ledger.shared.values()),
        num_buffer_values=sum(value.numel() for name, value in model.state_dict().items() if name in buffers),
        tied_embeddings=head is not None and getattr(head, "weight", None) is getattr(table, "weight", False),
        notes=notes,
    )


def _input_table(model: Any) -> nn.Module | None:
    try:
        table: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:  # the class has none that transformers finds
        return None
    return table


def _is_around(path: str, division: Division) -> bool:
    return any(row.name.startswith(f"{path}." if path else "") for row in division.rows)


def _own_parameters(end: nn.Module, path: str, division: Division) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what an end holds itself: all of a part without rows, only the direct ones of a part around a row."""
    yield from end.named_parameters(recurse=not _is_around(path, division))


def _kind_of(end: nn.Module, table: nn.Module | None, head: nn.Module | None, *, around: bool) -> EndKind:
    """Return the kind of an end; the table of tokens and the head may be parts of it, as in BERT."""
    inside = [end] if around else list(end.modules())
    if any(one is table for one in inside):
        return "embedding"
    if any(one is head for one in inside):
        return "head"
    return "norm" if type(end).__name__.endswith("Norm") else "other"
