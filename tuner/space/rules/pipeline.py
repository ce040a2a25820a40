"""Rules on pipelines: layers of stages and chunks, and micro-batches of schedules."""

from __future__ import annotations

import numpy as np

from costmodels.job.setting import Setting
from hardware.arrays import IntArray
from tuner.space.rules.rule import Columns, Keep, Rule, micro_batches


def _vpp_rounds(s: Setting, c: Columns) -> Keep:
    # torch's interleaved schedule runs m micro-batches in max(m // pp, 1) rounds, which must be of equal length
    count = micro_batches(s, c)
    return np.asarray((c["vpp"] == 1) | (count % np.maximum(count // c["pp"], 1) == 0))


def shortens_chunks(num_layers: int, pp: IntArray, vpp: IntArray) -> Keep:
    """Return whether the longest of pp*vpp chunks has fewer layers than with a smaller vpp, or all are equal [n]."""
    longest = -(-num_layers // (pp * vpp))
    before = -(-num_layers // (pp * np.maximum(vpp - 1, 1)))
    return np.asarray((vpp == 1) | (num_layers % (pp * vpp) == 0) | (longest < before))


def _describe_layers(s: Setting) -> str:
    layers = s.job.model.num_layers
    if s.padded_layers == layers:
        return f"{layers} layers"
    return f"{s.padded_layers} layers ({layers}, filled with no-op layers to a multiple of {s.runtime.layer_padding})"


CHUNKS_WITHOUT_LAYERS = 2
"""Most chunks of a layout of Megatron-LM that may hold no layer: the first and the last."""


PIPELINE_RULES = (
    Rule(
        name="pp_layers",
        needs=("pp",),
        keep=lambda s, c: c["pp"] <= s.job.model.num_layers,
        reason=lambda s: f"pp must not exceed the {s.job.model.num_layers} layers",
    ),
    Rule(
        # torchtitan models/common/decoder.py: "Weight tying is not supported with Pipeline Parallel"
        name="pp_untied",
        needs=("pp",),
        keep=lambda s, c: (c["pp"] == 1) | (not s.job.model.tied_embeddings),
        reason=lambda s: f"pp must be 1, because {s.job.model.name} ties its output head to the embedding",
    ),
    Rule(
        name="layers",
        needs=("pp", "vpp"),
        keep=lambda s, c: s.padded_layers % (c["pp"] * c["vpp"]) == 0,
        reason=lambda s: f"pp*vpp must divide the {_describe_layers(s)}",
    ),
    Rule(
        # megatron-core transformer/pipeline_parallel_layer_layout.py: any layout from the embedding to the loss
        name="layers_or_layout",
        needs=("pp", "vpp"),
        keep=lambda s, c: c["pp"] * c["vpp"] <= s.job.model.num_layers + CHUNKS_WITHOUT_LAYERS,
        reason=lambda s: (
            f"pp*vpp must not exceed the {s.job.model.num_layers} layers by more than {CHUNKS_WITHOUT_LAYERS}: of "
            "the chunks only the first, with the embedding, and the last, with the loss, may be without layers"
        ),
    ),
    Rule(
        name="chunks_filled",
        needs=("pp", "vpp"),
        keep=lambda s, c: c["pp"] * c["vpp"] <= s.job.model.num_layers,
        reason=lambda s: (
            f"pp*vpp must not exceed the {s.job.model.num_layers} layers: chunks may be unequal, but none empty"
        ),
    ),
    Rule(
        name="vpp_shortens",
        needs=("pp", "vpp"),
        keep=lambda s, c: shortens_chunks(s.padded_layers, c["pp"], c["vpp"]),
        reason=lambda s: (
            f"with this vpp the longest chunk of the {_describe_layers(s)} is as long as with vpp - 1, which needs "
            "fewer messages; space.vpp may list it nevertheless"
        ),
    ),
    Rule(
        name="vpp_layers",
        needs=("vpp",),
        keep=lambda s, c: s.padded_layers % c["vpp"] == 0,
        reason=lambda s: f"vpp must divide the {_describe_layers(s)}",
    ),
    Rule(
        name="vpp_three_stages",
        needs=("pp", "vpp"),
        keep=lambda _, c: (c["vpp"] == 1) | (c["pp"] > 2),
        reason=lambda _: "vpp > 1 needs pp > 2",
    ),
    Rule(
        name="vpp_two_stages",
        needs=("pp", "vpp"),
        keep=lambda _, c: (c["vpp"] == 1) | (c["pp"] > 1),
        reason=lambda _: "vpp > 1 needs pp > 1",
    ),
    Rule(
        name="vpp_micro_batches",
        needs=("pp", "dp", "mbs", "vpp"),
        keep=lambda s, c: (c["vpp"] == 1) | (micro_batches(s, c) % c["pp"] == 0),
        reason=lambda _: "vpp > 1 needs the number of micro-batches, global batch / (dp*mbs), divisible by pp",
    ),
    Rule(
        name="vpp_rounds",
        needs=("pp", "dp", "mbs", "vpp"),
        keep=_vpp_rounds,
        reason=lambda _: (
            "vpp > 1 needs rounds of equal length: m // pp (at least 1) must divide the number of micro-batches, "
            "m = global batch / (dp*mbs)"
        ),
    ),
    Rule(
        name="vpp_filled",
        needs=("pp", "dp", "mbs", "vpp"),
        keep=lambda s, c: (c["vpp"] == 1) | (micro_batches(s, c) >= c["pp"]),
        reason=lambda _: "vpp > 1 needs at least pp micro-batches, global batch / (dp*mbs)",
    ),
    Rule(
        name="pp_filled",
        needs=("pp", "dp", "mbs", "vpp"),
        keep=lambda s, c: (c["vpp"] > 1) | (micro_batches(s, c) >= c["pp"]),
        reason=lambda _: "vpp = 1 needs at least pp micro-batches, global batch / (dp*mbs)",
    ),
    Rule(
        # nanotron parallel/pipeline_parallel/engine.py, OneForwardOneBackwardPipelineEngine
        name="pp_nearly_filled",
        needs=("pp", "dp", "mbs"),
        keep=lambda s, c: micro_batches(s, c) >= c["pp"] - 1,
        reason=lambda _: "needs at least pp - 1 micro-batches, global batch / (dp*mbs)",
    ),
    Rule(
        name="pp_micro_batches",
        needs=("pp", "dp", "mbs"),
        keep=lambda s, c: micro_batches(s, c) % c["pp"] == 0,
        reason=lambda _: "pp must divide the number of micro-batches, global batch / (dp*mbs)",
    ),
)

EQUAL_CHUNKS = Rule(
    name="equal_chunks",
    needs=("pp", "vpp"),
    keep=lambda s, c: (c["vpp"] == 1) | (s.padded_layers % (c["pp"] * c["vpp"]) == 0),
    reason=lambda s: (
        f"pp*vpp must divide the {_describe_layers(s)}: the command of the trials has neither {{flags}} nor "
        "{assignment}, by which it could be told unequal chunks"
    ),
)
"""Rule for trials that cannot be told the layers of each chunk, whatever the framework."""

UNEQUAL_CHUNKS = {"chunks_filled": 0, "layers_or_layout": CHUNKS_WITHOUT_LAYERS}
"""Rules that allow chunks of unequal length, with the number of chunks that may be without layers."""
