"""Types of what `predict` and `rank` return to Python users, who read them as plain dictionaries.

docs/commands.md says what each key means; units stand in their names.
"""

# without `from __future__ import annotations`, under which no key would be known as not required when a program runs
from typing import Literal, NotRequired, TypedDict

Source = Literal["predicted", "simulated", "learned", "measured", "synthetic"]
"""Origin of a figure: the cost model, the event simulator, other trials, or trials of the configuration itself."""


class StageCollective(TypedDict):
    """Collective of a rank of a stage in one step."""

    name: str
    kind: str
    phase: str
    size_bytes: float
    ranks: list[int]
    count: float


class Stage(TypedDict):
    """Pipeline stage of a configuration, by its first rank."""

    stage: int
    rank: int
    parameters: int
    peak_memory_bytes: int
    tensor_bytes: int
    memory_bytes: dict[str, float]
    forward_s: float
    backward_s: float
    optimizer_s: float
    collectives: list[StageCollective]


class CostModelFigures(TypedDict):
    """Figures of the cost model alone, where trials answer in its place."""

    step_time_s: float
    step_time_log_error: float
    step_time_range_s: list[float]
    peak_memory_bytes: int
    peak_memory_log_error: float
    peak_memory_range_bytes: list[float]
    fits: bool
    fit_probability: float
    mfu: float | None
    tokens_per_s_per_device: float | None


class Prediction(CostModelFigures):
    """Prediction of `predict` and of `meshtune predict --json`."""

    slower_probability: NotRequired[float]
    breakdown_s: dict[str, float]
    memory_bytes: dict[str, float]
    memory_capacity_bytes: int
    unnamed_step_time_s: float | None
    step_time_from_constants: dict[str, float]
    step_time_from_cluster: float
    source: Source
    outcome: str | None
    predicted: CostModelFigures | None
    taught_by_trials: int
    looked_in: str | None
    micro_batches: NotRequired[int]
    stages: NotRequired[list[Stage]]


class RankedCandidate(TypedDict):
    """Candidate that `rank` returns: its figures, and the dimensions that the study searches.

    Knobs of the study stand among them by their own names. The keys from `step_time_range_s` on come with rankings that
    tell their errors and what bounds each step; `slower_probability` comes once trials have taught.
    """

    pp: NotRequired[int]
    tp: NotRequired[int]
    dp: NotRequired[int]
    cp: NotRequired[int]
    up: NotRequired[int]
    vpp: NotRequired[int]
    ep: NotRequired[int]
    mbs: NotRequired[int]
    recompute: NotRequired[str]
    offload: NotRequired[str]
    zero_stage: NotRequired[int]
    sequence_parallel: NotRequired[bool]
    expert_tp: NotRequired[int]
    dp_shard: NotRequired[int]
    recompute_layers: NotRequired[int]
    plan: NotRequired[str]
    assignment: NotRequired[str]
    step_time_s: float
    peak_memory_bytes: int
    fits: bool
    tokens_per_s_per_device: float | None
    source: Source
    cost_per_token: NotRequired[float]
    energy_per_token: NotRequired[float]
    step_time_range_s: NotRequired[list[float] | None]
    slower_probability: NotRequired[float | None]
    fit_probability: NotRequired[float | None]
    speedup: NotRequired[float]
    mfu: NotRequired[float | None]
    bound_by: NotRequired[str]
    shares: NotRequired[dict[str, float]]
    exposed: NotRequired[str | None]
