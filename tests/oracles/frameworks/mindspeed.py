"""Reader for MindSpeed-LLM's flags, and the rules that MindSpeed-LLM asserts in addition to Megatron-LM's.

Sources: MindSpeed-LLM mindspeed_llm/training/arguments.py (`_add_cp_args`, `_validate_cp_args`), MindSpeed
features_manager/context_parallel (`ContextParallelFeature.validate_args`) and
features_manager/pipeline_parallel/noop_layers.py (`NoopLayersFeature`); see megatron.py for the shared rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.oracles.frameworks.megatron import COMMON_RULES, all_to_all_rule, common_dimensions, num_micro_batches
from tests.oracles.frameworks.published_rules import Facts, PublishedRule, at_least, check_rules, number
from tuner.export.flag_table import Flag, FlagValue, Values, read_flags
from tuner.export.megatron_flags import COMMON_FLAGS, CP, PP, SEQUENCE

ALGORITHM, ULYSSES = "--context-parallel-algo", "--ulysses-degree-in-cp"
PER_CHUNK, LAYERS, NOOP = "--num-layers-per-virtual-pipeline-stage", "--num-layers", "--noop-layers"

MINDSPEED_FLAGS: dict[str, Flag] = COMMON_FLAGS | {
    **{name: Flag(kind="switch") for name in ("--is-instruction-dataset", "--neat-pack", "--reset-attention-mask")},
    "--variable-seq-lengths": Flag(kind="switch"),
    "--attention-mask-type": Flag(kind="word", choices=("causal", "general")),
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


def _num_layers(values: Values, facts: Facts) -> int:
    """Return the number of layers, including no-op layers."""
    return number(values, LAYERS, facts.num_layers)


def _noop_layers(values: Values) -> list[str]:
    """Return the numbers of the no-op layers as they are given."""
    return str(values[NOOP]).split(",") if values.get(NOOP) is not None else []


def _ulysses(values: Values) -> int:
    """Return the number of ranks of the all-to-all."""
    algorithm = values.get(ALGORITHM)
    if algorithm == "hybrid_cp_algo":
        return number(values, ULYSSES)
    return 1 if algorithm == "megatron_cp_algo" else number(values, CP)


def _virtual_stages(values: Values, facts: Facts) -> int:
    """Return the number of virtual stages per rank."""
    per_stage = _num_layers(values, facts) // number(values, PP)
    return per_stage // number(values, PER_CHUNK, per_stage)


def _is_valid_hybrid(values: Values, _: Facts) -> bool:
    """Return whether the degree of Ulysses is a proper divisor of the context parallel size."""
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
        holds=_is_valid_hybrid,
    ),
    all_to_all_rule(ALGORITHM, _CONTEXT, _ulysses),
    PublishedRule(
        key=SEQUENCE,
        rule="must be divisible by the context parallel ranks",
        source=_CONTEXT,
        holds=lambda v, _: number(v, SEQUENCE) % number(v, CP) == 0,
    ),
    PublishedRule(
        key=PP,
        rule="must divide the number of layers, including no-op layers",
        source=_MEGATRON,
        holds=lambda v, f: _num_layers(v, f) % number(v, PP) == 0,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="must divide the layers of a stage",
        source=_MEGATRON,
        holds=lambda v, f: _num_layers(v, f) // number(v, PP) % number(v, PER_CHUNK) == 0,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="needs pipeline-model-parallel-size > 1",
        source=_MEGATRON,
        holds=lambda v, f: _virtual_stages(v, f) == 1 or number(v, PP) > 1,
    ),
    PublishedRule(
        key=PER_CHUNK,
        rule="needs a number of micro-batches divisible by pipeline-model-parallel-size",
        source="megatron-core pipeline_parallel/schedules.py forward_backward_pipelining_with_interleaving",
        holds=lambda v, f: _virtual_stages(v, f) == 1 or num_micro_batches(v, f) % number(v, PP) == 0,
    ),
    PublishedRule(
        key=NOOP,
        rule="must be a comma-separated list of numbers",
        source=_NOOP,
        holds=lambda v, _: all(layer.isdecimal() and layer.isascii() for layer in _noop_layers(v)),
    ),
    PublishedRule(
        key=NOOP,
        rule="must be smaller than --num-layers",
        source=_NOOP,
        holds=lambda v, f: all(int(layer) < _num_layers(v, f) for layer in _noop_layers(v)),
    ),
    PublishedRule(
        key=NOOP,
        rule="must leave exactly the layers of the model",
        source="MindSpeed core/pipeline_parallel/noop_layers: --num-layers includes them",
        holds=lambda v, f: _num_layers(v, f) - len(set(_noop_layers(v))) == f.num_layers,
    ),
)


def check_mindspeed(arguments: Sequence[str], facts: Facts) -> dict[str, FlagValue]:
    """Return the values of the flags.

    Raises:
        ConfigError: MindSpeed-LLM would reject the flags; the message cites the rule.
    """
    values = read_flags(arguments, MINDSPEED_FLAGS)
    check_rules(values, facts, MINDSPEED_RULES)
    return values


def said_by_mindspeed(values: Values, facts: Facts) -> dict[str, FlagValue]:
    """Convert the values to dimensions of a configuration; `layers` are those of an uneven pipeline."""
    vpp = _virtual_stages(values, facts)
    layers: tuple[int, ...] | None = None
    if NOOP in values:
        chunks = number(values, PP) * vpp
        size, noop = _num_layers(values, facts) // chunks, {int(layer) for layer in _noop_layers(values)}
        layers = tuple(sum(at not in noop for at in range(c * size, (c + 1) * size)) for c in range(chunks))
    return {
        **common_dimensions(values, facts, up=_ulysses(values)),
        "vpp": vpp,
        "zero_stage": int(bool(values.get("--use-distributed-optimizer"))),
        "dp_shard": 0,
        "layers": layers,
    }
