"""Tables of torchtitan's flags as its dataclasses declare them.

Sources: torchtitan 0.3 config/configs.py; for the main branch after it config/training.py and config/parallelism.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.export.flag_table import Flag

_P, _T = "--parallelism.", "--training."
REPLICATE, SHARD = f"{_P}data_parallel_replicate_degree", f"{_P}data_parallel_shard_degree"
TP, PP, CP = f"{_P}tensor_parallel_degree", f"{_P}pipeline_parallel_degree", f"{_P}context_parallel_degree"
EP, SCHEDULE = f"{_P}expert_parallel_degree", f"{_P}pipeline_parallel_schedule"
MICRO, PER_STAGE = f"{_P}pipeline_parallel_microbatch_size", f"{_P}pipeline_parallel_layers_per_stage"
FIRST, LAST = f"{_P}pipeline_parallel_first_stage_less_layers", f"{_P}pipeline_parallel_last_stage_less_layers"
MODULES, RESHARD = f"{_P}module_fqns_per_model_part", f"{_P}fsdp_reshard_after_forward"
SEQUENCE_PARALLEL, WHOLE_NORMS = f"{_P}enable_sequence_parallel", f"{_P}no_enable_sequence_parallel"
LOCAL, GLOBAL, LENGTH = f"{_T}local_batch_size", f"{_T}global_batch_size", f"{_T}seq_len"
NO_GRAPHS, PRECISION = f"{_T}disable_cuda_graphs", f"{_T}mixed_precision_param"
CSV = f"{_P}pipeline_parallel_schedule_csv"
POLICY = "activation-checkpoint"
POLICIES = ("selective", "full", "memory-budget", "none")

_NUMBER, _SWITCH = Flag(), Flag(kind="switch")
TORCHTITAN_FLAGS: dict[str, Flag] = {
    REPLICATE: _NUMBER,
    SHARD: _NUMBER,
    TP: _NUMBER,
    PP: _NUMBER,
    CP: _NUMBER,
    EP: _NUMBER,
    SCHEDULE: Flag(kind="word", choices=("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble")),
    MICRO: _NUMBER,
    PER_STAGE: _NUMBER,
    FIRST: _NUMBER,
    LAST: _NUMBER,
    MODULES: Flag(kind="words"),
    RESHARD: Flag(kind="word", choices=("default", "always", "never")),
    SEQUENCE_PARALLEL: _SWITCH,
    WHOLE_NORMS: _SWITCH,
    LOCAL: _NUMBER,
    GLOBAL: _NUMBER,
    LENGTH: _NUMBER,
    NO_GRAPHS: _SWITCH,
    PRECISION: Flag(kind="word", choices=("bfloat16", "float32")),
}


TOKENS, STEP_TOKENS = f"{_T}num_tokens_per_microbatch_per_dp_rank", f"{_T}num_tokens_per_train_step"
CONTEXT, ROUNDS = f"{_T}max_context_length", f"{_P}num_pp_microbatches"
MAIN_MODULES = f"{_P}pipeline_parallel_module_fqns_per_model_part"

TORCHTITAN_MAIN_FLAGS: dict[str, Flag] = {
    flag: declared for flag, declared in TORCHTITAN_FLAGS.items() if flag not in (LOCAL, GLOBAL, LENGTH, MICRO, MODULES)
} | {TOKENS: _NUMBER, STEP_TOKENS: _NUMBER, CONTEXT: _NUMBER, ROUNDS: _NUMBER, MAIN_MODULES: Flag(kind="words")}
"""Flags of the main branch, which counts batches in tokens and states the micro-batches of a pipeline."""

NAMES_MODULES = frozenset({MODULES, MAIN_MODULES})
"""Flags that name the modules of each stage."""

_TOGETHER = {PER_STAGE: (FIRST, LAST, MODULES, CSV), SEQUENCE_PARALLEL: (WHOLE_NORMS,)}
GROUPS: Mapping[str, str] = {flag: first for first, others in _TOGETHER.items() for flag in (first, *others)}
"""Group of flags that say one thing together, so that a command exchanges all of them or none, by its first flag."""

FOLLOWS: Mapping[str, tuple[str, ...]] = {
    # a pipeline takes a local batch in micro-batches, and several of them where the global batch is larger
    LOCAL: (PP, MICRO, REPLICATE, SHARD),
    # its default is the local batch of each replica
    GLOBAL: (PP, MICRO, REPLICATE, SHARD, LOCAL),
    # its default depends on whether there is a pipeline
    RESHARD: (PP,),
    # its default is that of the schedule, with shorter stages at the ends
    PER_STAGE: (PP, SCHEDULE),
}
"""Flags that are stated anew where others change: their defaults, or what they mean, change with these."""

NEVER_REMOVED = frozenset({NO_GRAPHS})
"""Flags that a configuration may need, and that a user's command may have for reasons of its own."""

_SINCE_0_3 = frozenset({NO_GRAPHS, SEQUENCE_PARALLEL, WHOLE_NORMS})
"""Flags that versions before 0.3 lack; they split norms over tp always."""


def before_0_3(words: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of 0.3 as versions before it take them, where the policy of recomputation is a flag too."""
    policy = f"{POLICY}:"
    plain = (word for word in words if word not in _SINCE_0_3)
    return tuple(
        part
        for word in plain
        for part in (
            ("--activation_checkpoint.mode", word.removeprefix(policy)) if word.startswith(policy) else (word,)
        )
    )
