"""Count trials that run out of memory or crash, on stand-ins of clusters and on published sweeps with failures.

    python -m benchmarks.search.failing_trials [--worlds 64,16] [--measured C.csv ...] [--seeds 5] [--trials N] [--json]

Two worlds are made up. Their programs need memory of which the cost model knows nothing:

- 64: a model of 32 billion parameters on 64 H100. A device needs 560 GiB over tp*pp, 22 GiB for each sequence of a
  micro-batch over tp*cp*up, and 9 GiB, and has 78. The log reports its peak. A step has a bubble, and costs of tp,
  cp*up and vpp. The study knows the layout that runs today.
- 16: a model of two small layers on 16 CPU cores. Micro-batches above two run out of memory, and more than two stages
  crash. The log tells no peak.

Each published sweep (a model on a cluster) is a world in which a trial finds what was measured, or fails as printed;
see sample_efficiency.py, which predicts them alike. A search runs all of its trials, however confident it is.

Columns: share of candidates that fail; of all trials, those that ran out of memory, those that crashed, and those that
ran out after the fourth that did; trials to within 5, 2 and 1% of the best, medians over seeds (- where fewer than half
got there); seconds per suggestion, the conclusions of its trial included, and in the slowest.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.support.problems import problem_of, read_groups
from benchmarks.support.searchers import Thompson, thompson
from benchmarks.support.timing import benchmark_parser, count_at_least, publish, tell
from benchmarks.support.trial_metrics import quantile
from costmodels.job.parallel_config import ParallelConfig
from trials.backend import Observation, Status
from tuner.forecast.planned_candidates import prepare
from tuner.run.studies import make_sampler
from tuner.search.choices import LayoutChoices
from tuner.search.posterior import Posterior
from tuner.search.sampler import ThompsonSampler
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

ROOT = Path(__file__).resolve().parents[2]
FOURTH = 4
NEAR = (0.05, 0.02, 0.01)
"""Slowdowns within which a trial counts as having found the best."""
STEP_ERROR = 0.01
"""Largest deviation of a measured step from the world's own."""

MODELS = {
    "64": """\
name: thirty-two-billion
source: made up
num_layers: 60
hidden_size: 6656
vocab_size: 32128
tied_embeddings: false
norm: rms
num_heads: 52
num_kv_heads: 52
head_dim: 128
ffn_size: 17920
gated_ffn: true
""",
    "16": """\
name: tiny
source: made up
num_layers: 2
hidden_size: 64
vocab_size: 512
tied_embeddings: true
learned_positions: 64
norm: layer
num_heads: 8
num_kv_heads: 8
head_dim: 8
ffn_size: 256
gated_ffn: false
qkv_bias: true
attention_output_bias: true
mlp_bias: true
""",
}
STUDIES = {
    "64": """\
name: failing-trials
model: model.yaml
cluster: {{name: dgx-h100, hosts: 8}}
job: {{sequence_length: 4096, global_batch_size: 512, precision: bf16, recompute: none, zero_stage: 1}}
runtime: megatron-core
current: {{pp: 4, tp: 4, dp: 4, cp: 1, up: 1, vpp: 1, ep: 1, mbs: 1}}
search: {{seed: {seed}, confidence: 1, rehearse: off}}
trial: {{backend: command, command: [python3, program.py, "{{flags}}"], flags: megatron, launch: once, log: megatron}}
""",
    "16": """\
name: failing-trials
model: model.yaml
cluster: {{device: cpu-core, hosts: 4, devices_per_host: 4}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32}}
runtime: megatron-core
search: {{seed: {seed}, confidence: 1, rehearse: off}}
trial:
  backend: command
  command: [python3, program.py, "{{pp}}", "{{tp}}", "{{dp}}", "{{mbs}}"]
  log: {{pattern: ['step (?P<iteration>\\d+) took (?P<step_ms>[\\d.]+) ms']}}
""",
}
TRIALS = {"64": 40, "16": 20}
"""Trials of a search; of a published sweep 40, or half of its candidates."""


def _outcome_64(config: ParallelConfig, noise: np.random.Generator) -> Observation:
    tp, pp, cp = config.tp, config.pp, config.cp * config.up
    needed_gib = 560 / (tp * pp) + 22 * config.mbs / (tp * cp) + 9
    if needed_gib > 78:
        return Observation(status=Status.OUT_OF_MEMORY, reason="CUDA out of memory", origin="synthetic")
    # Megatron-LM's schedule interleaves where the layers divide evenly
    vpp = config.vpp if 60 % (pp * config.vpp) == 0 else 1
    bubble = 1 + (pp - 1) / (512 // (config.dp * config.mbs) * vpp)
    costs = 1 + 0.02 * (tp - 1) + 0.03 * (cp - 1) + 0.01 * (vpp - 1)
    step_s = 40.0 * bubble * costs * (1.0 if config.mbs > 1 else 1.06)
    return Observation(
        status=Status.OK,
        step_times_s=tuple((step_s * noise.uniform(1 - STEP_ERROR, 1 + STEP_ERROR, 5)).tolist()),
        peak_memory_bytes=round(needed_gib * 2**30),
        origin="synthetic",
    )


def _outcome_16(config: ParallelConfig, noise: np.random.Generator) -> Observation:  # noqa: ARG001 # as the other world's
    if config.mbs > 2:
        return Observation(status=Status.OUT_OF_MEMORY, reason="CUDA out of memory", origin="synthetic")
    if config.pp > 2:
        return Observation(status=Status.CRASHED, reason="no such stage", origin="synthetic")
    step_s = 0.05 * config.tp + 0.04 * config.pp + 0.02 / config.mbs
    return Observation(status=Status.OK, step_times_s=(step_s,) * 4, origin="synthetic")


OUTCOMES = {"64": _outcome_64, "16": _outcome_16}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """Candidates with the outcomes of their trials.

    Attributes:
        name: Name of the world.
        posterior: What is believed of the candidates before any trial.
        searcher: Function that returns a fresh searcher for a seed.
        outcome: Function that returns what a trial of a candidate observes.
        step_time_s: True step times of the candidates [n]; infinite where they fail [s].
        trials: Trials of a search.
    """

    name: str
    posterior: Posterior
    searcher: Callable[[int], Thompson]
    outcome: Callable[[int, np.random.Generator], Observation]
    step_time_s: np.ndarray
    trials: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each world."""
    parser = benchmark_parser("search.failing_trials", __doc__)
    parser.add_argument("--worlds", default=",".join(MODELS), help="comma-separated made-up worlds (64,16)")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="files of published runs")
    parser.add_argument("--min-candidates", type=count_at_least(2), default=20, help="smallest sweep (20)")
    parser.add_argument("--seeds", type=count_at_least(1), default=5)
    parser.add_argument("--trials", type=count_at_least(1), default=None, help="trials of each search")
    given = parser.parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    worlds = [made_up(name) for name in given.worlds.split(",") if name]
    if given.measured:
        worlds += published(given.measured, given.min_candidates)
    rows = []
    for world in worlds:
        rows.append(_row(world, [_search(world, seed, given.trials or world.trials) for seed in range(given.seeds)]))
        tell(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
    publish(rows, as_json=given.json)
    return 0


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _sampler(name: str, seed: int) -> ThompsonSampler:
    folder = Path(_folder().name)
    (folder / "model.yaml").write_text(MODELS[name], encoding="utf-8")
    (folder / "study.yaml").write_text(STUDIES[name].format(seed=seed), encoding="utf-8")
    request = load_study(folder / "study.yaml", storage=f"sqlite:///{folder}/{name}-{seed}.db")
    return make_sampler(prepare(request, StoredStudies(request.storage), runs=True))


def made_up(name: str) -> World:
    """Return a made-up world."""
    sampler = _sampler(name, 0)
    grid, choices = sampler.candidates, sampler.choices
    assert isinstance(choices, LayoutChoices), "no knob is searched"
    configs = [grid.config(position) for position in range(len(grid))]
    # a generator that always returns the middle has no noise
    truth = [OUTCOMES[name](config, _Middle()) for config in configs]  # type: ignore[arg-type] # it stands in for one
    return World(
        name=name,
        posterior=choices.posterior,
        searcher=lambda seed: Thompson(_sampler(name, seed)),
        outcome=lambda position, noise: OUTCOMES[name](configs[position], noise),
        step_time_s=np.array([each.step_time_s or math.inf for each in truth]),
        trials=TRIALS[name],
    )


class _Middle:
    """Source of chance that always returns the middle."""

    def uniform(self, low: float, high: float, size: int) -> np.ndarray:
        """Return the middle of a range, so many times."""
        return np.full(size, (low + high) / 2)


def published(paths: Sequence[Path], min_candidates: int) -> list[World]:
    """Return the published sweeps of some files in which something failed."""
    groups = [group for group in read_groups(paths, min_candidates)[0] if np.isinf(group.step_time_s).any()]
    problems = [problem_of(group, ()) for group in groups]
    return [
        World(
            name=" ".join(map(str, group.key[1:4])),
            posterior=problem.posterior,
            searcher=partial(thompson, problem),
            outcome=lambda position, _, group=group: group.outcomes[position],
            step_time_s=group.step_time_s,
            trials=min(40, len(group.runs) // 2),
        )
        for group, problem in zip(groups, problems, strict=True)
    ]


def _search(world: World, seed: int, trials: int) -> dict[str, Any]:
    """Return the statuses of a search's trials, their true step times, and the time of each suggestion."""
    searcher, noise = world.searcher(seed), np.random.default_rng(seed)
    tried, statuses, taken_s = [], [], []
    for _ in range(min(trials, len(world.step_time_s))):
        begin = time.perf_counter()
        position = searcher.ask()
        outcome = world.outcome(position, noise)
        searcher.tell(position, outcome)
        taken_s.append(time.perf_counter() - begin)
        tried.append(position)
        statuses.append(outcome.status)
    return {"times_s": world.step_time_s[tried], "statuses": statuses, "taken_s": taken_s}


def _row(world: World, searches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    short = [[status is Status.OUT_OF_MEMORY for status in search["statuses"]] for search in searches]
    crashed = [status is Status.CRASHED for search in searches for status in search["statuses"]]
    total = sum(map(len, short))
    best_s, near = world.step_time_s.min(), {}
    for slowdown in NEAR:
        first = [_first(search["times_s"] <= (1 + slowdown) * best_s) for search in searches]
        middle = quantile(first, 0.5)
        near[f"to_{slowdown:.0%}"] = middle if math.isfinite(middle) else None
    return {
        "world": world.name,
        "candidates": len(world.step_time_s),
        "fail": f"{np.isinf(world.step_time_s).mean():.0%}",
        "trials": total,
        "out_of_memory": f"{sum(map(sum, short)) / total:.1%}",
        "by_seed": "/".join(str(sum(each)) for each in short),
        "after_fourth": sum(max(sum(each) - FOURTH, 0) for each in short),
        "crashed": f"{sum(crashed) / total:.1%}",
        **near,
        "seconds": round(float(np.mean([second for search in searches for second in search["taken_s"]])), 3),
        "slowest": round(max(second for search in searches for second in search["taken_s"]), 2),
    }


def _first(is_near: np.ndarray) -> float:
    return float(np.argmax(is_near)) + 1 if is_near.any() else math.inf


if __name__ == "__main__":
    sys.exit(main())
