"""Parallel degrees of a command with Megatron-LM's flags.

Sources: Megatron-LM megatron/training/arguments.py (names and derived values), megatron-core 0.16.1
transformer/pipeline_parallel_layer_layout.py (grammar of layouts); MindSpeed mindspeed/features_manager (context
parallel algorithms, --moe-tp-extend-ep); deepspeedai/Megatron-DeepSpeed megatron/arguments.py (Ulysses).
"""

from __future__ import annotations

import re

from hardware.io.errors import ConfigError
from tuner.export.megatron_flags import PATTERN
from tuner.imports.megatron_hidden import Found
from tuner.imports.megatron_model import has_experts, noop_layers

MAX_LAYOUT = 20_000
"""Limit on the length of a layout [characters]; longer texts are cut."""
_OF_CHUNKS = (
    "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
)
"""Flags that state virtual stages."""
_OF_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
"""Flags that state the layers of the first and the last stage."""
ACCOUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Flags that count the embedding or the loss as a layer when layers are divided among virtual stages."""


def degrees_of(found: Found) -> dict[str, int]:
    """Return the parallel degrees and the micro-batch size that could be read."""
    flags = found.flags
    tp = found.number("tp", "--tensor-model-parallel-size", "--model-parallel-size", default=1)
    pp = found.number("pp", "--pipeline-model-parallel-size", "--pipe-parallel-size", default=1)
    degrees = {"pp": pp, "tp": tp, "up": 1, "vpp": 1, "ep": 1}
    degrees["mbs"] = found.number("mbs", "--micro-batch-size", "--batch-size")
    try:
        degrees |= _context(found)
    except ConfigError as error:
        found.refuse(error, "cp", "up")
    try:
        degrees["vpp"] = _segments(found, pp) or _chunks(found, pp, flags.count("--num-layers"))
    except ConfigError as error:
        found.refuse(error, "vpp")
        degrees["vpp"] = None
    if has_experts(flags) or found.may_hold("--num-experts"):
        degrees["ep"] = found.number("ep", "--expert-model-parallel-size", "--moe-expert-parallel-size", default=1)
        # MindSpeed: each tensor parallel rank holds whole experts of its own, so that tp multiplies ep.
        if flags.has("--moe-tp-extend-ep") and degrees["ep"] and tp:
            degrees["ep"] *= tp
    if degrees["mbs"] is None and "mbs" not in found.open:
        found.open["mbs"] = (
            found.absent("mbs", "--micro-batch-size is missing", "--micro-batch-size") or found.open["mbs"]
        )
    return {name: value for name, value in degrees.items() if value is not None}


def _context(found: Found) -> dict[str, int | None]:
    """Return the degrees of ring attention (cp) and Ulysses (up), whose product is --context-parallel-size.

    Megatron-DeepSpeed has Ulysses only, whose degree is --ds-sequence-parallel-size.
    """
    flags = found.flags
    if flags.has("--ds-sequence-parallel-size"):
        return {"cp": 1, "up": found.number("up", "--ds-sequence-parallel-size")}
    size = found.number("cp", "--context-parallel-size", default=1)
    if size is None or size == 1:
        return {"cp": size, "up": 1}
    kinds = {"p2p": "cp", "a2a": "up", "a2a+p2p": "both", "allgather": "cp"}
    algorithms = {
        "megatron_cp_algo": "cp",
        "ulysses_cp_algo": "up",
        "hybrid_cp_algo": "both",
        "hybrid_adaptive_cp_algo": "both",
    }
    name = "--cp-comm-type"
    kind = flags.one_of(name, kinds, "cp")
    if flags.has("--context-parallel-algo"):
        name = "--context-parallel-algo"
        kind = flags.one_of(name, algorithms, "cp")
    if flags.has(name) and flags.text(name) is None:
        found.leave_open(name, "cp", "up")
        return {"cp": None, "up": None}
    if flags.text("--cp-comm-type") == "allgather":
        flags.leave("--cp-comm-type", "allgather is not modelled; read as the ring of p2p")
    if kind != "both":
        return {"cp": size if kind == "cp" else 1, "up": size if kind == "up" else 1}
    sizes = flags.counts("--hierarchical-context-parallel-sizes")
    up = sizes[0] if len(sizes) == 2 else flags.count("--ulysses-degree-in-cp")
    if not up or size % up:
        raise ConfigError(
            "needs two sizes whose product is the context parallel size",
            key=flags.place(name),
            value=flags.text(name),
            nearest=f"--hierarchical-context-parallel-sizes, for example 2 {size // 2}",
        )
    return {"cp": size // up, "up": up}


def _segments(found: Found, pp: int | None) -> int | None:
    """Return the number of virtual stages per pipeline rank of a hybrid model; None if its pattern has no bars.

    Raises:
        ConfigError: pp does not divide the parts between the bars.
    """
    if not found.segments or pp is None:
        return None
    found.layers = found.segments
    if len(found.segments) % pp == 0:
        return len(found.segments) // pp
    raise ConfigError(
        f"must have a multiple of {pp} parts between its bars, the number of pipeline stages; it has "
        f"{len(found.segments)}",
        key=found.flags.place(PATTERN),
        value=found.flags.text(PATTERN),
    )


def _chunks(found: Found, pp: int | None, num_layers: int | None) -> int | None:
    """Return the number of virtual stages per pipeline rank, or None, and an open key, if it cannot be told.

    If the script states the layers of each virtual stage, they are stored in `found.layers`.
    """
    flags = found.flags
    stated = next((name for name in _OF_CHUNKS if flags.has(name)), None)
    # AIAK divides the stages of its list into unequal chunks
    if pp is None or (stated and (flags.text(stated) is None or flags.has("--custom-pipeline-layers"))):
        if stated:
            found.leave_open(stated, "vpp")
        return None if stated else found.absent("vpp", 1, *_OF_CHUNKS)
    if pp == 1 and stated is None:
        return 1
    layout = flags.text("--pipeline-model-parallel-layout")
    if layout is not None:
        found.layers = layers_of_layout(layout, flags.place("--pipeline-model-parallel-layout"))
        if len(found.layers) % pp == 0:
            return len(found.layers) // pp
        raise ConfigError(
            f"must have a multiple of {pp} parts, the number of pipeline stages; it has {len(found.layers)}",
            key=flags.place("--pipeline-model-parallel-layout"),
            value=layout,
        )
    listed = flags.text("--num-layer-list") or flags.text("--custom-pipeline-layers")
    if listed and re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", listed):
        found.layers = tuple(map(int, listed.split(",")))  # MindSpeed and AIAK: layers of each stage
        return 1
    vpp = _equal_chunks(found, pp, num_layers)
    if found.layers or not vpp or not num_layers or pp == 1:
        return vpp
    if flags.has(*_OF_ENDS):
        found.layers = _between_ends(found, num_layers, pp, vpp)
    elif flags.has(*ACCOUNTED):
        found.layers = _accounted(found, num_layers, pp * vpp)
    return vpp


def _between_ends(found: Found, num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage where the first or the last stage has a number of its own.

    The stages between them share the rest equally, and so do the chunks of each stage (megatron-core
    transformer_block.py, get_num_layers_to_build).

    Raises:
        ConfigError: they cannot.
    """
    ends = [found.flags.count(flag) for flag in _OF_ENDS]
    rest = num_layers - sum(end or 0 for end in ends)
    inner = pp - sum(end is not None for end in ends)
    each, left = divmod(rest, inner) if inner else (0, rest)
    of_stage = [end or each for end in (ends[0], *[None] * (pp - 2), ends[1])]
    if rest < 0 or left or any(layers % vpp for layers in of_stage):
        stated = next(flag for flag in _OF_ENDS if found.flags.has(flag))
        raise ConfigError(
            f"leaves {rest} of {num_layers} layers, which the other stages must share equally, and vpp = {vpp} must "
            "divide the layers of each stage",
            key=found.flags.place(stated),
            value=found.flags.text(stated),
        )
    return tuple(layers // vpp for layers in of_stage) * vpp


def _accounted(found: Found, num_layers: int, chunks: int) -> tuple[int, ...]:
    """Return the layers of each virtual stage where the embedding or the loss count as one layer.

    Raises:
        ConfigError: all of them together are no whole number of equal chunks.
    """
    first, last = (found.flags.has(flag) for flag in ACCOUNTED)
    each, left = divmod(num_layers + first + last, chunks)
    if left:
        raise ConfigError(
            f"makes {num_layers + first + last} layers of {num_layers}, which must be divisible by the {chunks} "
            "virtual stages",
            key=found.flags.place(next(flag for flag in ACCOUNTED if found.flags.has(flag))),
            nearest=f"another number of virtual stages, or {_OF_CHUNKS[0]}",
        )
    return (each - first, *[each] * (chunks - 2), each - last)


def _equal_chunks(found: Found, pp: int, num_layers: int | None) -> int | None:
    """Return the number of virtual stages per pipeline rank, which are equal but for the ends, as `_chunks` does."""
    flags = found.flags
    per_chunk = flags.count("--num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        is_uneven = flags.has(*_OF_ENDS)
        if not num_layers:
            found.open["vpp"] = "--num-layers is not known"
            return None
        num_layers += sum(flags.has(flag) for flag in ACCOUNTED)
        if not is_uneven and num_layers % (pp * per_chunk):
            found.open["vpp"] = f"{num_layers} layers are no whole number of chunks of {per_chunk} on {pp} stages"
            return None
        vpp: int | None = max(1, num_layers // pp // per_chunk)
    else:
        vpp = found.number("vpp", "--num-virtual-stages-per-pipeline-rank", default=1)
    if vpp and num_layers and (noops := noop_layers(flags)) and pp * vpp > 1:
        each = num_layers // (pp * vpp)
        found.layers = tuple(each - sum(layer // each == chunk for layer in noops) for chunk in range(pp * vpp))
    return vpp


def layers_of_layout(layout: str, place: str) -> tuple[int, ...]:
    """Parse a pipeline layout such as `Et*3|(tt|)*2t*3L` into the number of layers of each part."""
    text = layout.replace(",", "").replace(" ", "")
    # Expand repeated groups before repeated letters; the limit on length bounds each expansion.
    for pattern in (r"\(([^)]+)\)\*([0-9]{1,3})", r"(.)\*([0-9]{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text[:MAX_LAYOUT])
    if not re.fullmatch(r"[EtmL|]+", text):
        raise ConfigError("is not a layout of E, t, m, L and |", key=place, value=layout)
    return tuple(part.count("t") for part in text.split("|"))
