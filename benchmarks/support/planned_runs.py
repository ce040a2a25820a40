"""Runs of given sharding plans in real trials, and small models for them that eight ranks of one machine can train."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.support.timing import tell
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import with_layers
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.plan import Plan
from hardware.cluster import Cluster
from hardware.cluster_file import read_described_cluster
from hardware.io.errors import ConfigError
from trials.backend import Observation, Status
from trials.jax_training.framework import JAX
from trials.rank_backend import AbstractRankBackend, OpenBackend
from trials.ranks.processes import RankProcesses
from trials.torch_training.framework import TORCH
from trials.training.planned import PlannedBackend

Kind = Literal["torch", "jax"]
"""Backend that runs plans."""

DEVICES = 8
HEADS = 16
"""Heads of a small model; if the published one has groups, every two heads share a key head."""
STEPS = 5
"""Measured steps of a trial."""
OPTIONS: Mapping[str, Any] = {
    "warmup_steps": 2,
    "min_steps": STEPS,
    "max_steps": STEPS,
    "chosen_clock": "virtual",
    "hang_limit_s": 600.0,
}
"""Options of all backends; processes are silent while XLA compiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Trials of one plan.

    Attributes:
        found: Observations, one of each round.
    """

    found: tuple[Observation, ...]

    @property
    def step_s(self) -> float:
        """Smallest median step time of all rounds, since other programs on the machine only add to it [s]."""
        return min(statistics.median(each.step_times_s) for each in self.found)

    @property
    def loss(self) -> float:
        """Loss of the last step."""
        return dict(self.found[0].conditions)["loss"]

    @property
    def sends_as_planned(self) -> bool:
        """Whether all ranks sent what the plan's list says, byte for byte, as far as the backend counts it."""
        return not any("the plan has" in each.reason for each in self.found)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPlan:
    """Planner of one step: it returns the plan that it was given.

    Attributes:
        given: Plan of the whole step on DEVICES devices.
    """

    given: Plan

    def plan(self, job: TrainingJob, cluster: Cluster, config: ParallelConfig, *, is_by_hand: bool) -> Plan:  # noqa: ARG002 # the contract's
        """Return the plan; see `trials/step_planner.py`."""
        return self.given


def run_plans(kind: Kind, job: TrainingJob, plans: Mapping[str, Plan], *, rounds: int) -> dict[str, Runs]:
    """Run all plans of a job's step, one round after the other, by the backend's virtual clock.

    Args:
        kind: Backend of the trials.
        job: Job whose step the plans shard, in one micro-batch.
        plans: Plans by name, each on DEVICES devices.
        rounds: Number of trials of each plan.

    Raises:
        ConfigError: A trial failed.
    """
    backends = {name: backend_of(kind, job, plan) for name, plan in plans.items()}
    return run_backends(f"{kind} {job.model.name}", backends, sequences=job.global_batch_size, rounds=rounds)


def run_backends(
    title: str, backends: Mapping[str, AbstractRankBackend], *, sequences: int = 1, rounds: int
) -> dict[str, Runs]:
    """Run a trial of each backend, one round after the other.

    Args:
        title: Name of the step in messages.
        backends: Backends of one kind by name, each of which runs one plan.
        sequences: Sequences of the step, which are one micro-batch.
        rounds: Number of trials of each backend.

    Raises:
        ConfigError: A trial failed.
    """
    found: dict[str, list[Observation]] = {name: [] for name in backends}
    # The plan decides; a trial needs the number of ranks and of micro-batches.
    config = ParallelConfig(tp=DEVICES, mbs=sequences)
    with RankProcesses(next(iter(backends.values())).rank_setup) as ranks:
        for _ in range(rounds):
            for name, backend in backends.items():
                one = OpenBackend(backend=backend, ranks=ranks).measure(config, trial_number=0)
                if one.status is not Status.OK:
                    raise ConfigError(f"{title} by {name} failed: {one.reason}\n{one.log_tail}")
                tell(f"{title}, {name}: {statistics.median(one.step_times_s):.4g} s")
                found[name].append(one)
    return {name: Runs(found=tuple(runs)) for name, runs in found.items()}


def backend_of(kind: Kind, job: TrainingJob, plan: Plan) -> AbstractRankBackend:
    """Return the backend that runs a plan."""
    framework = JAX if kind == "jax" else TORCH
    return PlannedBackend(
        framework=framework, job=job, cluster=plan.mesh.cluster, planner=GivenPlan(given=plan), **OPTIONS
    )


def distinct(title: str, plans: Iterable[tuple[str, Plan]]) -> dict[str, Plan]:
    """Return plans by name without those that equal an earlier one, of which a message tells.

    Args:
        title: Name of the step in messages.
        plans: Names and plans of one graph and mesh.
    """
    found: dict[str, Plan] = {}
    for name, plan in plans:
        twin = next((other for other, known in found.items() if (known.served == plan.served).all()), None)
        if twin is None:
            found[name] = plan
        else:
            tell(f"{title}: {name} has the plan of {twin}")
    return found


def sign_of(predicted: float, measured: float, *, tie: float) -> str:
    """Return whether a measured ratio of step times lies on the predicted side of 1; `tie` if it is too near to 1."""
    if abs(measured - 1) < tie:
        return "tie"
    return "agrees" if (predicted < 1) == (measured < 1) else "differs"


def cpu_host() -> Cluster:
    """Return one host of DEVICES processor cores."""
    described = {"name": "cpu-host", "hosts": 1, "devices_per_host": DEVICES}
    return read_described_cluster(described, Path()).cluster


def small(model: ModelSpec, *, hidden_size: int, sequence_length: int, layers: int) -> ModelSpec:
    """Return a published model with another width and few layers; its vocabulary shrinks twice as much as its width."""
    share = hidden_size / model.hidden_size
    kept: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_heads": HEADS,
        "num_kv_heads": HEADS if model.plain.num_kv_heads == model.plain.num_heads else HEADS // 2,
        "head_dim": hidden_size // HEADS,
        "ffn_size": in_steps(model.plain.ffn_size * share),
        "vocab_size": in_steps(model.vocab_size * share / 2),
        "learned_positions": min(model.learned_positions, sequence_length),
    }
    if model.is_moe:
        kept |= {
            "num_experts": 8,
            "top_k": 2,
            "expert_ffn_size": in_steps(model.plain.expert_ffn_size * share),
            "shared_expert_ffn_size": in_steps(model.plain.shared_expert_ffn_size * share),
        }
    return with_layers(model.changed(name=f"small {model.name}", **kept), layers)


def in_steps(size: float) -> int:
    """Return a size as a multiple of 64, which the degrees of all cases divide."""
    return math.ceil(size / 64) * 64
