"""Trace a config.json: build, divide, run on a few shapes, fit.

The whole model runs on meta tensors, once for each shape of a micro-batch; of equal layers the first is watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from costmodels.traced.model import EndKind, TracedBlock, TracedEnd, TracedModel, TracedParameter, TracedRow
from costmodels.traced.with_torch.building import built, first_line
from costmodels.traced.with_torch.recording import Recorder, Tally
from costmodels.traced.with_torch.rows import Division, divide, part_of
from costmodels.traced.with_torch.stand_ins import NAME, stand_ins
from costmodels.traced.with_torch.fitted_blocks import fitted_block

LENGTH_STEP = 512
"""Lengths are multiples of this, and so of every chunk that fallbacks of scans work in."""


def trace_transformers(mapping: Mapping[str, Any]) -> TracedModel:
    """Return the model that transformers builds of the mapping of a config.json, with what its layers run.

    Raises:
        ConfigError: transformers does not know the model, or refuses it; the key is named.
    """
    with stand_ins(Recorder({}, {})):
        model = built(mapping, name=NAME)
    division = divide(model)
    shapes = _shapes(model)
    tallies, trouble = _run(model, division, shapes)
    return _described(model, division, shapes, tallies, trouble)


def _shapes(model: nn.Module) -> list[tuple[int, int]]:
    """Return the micro-batches to run: two batches times three lengths, and one more that must agree."""
    config = model.config.get_text_config()
    longest = max((int(getattr(config, key, 0) or 0) for key in ("index_topk",)), default=0)
    step = LENGTH_STEP * max(1, -(-longest // LENGTH_STEP))
    return [(b, s * step) for b in (1, 2) for s in (1, 2, 3)] + [(3, 4 * step)]


def _run(model: nn.Module, division: Division, shapes: Sequence[tuple[int, int]]) -> tuple[list[Tally], str]:
    """Run the model once for each shape, with no more layers than kinds need; with all of them where it wants them."""
    try:
        with division.shortened():
            return [_tally(model, division, b, s) for b, s in shapes], ""
    except Exception:  # noqa: BLE001 - a model may address its last layers by number
        pass
    try:
        return [_tally(model, division, b, s) for b, s in shapes], ""
    except Exception as error:  # noqa: BLE001 - a model fails in its own way on tensors without values
        import os,traceback
        if os.environ.get('TB'): traceback.print_exc()
        return [], first_line(error)


def _tally(model: nn.Module, division: Division, b: int, s: int) -> Tally:
    recorder = Recorder(*_watched(division))
    with torch.device("meta"), torch.no_grad(), stand_ins(recorder), recorder.watching():
        model(**_inputs(model, b, s))
    return recorder.tally


def _inputs(model: nn.Module, b: int, s: int) -> dict[str, Any]:
    tokens = torch.zeros(b, s, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    if hasattr(model.config, "use_cache") or hasattr(model.config.get_text_config(), "use_cache"):
        inputs["use_cache"] = False
    return inputs


def _watched(division: Division) -> tuple[dict[int, tuple[object, dict[int, str]]], dict[int, str]]:
    """Return the blocks to watch, by the id of their module, and the paths of all weights, by their storage."""
    paths: dict[int, tuple[object, dict[int, str]]] = {}
    for path, end in division.ends:
        paths[id(end)] = (("end", path), _names_inside(end))
    for row in division.rows:
        for layer in row.layers:
            paths[id(layer)] = (None, {})
    for kind, (_, layer) in enumerate(division.representatives):
        paths[id(layer)] = (("kind", kind), _names_inside(layer))
    weights = {}
    for path, block in _blocks(division):
        del path
        for name, parameter in block.named_parameters(remove_duplicate=False):
            weights.setdefault(parameter.untyped_storage()._cdata, name)  # noqa: SLF001 - no public identity
    return paths, weights


def _names_inside(block: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in block.named_modules()}


def _blocks(division: Division) -> Iterator[tuple[str, nn.Module]]:
    for row in division.rows:
        yield from ((f"{row.name}.{index}", layer) for index, layer in enumerate(row.layers))
    yield from division.ends


def _described(
    model: nn.Module, division: Division, shapes: Sequence[tuple[int, int]], tallies: list[Tally], trouble: str
) -> TracedModel:
    owners: dict[int, set[int]] = {}
    for row in division.rows:
        for layer in row.layers:
            for parameter in layer.parameters():
                owners.setdefault(id(parameter), set()).add(id(layer))
    shared_ids = {one for one, layers in owners.items() if len(layers) > 1}
    shared: dict[int, TracedParameter] = {}
    kinds = []
    for kind, (path, layer) in enumerate(division.representatives):
        parameters = _parameters(layer, layer.named_parameters(), shared_ids, shared)
        kinds.append(fitted_block(path, layer, parameters, ("kind", kind), shapes, tallies, trouble))
    seen = set(owners)
    ends = []
    for path, end in division.ends:
        own = list(_own_parameters(end, path, division))
        fresh = [(name, one) for name, one in own if id(one) not in seen]
        seen.update(id(one) for _, one in own)
        block = fitted_block(path, end, _parameters(end, fresh, set(), {}), ("end", path), shapes, tallies, trouble)
        ends.append(TracedEnd(kind=_end_kind(model, end), block=block))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings()
    return TracedModel(
        model_type=model.config.model_type,
        class_name=type(model).__name__,
        version=transformers.__version__,
        rows=tuple(TracedRow(name=row.name, kinds=row.kinds) for row in division.rows),
        kinds=tuple(kinds),
        ends=tuple(ends),
        shared=tuple(shared.values()),
        tied_embeddings=head is not None and getattr(head, "weight", None) is getattr(table, "weight", False),
        notes=(f"the model was not run: {trouble}",) if trouble else (),
    )


def _own_parameters(end: nn.Module, path: str, division: Division) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what an end holds itself: all of a part without rows, only the direct ones of a part around a row."""
    around = any(row.name.startswith(f"{path}." if path else "") for row in division.rows)
    yield from end.named_parameters(recurse=not around)


def _parameters(
    block: nn.Module, named: Any, shared_ids: set[int], shared: dict[int, TracedParameter]
) -> tuple[TracedParameter, ...]:
    found = []
    for name, parameter in named:
        one = TracedParameter(
            name=name,
            shape=tuple(parameter.shape),
            part=part_of(block, name),
            is_expert="expert" in name and "shared_expert" not in name,
            is_shared=id(parameter) in shared_ids,
        )
        if one.is_shared:
            shared.setdefault(id(parameter), one)
        found.append(one)
    return tuple(found)


def _end_kind(model: nn.Module, end: nn.Module) -> EndKind:
    if end is model.get_input_embeddings():
        return "embedding"
    if end is (model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None):
        return "head"
    return "norm" if type(end).__name__.endswith("Norm") else "other"
