"""Run a model on meta tensors, once for each shape of a micro-batch, and keep what was recorded.

The whole model runs first. Rows that it leaves out (a vision tower without an image) and MTP modules run alone, layer
by layer, on hidden states of their own width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from costmodels.traced.with_torch.building import first_line
from costmodels.traced.with_torch.recording import Recorder, Tally
from costmodels.traced.with_torch.rows import Division
from costmodels.traced.with_torch.stand_ins import stand_ins, without_loops

LENGTH_STEP = 256
"""Lengths are multiples of this, and so of every chunk that fallbacks of scans work in, if a model names no longer."""

_STEP_KEYS = ("index_topk", "chunk_size", "mamba_chunk_size", "block_size")
"""Keys of configurations whose multiples an operator works in, or below which it does less."""

_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Keys of configurations that say to how many experts a token goes."""

Watched = dict[int, tuple[object, dict[int, str]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Shapes (b, s) of the micro-batches; what each run recorded; why a block was not run, by its key."""

    shapes: Sequence[tuple[int, int]]
    tallies: tuple[Tally, ...]
    troubles: dict[object, str] = field(default_factory=dict)
    experts_per_token: int = 0
    """Routed experts that the model's configuration names for each token; 0 where it names none."""


def run(model: Any, division: Division, mtp: Sequence[nn.Module]) -> Runs:
    """Run the model, then its rows that were left out, then its MTP modules."""
    shapes = shapes_of(model)
    weights = dict(_weights(division, mtp))
    watched = _watched(division)
    tallies, trouble = _whole(model, division, shapes, Recorder(watched, weights))
    troubles: dict[object, str] = {}
    for kind, (_, layer) in enumerate(division.representatives):
        key = ("kind", kind)
        if not any(key == place.block for tally in tallies for place in (*tally.products, *tally.attentions)):
            found, why = _alone(model, partial(_call_layer, layer), shapes, layer, key, weights)
            tallies = _joined(tallies, found)
            if why:
                troubles[key] = trouble or why
    for index, module in enumerate(mtp):
        key = ("mtp", index)
        found, why = _alone(model, partial(_call_mtp, model, module), shapes, module, key, weights)
        tallies = _joined(tallies, found)
        if why:
            troubles[key] = why
    if trouble:
        troubles |= {("end", path): trouble for path, _ in division.ends}
    text = model.config.get_text_config()
    chosen = [value for key in _TOP_K_KEYS if isinstance(value := getattr(text, key, None), int)]
    return Runs(shapes=shapes, tallies=tuple(tallies), troubles=troubles, experts_per_token=chosen[0] if chosen else 0)


def shapes_of(model: Any) -> list[tuple[int, int]]:
    """Return the micro-batches to run: two batches times three lengths, and one more that must agree.

    A batch of one is none of them: dims of length 1 spare copies that longer ones need. Lengths stay within the table
    of positions, and are multiples of what an indexer selects and of chunks, where the model has these.
    """
    config = model.config.get_text_config()
    units = [value for key in _STEP_KEYS if isinstance(value := getattr(config, key, None), int) and value > 0]
    step = LENGTH_STEP * max(1, -(-max(units, default=1) // LENGTH_STEP))
    positions = getattr(config, "max_position_embeddings", None) or 4 * step
    step = min(step, max(1, int(positions) // 4))
    return [(b, s * step) for b in (2, 3) for s in (1, 2, 3)] + [(5, 4 * step)]


def _whole(
    model: Any, division: Division, shapes: Sequence[tuple[int, int]], recorder: Recorder
) -> tuple[list[Tally], str]:
    """Run with no more layers than kinds need, with all where the model addresses the last by number, or its decoder.

    The decoder alone runs where a model around it fails without an image; what is left out is then bounded.
    """

    def call(one: Any, b: int, s: int) -> Any:
        return one(**_inputs(model, b, s))

    def tallies(one: Any) -> list[Tally]:
        return [_tally(model, partial(call, one), b, s, recorder) for b, s in shapes]

    with suppress(Exception), division.shortened():  # the second attempt says what is wrong
        return tallies(model), ""
    try:
        return tallies(model), ""
    except Exception as error:  # noqa: BLE001 - a model fails in its own way on tensors without values
        trouble = first_line(error)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return [], trouble
    try:
        return tallies(decoder), ""
    except Exception:  # noqa: BLE001 - the model's own words are told
        return [], trouble


def _alone(
    model: Any,
    call: Callable[[int, int], Any],
    shapes: Sequence[tuple[int, int]],
    module: nn.Module,
    key: object,
    weights: dict[int, str],
) -> tuple[list[Tally], str]:
    recorder = Recorder({id(module): (key, _names_inside(module))}, weights)
    try:
        return [_tally(model, call, b, s, recorder) for b, s in shapes], ""
    except Exception as error:  # noqa: BLE001 - layers take arguments that nobody outside their model knows
        return [], first_line(error)


def _tally(model: Any, call: Callable[[int, int], Any], b: int, s: int, recorder: Recorder) -> Tally:
    recorder.forget()
    with (
        torch.device("meta"),
        torch.no_grad(),
        stand_ins(recorder),
        without_loops(recorder, model),
        recorder.watching(),
    ):
        call(b, s)
    return recorder.tally


def _joined(tallies: list[Tally], more: list[Tally]) -> list[Tally]:
    """Return the records of both for each shape; either may be empty."""
    if not tallies or not more:
        return tallies or more
    return [
        Tally(
            products={**one.products, **two.products},
            attentions={**one.attentions, **two.attentions},
            passes={**one.passes, **two.passes},
            used={**one.used, **two.used},
        )
        for one, two in zip(tallies, more, strict=True)
    ]


def _inputs(model: Any, b: int, s: int) -> dict[str, Any]:
    text = model.config.get_text_config()
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = model.config.image_size
        return {"pixel_values": torch.empty(b, model.config.num_channels, side, side, dtype=torch.bfloat16)}
    tokens = torch.zeros(b, s, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    if hasattr(text, "use_cache"):
        inputs["use_cache"] = False
    return inputs


def _call_layer(layer: Any, b: int, s: int) -> Any:
    """Call a layer on hidden states of its width; its arguments are known by their names in transformers."""
    norm = next((one for one in layer.modules() if type(one).__name__.endswith("Norm")), None)
    width = norm.weight.shape[0] if norm is not None else next(layer.parameters()).shape[-1]
    names = inspect.signature(layer.forward).parameters
    arguments: dict[str, Any] = {}
    if "cu_seqlens" in names:  # sequences are packed: one row of tokens, and where each sequence ends
        arguments["cu_seqlens"] = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device="cpu")
        hidden = torch.empty(b * s, width, dtype=torch.bfloat16)
    else:
        hidden = torch.empty(b, s, width, dtype=torch.bfloat16)
    if "position_embeddings" in names:
        size = next((int(one.head_dim) for one in layer.modules() if hasattr(one, "head_dim")), 0)
        arguments["position_embeddings"] = (
            torch.empty(*hidden.shape[:-1], size),
            torch.empty(*hidden.shape[:-1], size),
        )
    for name, one in list(names.items())[1:]:
        if name not in arguments and one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            arguments[name] = None
    return layer(hidden, **arguments)


def _call_mtp(model: Any, module: nn.Module, b: int, s: int) -> Any:
    decoder = model.get_decoder()
    width = model.config.get_text_config().hidden_size
    hidden, places = torch.empty(b, s, width, dtype=torch.bfloat16), torch.arange(s).expand(b, s)
    rotary = getattr(decoder, "rotary_emb", None)
    angles = rotary(hidden, places) if rotary is not None else None
    return module(hidden, hidden, position_embeddings=angles, attention_mask=None, position_ids=places, cache=None)


def _watched(division: Division) -> Watched:
    """Return key and inner paths of each block to watch, by the id of its module; the key of other layers is None."""
    paths: Watched = {id(end): (("end", path), _names_inside(end)) for path, end in division.ends}
    paths |= {id(layer): (None, {}) for row in division.rows for layer in row.layers}
    paths |= {id(one): (("kind", kind), _names_inside(one)) for kind, (_, one) in enumerate(division.representatives)}
    return paths


def _names_inside(block: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in block.named_modules()}


def _weights(division: Division, mtp: Sequence[nn.Module]) -> Iterator[tuple[int, str]]:
    """Yield for each parameter's storage its path inside its block; layers come last, since they know it best."""
    blocks = [end for _, end in division.ends] + [layer for row in division.rows for layer in row.layers] + list(mtp)
    for block in blocks:
        for name, parameter in block.named_parameters(remove_duplicate=False):
            yield parameter.untyped_storage()._cdata, name
