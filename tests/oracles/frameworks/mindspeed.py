"""MindSpeed-LLM's flags beside those that it shares with Megatron-LM, and the rules that it asserts.

Sources: MindSpeed-LLM mindspeed_llm/training/arguments.py (`_add_cp_args`, `_validate_cp_args`), MindSpeed
features_manager/context_parallel (`ContextParallelFeature.validate_args`) and
features_manager/pipeline_parallel/noop_layers.py (`NoopLayersFeature`); Megatron-LM's rules as megatron_rules.py has
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracles.frameworks.megatron import COMMON_RULES, common_dimensions, num_micro_batches
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, hold_to, number
from tuner.export.flag_table import Flag, FlagValue, Values, read_flags
from tuner.export.megatron_flags import COMMON_FLAGS, CP, PP, SEQUENCE, TP

ALGORITHM, ULYSSES = "--context-parallel-algo", "--ulysses-degree-in-cp"
PER_CHUNK, LAYERS, NOOP = "--num-layers-per-virtual-pipeline-stage", "--num-layers", "--noop-layers"

MINDSPEED_FLAGS: dict[str, Flag] = COMMON_FLAGS | {
    ALGORITHM: Flag(kind="word", choices=("ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo")),
    ULYSSES: Flag(),
    PER_CHUNK: Flag(),
    LAYERS: Flag(),
    NOOP: Flag(kind="word"),
    "--moe-token-dispatcher-type": Flag(kind="word", choices=("allgather", "alltoall", "alltoall_seq")),
}

_MEGATRON = "Megatron-LM megatron/training/arguments.py validate_args"
_CONTEXT = "MindSpeed-LLM mindspeed_llm/training/arguments.py _validate_cp_args"
_NOOP = "MindSpeed features_manager/pipeline_parallel/noop_layers.py NoopLayersFeature.post_validate_args"


def _filled(values: Values, facts: Facts) -> int:
    """Layers with no-op layers among them."""
    return number(values, LAYERS, facts.num_layers)


def _empty(values: Values) -> list[str]:
    return str(values[NOOP]).split(",") if values.get(NOOP) is not None else []


def _ulysses(values: Values) -> int:
    algorithm = values.get(ALGORITHM)
    if algorithm == "hybrid_cp_algo":
        return number(values, ULYSSES)
    return 1 if algorithm == "megatron_cp_algo" else number(values, CP)


def _chunks(values: Values, facts: Facts) -> int:
    """Virtual stages of a rank."""
    held = _filled(values, facts) // number(values, PP)
    return held // number(values, PER_CHUNK, held)


def _hybrid_divides(values: Values, _: Facts) -> bool:
    if values.get(ALGORITHM) != "hybrid_cp_algo":
        return True
    size, inner = number(values, CP), number(values, ULYSSES, 0)
    return inner > 1 and size % inner == 0 and size // inner > 1


MINDSPEED_RULES: tuple[PublishedRule, ...] = (
    *COMMON_RULES,
    *(at_least(1, key, _MEGATRON) for key in (LAYERS, PER_CHUNK)),
    PublishedRule(
        key=ALGORITHM,
        rule="hybrid_cp_algo needs --ulysses-degree-in-cp > 1, a proper divisor of context-parallel-size",
        source=_CONTEXT,
        holds=_hybrid_divides,
    ),
    PublishedRule(
        key=ALGORITHM,
        rule="all-to-all deals whole heads: tp times its ranks must divide the attention heads",
        source=_CONTEXT,
        holds=lambda v, f: f.num_heads % (number(v, TP) * _ulysses(v)) == 0,
    ),
    PublishedRule(
        key=SEQUENCE,
        rule="must be divisible by the context parallel ranks",
        source=_CONTEXT,
        holds=lambda v, _: number(v, SEQUENCE) % number(v, CP) == 0,
    ),
    PublishedRule(
        key=PP,
        rule="must divide the number of layers, no-op layers counted",
        source=_MEGATRON,
        holds=lambda v, f: _filled(v, f) % number(v, PP) == 0,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="must divide the layers of a stage",
        source=_MEGATRON,
        holds=lambda v, f: _filled(v, f) // number(v, PP) % number(v, PER_CHUNK) == 0,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="needs pipeline-model-parallel-size > 1",
        source=_MEGATRON,
        holds=lambda v, f: _chunks(v, f) == 1 or number(v, PP) > 1,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="needs a number of micro-batches divisible by pipeline-model-parallel-size",
        source="megatron-core pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving",
        holds=lambda v, f: _chunks(v, f) == 1 or num_micro_batches(v, f) % number(v, PP) == 0,
    ),
    PublishedRule(
        key=NOOP,
        rule="must be digits between commas",
        source=_NOOP,
        holds=lambda v, _: all(layer.isdecimal() and layer.isascii() for layer in _empty(v)),
    ),
    PublishedRule(
        key=NOOP,
        rule="must be smaller than --num-layers",
        source=_NOOP,
        holds=lambda v, f: all(int(layer) < _filled(v, f) for layer in _empty(v)),
    ),
    PublishedRule(
        key=NOOP,
        rule="must leave as many layers as the model has",
        source="MindSpeed core/pipeline_parallel/noop_layers: --num-layers counts them",
        holds=lambda v, f: _filled(v, f) - len(set(_empty(v))) == f.num_layers,
    ),
)


def check_mindspeed(arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """The values that the flags give.

    Raises:
        ConfigError: MindSpeed-LLM would refuse them; it cites the rule.
    """
    values = read_flags(arguments, MINDSPEED_FLAGS)
    hold_to(values, facts, MINDSPEED_RULES)
    return values


def said_by_mindspeed(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """What of a configuration the values say, by dimension; `layers` are those of an uneven pipeline."""
    up, vpp = _ulysses(values), _chunks(values, facts)
    layers: tuple[int, ...] | None = None
    if NOOP in values:
        chunks = number(values, PP) * vpp
        size, empty = _filled(values, facts) // chunks, {int(layer) for layer in _empty(values)}
        layers = tuple(sum(at not in empty for at in range(c * size, (c + 1) * size)) for c in range(chunks))
    return {
        **common_dimensions(values, facts),
        "vpp": vpp,
        "cp": number(values, CP) // up,
        "up": up,
        "zero_stage": int(bool(values.get("--use-distributed-optimizer"))),
        "dp_shard": 0,
        "layers": layers,
    }
