"""Trials to the best micro-batch and knobs of a real training on this machine, beside other optimizers.

    python -m benchmarks.search.trained_knobs [--seeds 20] [--peers random,tpe,gp] [--steps 6] [--within 0.02] [--json]

A small GPT is trained by torch in one process (benchmarks/support/torch_knob_program.py), as the command of a study:
three micro-batch sizes, and four knobs: attention, implementation of the optimizer, recomputation, and what happens to
gradients after a step. Every pair is measured once, in an order by chance; its steps are what each search then gets. A
search ends once it has tried a pair whose median step is within --within of the fastest.

Columns: trials in the median and at the 90th percentile over the seeds of the searches, and the share of searches that
got there within all pairs. `knobs` is Meshtune's search; the row `layouts` searches the micro-batch alone, with today's
knobs, for the best of these.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.support.knob_peers import KNOB_PEERS, missing
from benchmarks.support.knob_worlds import KnobProblem
from benchmarks.support.timing import USERS_MISTAKE, count_at_least, publish, tell
from benchmarks.support.trial_metrics import quantile
from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError, did_you_mean
from trials.backend import Observation
from trials.command.backend import COMMAND_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner.forecast.candidates import candidates_of
from tuner.forecast.searched_knobs import searched_knobs
from tuner.search.observations import OBSERVATION
from tuner.search.sampler import ThompsonSampler
from tuner.study_file.config import load_study
from tuner.subject.problem import Problem

PROGRAM = Path(__file__).parents[1] / "support" / "torch_knob_program.py"

MODEL = """
source: that of torch_knob_program.py
assumed: []
num_layers: 4
hidden_size: 128
num_heads: 4
num_kv_heads: 4
head_dim: 32
ffn_size: 512
gated_ffn: false
vocab_size: 1024
tied_embeddings: true
norm: layer
"""

STUDY = """
name: trained-knobs
model: model.yaml
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 1}}
job: {{sequence_length: 64, global_batch_size: 16, precision: fp32}}
current: {{mbs: 1}}
search: {{baseline: false, repeats: 0}}
space:
  mbs: [1, 4, 16]
  knobs:
    - {{name: attention, values: [plain, fused], flag: --attention, affects: [compute]}}
    - {{name: optimizer, values: [loop, foreach, fused], flag: --optimizer, affects: [optimizer]}}
    - {{name: checkpoint, today: true, flag: --checkpoint}}
    - {{name: set_to_zero, today: true, flag: --set-to-zero}}
trial:
  backend: command
  command: ["{python}", "{program}", --mbs, "{{mbs}}", --steps, "{{total_steps}}", "{{knobs}}"]
  launch: once
  environment: {{OMP_NUM_THREADS: "1"}}
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
  warmup_steps: 1
  steps: {steps}
"""

Pair = tuple[int, tuple[int, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.search.trained_knobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=count_at_least(1), default=20, help="searches of each kind; default 20")
    parser.add_argument("--steps", type=count_at_least(1), default=6, help="measured steps of a pair; default 6")
    parser.add_argument("--pairs", type=count_at_least(2), help="pairs to measure, by chance; by default all")
    parser.add_argument("--within", type=float, default=0.02, help="regret that is reach of the best; default 0.02")
    parser.add_argument("--peers", default="", help=f"other optimizers, of {','.join(KNOB_PEERS)}; default none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    peers = [name for name in given.peers.split(",") if name]
    for name in peers:
        if name not in KNOB_PEERS or missing(name):
            nearest = did_you_mean(name, KNOB_PEERS) if name not in KNOB_PEERS else f"install {missing(name)}"
            tell(str(ConfigError("cannot be run here", key="--peers", value=name, nearest=nearest)))
            return USERS_MISTAKE
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        problem = _problem(Path(folder), given.steps)
        known = _measure_all(problem, given.pairs)
    best = min(known, key=lambda pair: _median(known[pair]))
    slowest = max(map(_median, known.values()))
    tell(f"{len(known)} pairs, from {_median(known[best]):.4f} to {slowest:.4f} s; the best: {_words(problem, best)}")
    rows = [
        _row("layouts", [_search_layouts(problem, known, seed, given.within) for seed in range(given.seeds)]),
        _row("knobs", [_search_knobs(problem, known, seed, given.within) for seed in range(given.seeds)]),
    ]
    for name in peers:
        searches = [_search_peer(name, problem, known, seed, given.within) for seed in range(given.seeds)]
        rows.append(_row(name, searches))
    publish(rows, as_json=given.json)
    return 0


def _problem(folder: Path, steps: int) -> KnobProblem:
    """Return the study before its first trial."""
    (folder / "model.yaml").write_text(MODEL, encoding="utf-8")
    path = folder / "study.yaml"
    path.write_text(STUDY.format(python=sys.executable, program=PROGRAM, steps=steps), encoding="utf-8")
    config = load_study(path)
    candidates = candidates_of(config.problem)
    space = searched_knobs(config.problem, candidates)
    assert space is not None, "the study has knobs"
    return KnobProblem(
        config=config,
        candidates=candidates,
        posterior=config.problem.subject.prior(candidates.space.grid, None),
        space=space,
    )


def _measure_all(problem: KnobProblem, count: int | None) -> dict[Pair, Observation]:
    """Measure every pair, or some of them by chance with all layouts at today's knobs among them."""
    config, grid = problem.config, problem.grid
    ranges = [range(len(knob.values)) for knob in problem.space.knobs]
    today = tuple(problem.space.today.tolist())
    pairs = [(layout, codes) for layout in range(len(grid)) for codes in itertools.product(*ranges)]
    np.random.default_rng(0).shuffle(pairs)
    pairs.sort(key=lambda pair: pair[1] != today)
    found: dict[Pair, Observation] = {}
    with RankProcesses(COMMAND_RANKS) as ranks:
        backend = OpenBackend(backend=config.trials.backend, ranks=ranks)
        for number, (layout, codes) in enumerate(pairs[:count]):
            pair = int(layout), tuple(int(code) for code in codes)
            found[pair] = backend.measure(_config(problem, pair), trial_number=number)
            if number % 10 == 9:
                tell(f"measured {number + 1} of {len(pairs[:count])} pairs")
    return {pair: observation for pair, observation in found.items() if observation.step_time_s is not None}


def _config(problem: KnobProblem, pair: Pair) -> ParallelConfig:
    knobs = problem.space.values_of(pair[1])
    return replace(problem.grid.config(pair[0]), knobs=tuple(knobs.items()))


def _search_layouts(problem: KnobProblem, known: Mapping[Pair, Observation], seed: int, within: float) -> float:
    today = tuple(problem.space.today.tolist())
    of_layouts = {pair: observation for pair, observation in known.items() if pair[1] == today}
    sampler = ThompsonSampler(
        problem.grid, problem.posterior, seed=seed, first=_first(problem.config.problem, has_knobs=False)
    )
    return _search(sampler, of_layouts, within, lambda position: (position, today))


def _search_knobs(problem: KnobProblem, known: Mapping[Pair, Observation], seed: int, within: float) -> float:
    sampler = ThompsonSampler(
        problem.grid,
        problem.posterior,
        knobs=problem.space,
        seed=seed,
        first=_first(problem.config.problem, has_knobs=True),
    )
    return _search(sampler, known, within, partial(_pair_of, sampler, problem))


def _first(problem: Problem, *, has_knobs: bool) -> ParallelConfig | None:
    return problem.current and (problem.current if has_knobs else replace(problem.current, knobs=()))


def _pair_of(sampler: ThompsonSampler, problem: KnobProblem, position: int) -> Pair:
    config = sampler.choices.config(position)
    codes = problem.space.codes_of(dict(config.knobs))
    assert codes is not None, "the sampler names values of the knobs"
    return sampler.choices.layout_of(position), codes


def _search(sampler: ThompsonSampler, known: Mapping[Pair, Observation], within: float, pair_of: Any) -> float:
    """Return the number of trials of a search; infinite if it has not got there after as many as there are pairs."""
    study = optuna.create_study(sampler=sampler)
    reach_s = (1 + within) * min(map(_median, known.values()))
    for number in range(len(known)):
        trial = study.ask(fixed_distributions=sampler.search_space)
        position = sampler.position_of(trial.params)
        assert position is not None, "the sampler names candidates only"
        observation = known.get(pair_of(position))
        if observation is None:  # not among the measured pairs
            study.tell(trial, state=TrialState.FAIL)
            continue
        trial.set_user_attr(OBSERVATION, observation.as_json())
        study.tell(trial, _median(observation))
        if _median(observation) <= reach_s:
            return number + 1
    return math.inf


def _search_peer(name: str, problem: KnobProblem, known: Mapping[Pair, Observation], seed: int, within: float) -> float:
    peer = KNOB_PEERS[name](problem, seed)
    reach_s = (1 + within) * min(map(_median, known.values()))
    for number in range(len(known)):
        layout, config = peer.ask()
        codes = problem.space.codes_of(dict(config.knobs))
        assert codes is not None, "a peer names values of the knobs"
        observation = known.get((layout, codes))
        if observation is None:
            continue
        peer.tell(observation)
        if _median(observation) <= reach_s:
            return number + 1
    return math.inf


def _median(observation: Observation) -> float:
    assert observation.step_time_s is not None, "the pair ran"
    return observation.step_time_s


def _words(problem: KnobProblem, pair: Pair) -> str:
    knobs = problem.space.values_of(pair[1])
    return f"mbs={problem.grid.config(pair[0]).mbs}, {', '.join(f'{name}={value}' for name, value in knobs.items())}"


def _row(name: str, trials: Sequence[float]) -> dict[str, Any]:
    return {
        "searcher": name,
        "trials": quantile(trials, 0.5),
        "trials_90": quantile(trials, 0.9),
        "got_there": sum(map(math.isfinite, trials)) / len(trials),
    }


if __name__ == "__main__":
    sys.exit(main())
