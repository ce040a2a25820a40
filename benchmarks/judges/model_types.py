"""Ask transformers for the parameters of every model type that it can train, and hold our readers against them.

    python -m benchmarks.judges.model_types [--type llama,gpt2] [--parameters-only] [--json]

For each type of transformers' causal and vision-language mappings, and for BERT, T5 and ViT, the default configuration
and its changes (benchmarks/support/oracles/model_types.py) are built on the meta device. Columns: parameters of the
default [billions]; read: `equal` where our reader gives the same number to the last one for all configurations, `with
buffers` where it does with values that transformers keeps as buffers (correction biases of routers), `equal without
idle experts` where transformers alone gives weights to experts that compute nothing, `equal without its tower` where
it reads the language model of a multimodal one and says so, `equal but for a head` where transformers builds such a
language model alone without the table of its logits, the difference where it gives another, `refused` where it
refuses a configuration, `-` where no reader knows the type; traced: `whole`, `bounded` where something could only be
bounded, `not run` where the parameters alone are known, or `refused`; model: `equal` where the model that is made of
the trace has its parameters, `equal without idle experts` as above, `without further rows` where it is the largest of
several rows of layers, or the difference; flops: by how much the reader's model FLOPs of a token differ from the
trace's for the default, without modules of multi-token prediction [%]; layers in all rows, and how many of them are
unlike; said: what was bounded, or why the type is refused. The exit status is 1 where a number is wrong, or FLOPs
differ by more than a percent though the trace is whole.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

from benchmarks.support.oracles.model_types import configurations
from benchmarks.support.timing import benchmark_parser, publish, tell
from costmodels.blocks.experts import Experts
from costmodels.job.hugging_face.reader import READERS, model_from_hugging_face
from costmodels.job.model_spec import ModelSpec
from costmodels.job.traced_model import model_of_trace
from costmodels.traced.model import TracedModel, TracedParameter
from hardware.io.errors import ConfigError

LENGTHS = (512, 4096)
"""Tokens of a sequence at which FLOPs are compared."""
ENCODERS = ("bert", "t5", "vit")
Row = dict[str, Any]


def all_types() -> list[str]:
    """Return the model types to ask about, each once."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - optional

    causal, images = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return [*dict.fromkeys([*causal, *images, *ENCODERS])]


def measure(model_type: str, *, with_operators: bool = True) -> Row:
    """Compute the row of one type; `difference` holds the reader's largest error, None where it gave no number."""
    from costmodels.traced.with_torch.tracing import trace_transformers  # noqa: PLC0415 - needs the optional torch

    row: Row = {
        "type": model_type,
        "parameters_b": None,
        "read": "-",
        "traced": "refused",
        "model": "",
        "flops": "",
        "layers": "",
        "seconds": 0.0,
    }
    row["said"] = ""
    start = time.perf_counter()
    try:
        mappings = configurations(model_type)
    except Exception as error:  # noqa: BLE001 - defaults of some classes cannot be built; each says so in its way
        return row | {"said": f"its default cannot be built: {error}".splitlines()[0][:160]}
    traces: list[TracedModel] = []
    for number, mapping in enumerate(mappings):
        try:
            traces.append(trace_transformers(mapping, with_operators=with_operators and not number))
        except ConfigError as error:
            return row | {"said": str(error).splitlines()[0][:160]}
    first = traces[0]
    said = [line for block in (*first.kinds, *(end.block for end in first.ends)) for line in block.bounds]
    row |= {
        "parameters_b": round(first.num_parameters / 1e9, 3),
        "read": _read(model_type, mappings, traces),
        "traced": "parameters" if not with_operators else _grade(said),
        **(_made(model_type, mappings[0], first) if with_operators else {}),
        "layers": f"{sum(len(one.kinds) for one in first.rows)} of {len(first.kinds)} kinds",
        "seconds": round(time.perf_counter() - start, 1),
        "said": "; ".join([*first.notes, *said][:2])[:160],
    }
    return row


def _grade(said: list[str]) -> str:
    if any("by its parameters only" in line for line in said):
        return "not run"
    return "bounded" if said else "whole"


def _read(model_type: str, mappings: list[dict[str, Any]], traces: list[TracedModel]) -> str:
    if model_type not in READERS:
        return "-"
    found = set()
    for mapping, trace in zip(mappings, traces, strict=True):
        try:
            spec = model_from_hugging_face(mapping, name=model_type, file="config.json")
        except ConfigError as error:
            return f"refused: {error}"[:80]
        if spec.left_out and len(trace.rows) > 1:
            difference = spec.num_parameters - _of_language_model(trace)
            found.add(f"{difference:+}" if difference else "equal without its tower")
            continue
        difference = spec.num_parameters - trace.num_parameters
        known = {trace.num_buffer_values: "with buffers", -_of_idle_experts(spec): "equal without idle experts"}
        if not any(end.kind == "head" for end in trace.ends):
            known[spec.head.table] = "equal but for a head"
        known[0] = "equal"
        found.add(known.get(difference, f"{difference:+}"))
    return ", ".join(sorted(found))


def _of_idle_experts(spec: ModelSpec) -> int:
    """Count the first matrices that transformers makes for experts without weights, as LongCat's."""
    routed = [block for layer in spec.layers for block in layer if isinstance(block, Experts)]
    return sum(one.idle_experts * (1 + one.gated) * one.ffn_size * one.hidden_size for one in routed)


def _made(model_type: str, mapping: dict[str, Any], trace: TracedModel) -> Row:
    """Compare the model that is made of a trace with the trace, and its FLOPs with the reader's."""
    try:
        made = model_of_trace(trace, name=model_type)
    except ConfigError as error:
        return {"model": f"refused: {error}"[:80]}
    difference = made.num_parameters - trace.num_parameters
    told = f"{difference:+}" if difference else "equal"
    if difference < 0 and len(trace.rows) > 1:
        told = "without further rows"
    elif difference < 0 and any("experts that compute nothing" in remark for remark in made.remarks):
        told = "equal without idle experts"
    row: Row = {"model": told}
    if model_type in READERS:
        with suppress(ConfigError):
            spec = replace(model_from_hugging_face(mapping, name=model_type, file="config.json"), num_mtp_layers=0)
            ratios = [spec.model_flops_per_token(length) / made.model_flops_per_token(length) for length in LENGTHS]
            row["flops"] = round(100 * max((ratio - 1 for ratio in ratios), key=abs), 3)
    return row


def _of_language_model(trace: TracedModel) -> int:
    """Count the parameters of the largest row of layers, its tables and its last norm."""
    main, tables = trace.rows[0], list[TracedParameter]()
    total = sum(trace.kinds[kind].num_parameters for kind in main.kinds)
    for end in trace.ends:
        if end.kind == "embedding" and end.block.parameters:
            tables.append(end.block.parameters[0])
    table = max(tables, key=lambda one: one.shape[0])
    return total + table.size * (1 if trace.tied_embeddings else 2) + table.shape[1]


def failed(row: Row) -> bool:
    """Return whether a number of a reader, or of the model that a trace gives, is another than transformers'."""
    words = [*row["read"].split(", "), row["model"]]
    unlike = row["traced"] == "whole" and abs(row["flops"] or 0) > 1
    return unlike or any(word[0] in "+-" for word in words if word not in ("", "-"))


def main(arguments: list[str] | None = None) -> int:
    """Print the table and its totals, and return the exit status."""
    parser = benchmark_parser("judges.model_types", __doc__)
    parser.add_argument("--type", help="comma-separated model types (all)")
    parser.add_argument("--parameters-only", action="store_true", help="run nothing: parameters alone, in seconds")
    given = parser.parse_args(arguments)
    rows = []
    for model_type in given.type.split(",") if given.type else all_types():
        rows.append(measure(model_type, with_operators=not given.parameters_only))
        if not given.json:
            tell(f"{model_type}: read {rows[-1]['read']}, traced {rows[-1]['traced']}")
    totals = Counter(f"traced {row['traced']}" for row in rows)
    totals.update("read " + ("none" if row["read"] == "-" else row["read"].partition(":")[0]) for row in rows)
    if given.json:
        print(json.dumps({"rows": rows, "totals": totals}, indent=2))
    else:
        publish(rows, as_json=False)
        tell(", ".join(f"{name}: {number}" for name, number in sorted(totals.items())))
    return int(any(failed(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
