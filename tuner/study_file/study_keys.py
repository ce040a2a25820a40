"""Grammar of study files: the keys that a study may hold, with their types, defaults and meaning.

The docstring under a key is its text in the reference and in editors. The keys of `trial:` belong to the backends
(`trials/registry.py`), and those of `cluster:` to `hardware`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from costmodels.optimizers.registry import DEFAULT_OPTIMIZER, OptimizerName
from hardware.io.config_file import DocumentedModel
from trials.registry import DEFAULT_TRIAL, TrialKeys
from trials.trial_keys import PositiveInt
from tuner.plans.layer_planning import PlannerChoice
from tuner.study_file.cost_keys import CostKeys, Limits
from tuner.study_file.dimension_keys import JOB_CHOICES, JOB_NUMBERS, SPACE_LISTS, declare_keys
from tuner.study_file.knob_keys import KnobKeys
from tuner.study_file.sequence_keys import SequenceKeys
from tuner.study_file.tower_keys import TowersKeys

Share = Annotated[float, Field(ge=0, lt=1)]


class JobKeys(DocumentedModel):
    """`job:`."""

    sequence_length: PositiveInt
    """Tokens per sequence, or per row of packed `sequences`; the largest length of padded ones. A replay takes it from
    its rows.
    """

    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step, or rows of packed `sequences`. A replay takes it from its rows.

    Default: none; it or one of `global_batch_tokens` and `sequences.per_step` is needed
    """

    global_batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step, in place of `global_batch_size`: those of whole rows, or without padding where
    `sequences` are padded.

    Default: what `global_batch_size` gives
    """

    sequences: SequenceKeys | None = None
    """Sequences of varying length, see [sequences](#sequences).

    Default: all sequences have `sequence_length` tokens
    """

    towers: TowersKeys | None = None
    """Images that go through the tower of a multimodal model, see [towers](#towers).

    Default: towers are left out of all predictions
    """

    precision: Literal["bf16", "fp16", "nvfp4", "fp8", "tf32", "fp32"] = "bf16"
    """Number format of the matrix products."""

    optimizer: OptimizerName = DEFAULT_OPTIMIZER
    """Optimizer, which determines the states of each parameter, and the time of its step. `sgd` has a momentum,
    `plain_sgd` has none; `muon` updates what is no matrix of a layer as Adam does."""

    declare_keys(vars(), JOB_CHOICES)

    recompute_unit: Annotated[int, Field(ge=1)] = 1
    """Layers that `recompute: full` repeats together, of which the input of the first alone is kept: Megatron-LM's
    `--recompute-method uniform --recompute-num-layers`. More need less memory for kept inputs, and more at work."""

    recompute_modules: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["core_attn"])
    """Modules that `selective` recomputes, by Megatron-Core's names: `core_attn`, `mlp`, `layernorm`, `moe_act`,
    `mla_up_proj`, `moe`, `shared_experts`.

    Default: `[core_attn]`
    """

    shared_master_weights: bool = False
    """Whether the bf16 weights share their memory with the fp32 copies of the optimizer, as MindSpeed's
    `--reuse-fp32-param` makes them. It saves 2 bytes for each parameter whose optimizer states a device keeps.
    """

    declare_keys(vars(), JOB_NUMBERS)


class SpaceKeys(DocumentedModel):
    """`space:`."""

    rules: str | None = None
    """Rule set: `flexparallel`, or one of those in the table of runtimes.

    Default: the runtime's
    """

    without: list[str] = Field(default_factory=list)
    """Names of rules that are switched off; `meshtune space FILE` lists the rules that removed candidates."""

    memory_headroom: Share | None = None
    """Old name of `limits.free_memory`. Under this name the share holds for predictions only.

    Default: `limits.free_memory`
    """

    declare_keys(vars(), SPACE_LISTS)

    knobs: Literal["recommended"] | list[str | KnobKeys] = Field(default_factory=list)
    """[Knobs](knobs.md): settings beside the layout, such as flags and environment variables, that are searched too.
    Names stand for [known knobs](known-knobs.md) of the framework, and `recommended` for those of them that may pay.

    Default: none
    """

    assignment: list[Literal["layers", "recomputed", "micro_batches", "hosts", "idle_hosts"]] | None = None
    """Work that may be uneven: `layers` and `recomputed` layers of each virtual stage, `micro_batches` of each replica,
    the order of `hosts`, and `idle_hosts`: [hosts left out](unlike-devices.md#idle-hosts). `[]` keeps work even.

    Default: on unlike hosts all kinds that the runtime supports, on like hosts `layers` of the leaders where they gain
    """


class PinKeys(DocumentedModel):
    """Entry of `planner.pins:`."""

    op: str
    """Name of the pinned operators, with `*` for any text."""

    dim: str
    """Dim of these operators, by its name or by its position, for example `operand1.0` or `result.0`."""

    axis: Literal["dp", "cp", "up", "tp"] | None = None
    """Mesh axis that shards the dim.

    Default: any axis
    """

    ways: PositiveInt | None = None
    """Smallest number of parts. It must divide devices and dim; a soft pin takes the nearest number that does.

    Default: the number of devices along the axis
    """

    weight_s: Annotated[float, Field(ge=0)] | None = None
    """Cost of a soft pin [s] for each factor of e by which the number of parts misses it.

    Default: none: the pin must hold
    """


class PlannerKeys(DocumentedModel):
    """`planner:`."""

    name: PlannerChoice = "auto"
    """Planner of the candidates' layers. `megatron` is the plan that frameworks write by hand. `recursive` (D-Rec),
    `descent` and `toast` search for others, for simulated trials and those in JAX and torch; where one differs from the
    plan by hand, both are candidates. `auto` is `descent` for the leading shapes of layers if the framework runs plans
    (`runtime: jax-reference` or `torch-planned`), else `megatron`; see [sharding
    plans](sharding-plans.md#in-a-study).
    """

    pins: list[PinKeys] = Field(default_factory=list)
    """Dims that the planner must shard."""


Tracker = Literal["tensorboard", "mlflow", "wandb"]


def _each_once(names: list[Tracker]) -> list[Tracker]:
    if len(set(names)) < len(names):
        raise ValueError("must name each tracker once")
    return names


class SearchOptions(DocumentedModel):
    """`search:`."""

    RENAMED: ClassVar[Mapping[str, str]] = {"max_seconds": "max_minutes, in minutes: a sixtieth of the number"}

    draws: Annotated[int, Field(ge=10, le=10_000)] = 100
    """Number of joint draws from the surrogate's posterior per decision."""

    confidence: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Probability of having tried the best configuration at which the search stops."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Relative difference in step time up to which a tried configuration counts as the best: 0.01 is 1%; 0 searches
    for the very best.
    """

    max_trials: PositiveInt = 40
    """Largest number of trials."""

    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Largest wall time of all runs of the study together [min]. Trials that run then are ended as cancelled: that says
    nothing about their configurations.
    """

    budget_device_hours: Annotated[float, Field(gt=0)] | None = None
    """Budget of device-hours for all runs of the study together, start-up included. Once ended and running trials have
    used it up, the running ones are ended as cancelled, which says nothing about their configurations. A simulated or
    replayed trial counts the time that its measured steps would have taken.
    """

    parallel_trials: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of trials that run at the same time. Fewer do where the search may end with what runs: `run` and
    `meshtune status` say how many slots are idle, and why. With `confidence: 1.0` only budgets end a search, and idle
    slots take the next best candidates."""

    share_hosts: bool = False
    """Whether trials may share hosts that each trial has to itself by default: trials with GPUs or several hosts, and
    commands that reach their hosts by themselves.
    """

    placement_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Time that a joined Ray cluster has to give the trials their hosts [s]. After it fewer trials run at once, or the
    run ends if there is room for none.
    """

    callbacks: Annotated[list[Tracker], AfterValidator(_each_once)] = Field(default_factory=list)
    """Trackers of experiments that are told of each ended trial: `tensorboard`, `mlflow`, `wandb`; see
    [trackers](trackers.md).
    """

    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Random seed, which fixes every decision of the search."""

    prune: bool = True
    """Whether a trial is stopped after its first steps if it is clearly slower than the best. The first trial and that
    of the current configuration are never stopped.
    """

    repeats: Annotated[int, Field(ge=0, le=100)] | None = None
    """Number of further trials of each of the two or three fastest configurations, in turn (replication). They run if
    nothing else is left to try and the fastest cannot be told apart, and they count as trials.

    Default: `2` if trials train, else `0`
    """

    acquisition: Literal["expected_loss", "draws", "thompson", "ucb", "ei_per_second"] = "expected_loss"
    """Acquisition function, which chooses the next trial: `expected_loss` (the candidate after whose trial the best one
    tried is expected to be least behind the fastest), `draws` (uniformly over the draws whose fastest candidate is
    untried), `thompson` (the fastest untried candidate of one draw), `ucb` (lowest confidence bound) or
    `ei_per_second` (expected improvement per second of trial).
    """

    rehearse: Literal["leaders", "off"] | None = None
    """Whether candidates are [rehearsed](rehearsal.md#in-a-search) before their trials: `leaders` runs the program of
    those that are likely to be tried next on this machine's CPU, without a device and behind a boundary. Refused ones
    are dropped, and so are those that need more memory than there is. Neither is a trial.

    Default: `leaders` if trials run a command whose interpreter and torch are on this machine, else `off`
    """

    baseline: bool | None = None
    """Whether the first trial runs the configuration that an engineer would write by hand, with which the result is
    compared. It is the candidate that fits with the least tp·pp, tp first up to a host, then pp, with the least ep and
    mbs, and with dp as the rest ([tuner/forecast/baseline.py](../tuner/forecast/baseline.py)).

    Default: `true` if trials train and there is no `current`, else `false`
    """


ObjectiveName = Literal["step_time", "cost_per_token", "energy_per_token", "memory"]


class MeasuredKeys(DocumentedModel):
    """`measured:`."""

    step_time_s: Annotated[float, Field(gt=0)]
    """Time of one optimizer step with `current` [s], after the first steps."""

    peak_memory_gib: Annotated[float, Field(gt=0)] | None = None
    """Peak memory of its fullest device [GiB], reserved memory if you have it.

    Default: not measured
    """

    source: Annotated[str, Field(min_length=1, max_length=1000)]
    """Where the measurement comes from, for example the name of a log. It is shown with the trial."""


LONGEST_NAME = 128


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or len(name) > LONGEST_NAME:
        raise ValueError("must be up to 128 letters, digits, dots, dashes and underscores, a letter or digit first")
    return name


class OwnModelKeys(DocumentedModel):
    """`model:` of a study of a training step of your own."""

    jax: Annotated[str, Field(min_length=3)] | None = None
    """Factory as `module:factory`, which is imported from the study file's folder or from the working directory. It
    takes no arguments, or the number of `micro_batches`, and returns a function, its abstract arguments, and the names
    of the arguments whose memory the outputs reuse.

    Default: none; one of the two keys is needed
    """

    torch: Annotated[str, Field(min_length=3)] | None = None
    """Factory of a torch module, which is imported in the same way. It takes the same, and returns the module, a tuple
    of its inputs, and perhaps a loss function and a function that makes an optimizer of the parameters.

    Default: none; one of the two keys is needed
    """


class TracedModelKeys(DocumentedModel):
    """`model:` of a study whose model transformers builds."""

    transformers: Annotated[str, Field(min_length=1)]
    """Path to a Hugging Face `config.json`, or to its directory. transformers and torch must be installed; they build
    the model without weights, and run a layer of each kind without values.
    """


class StudyKeys(DocumentedModel):
    """A study file."""

    name: Annotated[str, AfterValidator(_checked_name)]
    """The study's name in its storage: letters, digits, dots, dashes, underscores."""

    model: str | OwnModelKeys | TracedModelKeys | None = None
    """Name in the catalog, or path to a YAML file, to a Hugging Face `config.json`, or to its directory
    ([models](models.md)); or `{transformers: config.json}`, which transformers itself builds and which is traced; or
    `{jax: module:factory}` or `{torch: module:factory}`, a training step of your own ([own-step.md](own-step.md)),
    which needs no `job` and no `runtime`.
    Required, except for a replay, which takes it from its rows.
    """

    cluster: dict[str, Any]
    """Cluster that the job runs on, in one of four forms."""

    job: JobKeys | None = None
    """Training job: the work of one optimizer step. Required, except for a replay."""

    runtime: str = "megatron-core"
    """Profile of the training framework: a name in the table of runtimes below, or the path to a YAML file that
    `meshtune calibrate` wrote. `unknown` stands for a framework without a profile: the trials then tell which profile
    its steps resemble.
    """

    facts: dict[str, Any] = Field(default_factory=dict)
    """What is known of your program beyond the profile of its runtime, such as `{dispatcher: hybridep,
    overlaps_experts: true}`; see [facts of a run](facts.md). `meshtune init` writes what a script or a log says.

    Default: what the profile says
    """

    space: SpaceKeys = SpaceKeys()
    """Configurations that are searched.

    Default: all that the rules allow
    """

    planner: PlannerKeys = PlannerKeys()
    """Planner that shards the layers of candidates.

    Default: `{name: auto}`
    """

    search: SearchOptions = SearchOptions()
    """Options of the search, and conditions under which it ends.

    Default: those of its keys
    """

    objective: ObjectiveName | Annotated[list[ObjectiveName], Field(min_length=1, max_length=2)] = "step_time"
    """What the study minimizes: `step_time`, `cost_per_token` or `energy_per_token`, or two of these and `memory`, as
    `[step_time, memory]`, of which it searches the Pareto front; see [costs](costs.md#what-a-study-minimizes).
    """

    cost: CostKeys = CostKeys()
    """Prices of device-hours, which `meshtune rank --tokens` and `meshtune estimate` multiply; see [costs](costs.md).

    Default: no prices
    """

    limits: Limits = Limits()
    """Limits of the whole training: a deadline, a budget, and the memory that must stay free.

    Default: none
    """

    current: dict[str, Any] | None = None
    """Configuration in use today, which is the first trial and never pruned; degrees left out are 1."""

    measured: MeasuredKeys | None = None
    """Measurement of `current` that you already have, for example from the log of a training (`meshtune init
    --from-log` writes it). It counts as the first trial, for the confidence and for `max_trials`, and takes no devices.
    Once counted it stays: a later change of this key has no effect. It needs trials that train for real.

    Default: `current` is measured by the first trial
    """

    trial: TrialKeys = DEFAULT_TRIAL
    """Backend that runs the trials, and its keys.

    Default: `{backend: simulated}`
    """

    storage: str | None = None
    """URL of the results: `sqlite:///FILE`, `postgresql://...` or `journal:///FILE`, see [storage](storage.md).
    `MESHTUNE_STORAGE` replaces it, and `--storage` replaces both.

    Default: the database `meshtune.db` beside the study file
    """

    history: list[str] = Field(default_factory=list)
    """Earlier measurements: database URLs of studies, and CSV files as in
    [configs/measured](../configs/measured/README.md).
    """
