"""The benchmark that counts trials: its groups and problems, its figures, its searchers and its command line."""

import math
from functools import partial

import numpy as np
import pytest
from optuna.samplers import PartialFixedSampler, RandomSampler
from optuna.trial import TrialState

from benchmarks.search import sample_efficiency
from benchmarks.support import peers
from benchmarks.support.problems import Problem, groups_of, problem_of, read_runs, stranger_to
from benchmarks.support.searchers import run_trials
from benchmarks.support.trial_metrics import Trials, is_stopped_on_best, quantile, regret_at, share_explored, trials_to
from costmodels.calibration.fidelity import GROUP
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.surrogates.predicted import Predicted
from tests.support.benchmark_runs import FAILED, RUNS, TIMES_S
from trials.backend import Observation, Status
from tuner.search.posterior import posterior_of

FIGURES = {
    "median_trials_to_5pct",
    "p90_trials_to_5pct",
    "median_trials_to_2pct",
    "median_trials_to_0pct",
    "mean_regret_at_1",
    "mean_regret_at_3",
    "mean_regret_at_5",
    "mean_regret_at_10",
    "share_stopped_on_best",
    "median_share_explored",
    "median_share_of_feasible_explored",
    "median_trials_at_stop",
    "seconds_per_trial",
}
OF_THE_STOP = {
    "share_stopped_on_best",
    "median_share_explored",
    "median_share_of_feasible_explored",
    "median_trials_at_stop",
}
NEEDED = [  # the core installs without the peers' libraries: `missing` names the one and how to get it
    pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=f"{name} {why}"))
    for name in sample_efficiency.SEARCHERS
    for why in [peers.missing(name) or ""]
]


@pytest.fixture
def told(answered):
    """Runs the benchmark in one process; its object."""
    return partial(answered, sample_efficiency, "--workers", "1")


def grouped(*paths, min_candidates=2):
    """The only group of some files."""
    (group,), _ = groups_of(read_runs(paths)[0], min_candidates)
    return group


# What a trial of each candidate finds


def test_failed_candidates_of_the_file_beside_are_in_the_space(write):
    """`NAME_failed.csv` beside `NAME.csv` is read without being named, and what failed there is a candidate."""
    path = write("runs.csv", *RUNS)
    write("runs_failed.csv", *FAILED)
    group = grouped(path)

    assert np.isinf(group.step_time_s).sum() == 2
    assert sorted(group.step_time_s)[: len(TIMES_S)] == sorted(TIMES_S)
    assert {outcome.status for outcome in group.outcomes} == {Status.OK, Status.OUT_OF_MEMORY}


def test_repeated_configurations_are_one_candidate_at_their_median(write):
    """A configuration that was measured three times is tried once, and takes the median."""
    repeats = [{**RUNS[0], "step_seconds": seconds} for seconds in (9.0, 1.6)]
    group = grouped(write("runs.csv", *RUNS, *repeats))

    assert len(group.grid) == len(RUNS)
    assert group.step_time_s[0] == 1.6


# What is known before


def test_cold_predictions_are_those_of_a_stranger(write):
    """Without history neither the source's own profile predicts its runs, nor one that was fitted to them."""
    own = grouped(write("own.csv", *({**run, "source": "flagperf"} for run in RUNS)))
    other = grouped(write("other.csv", *({**run, "source": "ultrascale-playbook"} for run in RUNS)))

    assert problem_of(own, ()).runtime == "nanotron"
    assert problem_of(other, ()).runtime == "megatron-core"
    assert problem_of(other, (), "torchtitan").runtime == "torchtitan"
    assert stranger_to("gpt-neox", "simumax-b200") == "nanotron"


def test_the_right_profile_keeps_what_a_run_states(write):
    """Under the runtime that the runs had, the attention that they state holds; another profile brings its own."""
    fused, unfused = (
        grouped(write(f"{number}.csv", *({**run, "notes": notes} for run in RUNS)))
        for number, notes in enumerate(("", "unfused attention"))
    )

    right = [problem_of(group, (), "megatron-core").predicted_s for group in (fused, unfused)]
    other = [problem_of(group, (), "nanotron").predicted_s for group in (fused, unfused)]
    assert np.all(right[1] > 1.02 * right[0])
    assert np.array_equal(*other)


def test_history_fits_the_sources_own_runtime(write):
    """Runs of another model, half as slow again as believed, make the predictions of this one slower."""
    half = [{**run, "model": "llama-half", "layers": 16} for run in RUNS]
    believed_s = problem_of(grouped(write("half.csv", *half)), (), "megatron-core").predicted_s
    slow = write("slow.csv", *({**run, "step_seconds": 1.5 * s} for run, s in zip(half, believed_s, strict=True)))
    group = grouped(write("runs.csv", *RUNS))
    cold, warm = problem_of(group, (), "megatron-core"), problem_of(group, read_runs([slow])[0])

    assert (cold.num_history, warm.num_history, warm.runtime) == (0, len(RUNS), "megatron-core")
    assert np.median(warm.predicted_s / cold.predicted_s) == pytest.approx(1.5, rel=0.15)


def test_a_group_is_no_part_of_its_own_history(write):
    """A history that holds the group itself is left without it, and says how many runs were dropped."""
    path = write("runs.csv", *RUNS)
    other = write("other.csv", *({**run, "model": "llama-half", "layers": 16} for run in RUNS))
    group = grouped(path)
    leaky, clean = (problem_of(group, read_runs(paths)[0]) for paths in ([path, other], [other]))

    assert (leaky.num_dropped, clean.num_dropped) == (len(RUNS), 0)
    assert leaky.num_history == clean.num_history
    assert np.array_equal(leaky.predicted_s, clean.predicted_s)


# Figures


STEP_TIME_S = np.array([2.0, math.inf, 1.0, 1.04, 4.0])


@pytest.mark.parametrize(("slowdown", "expected"), [(0.0, 4.0), (0.05, 3.0), (1.0, 2.0)])
def test_trials_are_counted_until_one_is_good_enough(slowdown, expected):
    """Failures count as trials; equality counts as reached."""
    assert trials_to([1, 0, 3, 2, 4], STEP_TIME_S, slowdown) == expected
    assert trials_to([1, 4], STEP_TIME_S, slowdown) == math.inf


def test_regret_before_anything_has_run_is_that_of_the_slowest():
    """Until a trial is timed one has what the slowest candidate would give; then the best so far."""
    regrets = [regret_at([1, 0, 3, 2], STEP_TIME_S, num_trials) for num_trials in (1, 2, 3, 4, 10)]

    assert regrets == pytest.approx([3.0, 1.0, 0.04, 0.0, 0.0])


def test_what_was_tried_at_the_stop():
    """A stop is on the best if a candidate within 2% had been tried; shares count all candidates or those that run."""
    early, late, never = (Trials(order=(1, 3, 2, 0), num_at_stop=at, sampler_s=0.0) for at in (2, 3, None))

    assert [is_stopped_on_best(trials, STEP_TIME_S) for trials in (early, late, never)] == [0.0, 1.0, None]
    assert share_explored(early, STEP_TIME_S, of_feasible=False) == 2 / 5
    assert share_explored(early, STEP_TIME_S, of_feasible=True) == 1 / 4
    assert share_explored(never, STEP_TIME_S, of_feasible=True) is None


def test_quantiles_of_values_that_may_be_infinite():
    """Runs that never got there count as worse than all others, without spoiling the quantiles below them."""
    assert quantile([3.0, 1.0, math.inf], 0.5) == 3.0
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert quantile([1.0, math.inf], 0.5) == math.inf
    assert quantile([math.inf, math.inf], 0.9) == math.inf
    values = np.random.default_rng(0).random(7).tolist()
    assert quantile(values, 0.9) == pytest.approx(np.quantile(values, 0.9))


# Searchers


def problem_on(configs, predicted_s):
    """Candidates of which only a step time each is predicted."""
    grid = ConfigGrid.from_configs(configs)
    predicted = Predicted.of_times(np.asarray(predicted_s), peers.points_of(grid).coordinates)
    return Problem(grid=grid, posterior=posterior_of(predicted, grid), runtime="none", num_history=0, num_dropped=0)


BOWL = [
    ParallelConfig(pp=pp, tp=tp, dp=64 // (pp * tp), mbs=mbs)
    for pp in (1, 2, 4, 8)
    for tp in (1, 2, 4, 8)
    for mbs in (1, 2, 4, 8)
]
BOWL_S = np.array(
    [
        math.inf
        if config.pp * config.tp == 1
        else 1 + math.log2(config.pp / 2) ** 2 + math.log2(config.tp / 4) ** 2 + math.log2(config.mbs / 4) ** 2 / 2
        for config in BOWL
    ]
)
"""A step time with one valley over 64 layouts of 64 devices; those of one device a replica fail."""


def outcomes_of(step_time_s):
    """Return observations with these step times; an infinite time means that the trial runs out of memory."""
    return tuple(
        Observation(status=Status.OK, step_times_s=(seconds,))
        if math.isfinite(seconds)
        else Observation(status=Status.OUT_OF_MEMORY)
        for seconds in step_time_s.tolist()
    )


def searched(name, seed, step_time_s=BOWL_S, problem=None, max_trials=1000):
    """One run of a searcher in the bowl, of which nothing is predicted."""
    problem = problem or problem_on(BOWL, np.ones(len(BOWL)))
    return run_trials(
        sample_efficiency.SEARCHERS[name](problem, seed), outcomes_of(step_time_s), step_time_s, max_trials
    )


@pytest.mark.parametrize("name", NEEDED)
class TestSearcherContract:
    """Every sampler of the benchmark passes these."""

    def test_it_names_each_candidate_once(self, name):
        """A search whose best is the last that would be tried ends with all candidates tried, none twice."""
        problem = problem_on(BOWL[:12], np.linspace(1, 2, 12))
        searcher, outcomes = sample_efficiency.SEARCHERS[name](problem, 0), outcomes_of(BOWL_S[:12])
        order = []
        for _ in range(12):
            order.append(searcher.ask())
            searcher.tell(order[-1], outcomes[order[-1]])

        assert sorted(order) == list(range(12))

    def test_it_gets_over_failures(self, name):
        """A search in which the first trials all fail goes on to the one candidate that runs."""
        step_time_s = np.full(10, math.inf)
        step_time_s[3] = 1.0
        trials = searched(name, 1, step_time_s, problem_on(BOWL[:10], np.ones(10)))

        assert 3 in trials.order

    def test_a_seed_fixes_the_search(self, name):
        """A seed always tries the same candidates in the same order."""
        first, again = (searched(name, 3, max_trials=15).order for _ in range(2))

        assert first == again


@pytest.mark.parametrize("name", [param for param in NEEDED if param.values[0] in ("tpe", "gp", "cmaes", "botorch")])
def test_peers_learn(name):
    """In a valley each peer needs fewer trials than random search in the mean of several seeds."""
    tried = [len(searched(name, seed).order) for seed in range(6)]
    at_random = [len(searched("random", seed).order) for seed in range(200)]

    assert np.mean(tried) < 0.8 * np.mean(at_random)


def test_the_nearest_candidate_is_the_nearest_one_not_yet_tried():
    """A point outside of the candidates is mapped to the nearest in scaled logarithms, and to the next one after it."""
    layouts = ((1, 1), (1, 8), (8, 8), (4, 1))
    configs = [ParallelConfig(pp=pp, tp=8, dp=64 // pp, mbs=mbs) for pp, mbs in layouts]
    points = peers.points_of(ConfigGrid.from_configs(configs))
    wanted, rng = points.at({"pp": 2, "mbs": 0}), np.random.default_rng(0)

    assert wanted == pytest.approx([1, 0])
    assert points.nearest(wanted, set(), rng) == 3
    assert points.nearest(wanted, {3}, rng) in (0, 2)
    assert {points.nearest(wanted, {3}, rng) for _ in range(50)} == {0, 2}
    assert points.nearest(wanted, {0, 2, 3}, rng) == 1


def complete_trials(peer):
    """Return the trials that an Optuna peer has been told, in order."""
    return peer.study.get_trials(states=[TrialState.COMPLETE])


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_peer_is_told_the_candidate_that_was_tried():
    """A result belongs to the candidate that a proposal was mapped to; a failure counts as twice the slowest so far."""
    same_point = PartialFixedSampler({"pp": 0, "tp": 0, "mbs": 0}, RandomSampler(seed=0))
    peer = peers.OptunaPeer(problem_on(BOWL, np.ones(len(BOWL))), 0, same_point)
    outcomes = {0: None, 1: None, 2: 3.0, 3: 2.0, 4: None, 5: 5.0, 6: None}
    tried = []
    for number, seconds in outcomes.items():
        tried.append(peer.ask())
        peer.tell(tried[-1], *outcomes_of(np.array([seconds or math.inf])))
        assert len(complete_trials(peer)) == (0 if number < 2 else number + 1)

    points = peers.points_of(ConfigGrid.from_configs(BOWL))
    assert tried[0] == 0
    assert len(set(tried)) == len(tried)
    assert [trial.params for trial in complete_trials(peer)] == [points.levels_of(position) for position in tried]
    assert np.exp([trial.value for trial in complete_trials(peer)]) == pytest.approx([6, 6, 3, 2, 6, 5, 10])


# The program


def test_the_figures_of_order_and_chance_are_exact(told, write):
    """`prior` goes by predicted step time once; `random` is a permutation for each seed; both cost what they cost."""
    path = write("runs.csv", *RUNS)
    write("runs_failed.csv", *FAILED)
    group = grouped(path)
    problem, times = problem_of(group, ()), group.step_time_s
    result = told("--measured", path, "--samplers", "random,prior", "--seeds", 4, "--min-candidates", 10)

    (entry,) = result["groups"]
    by_prediction = np.lexsort((problem.predicted_s, problem.memory_share > 1)).tolist()
    permutations = [np.random.default_rng(seed).permutation(len(times)).tolist() for seed in range(4)]
    for name, orders in {"prior": [by_prediction], "random": permutations}.items():
        figures, overall = entry["samplers"][name], result["overall"][name]
        for percent in (5, 2, 0):
            needed = [1 + min(o.index(i) for i in np.flatnonzero(times <= 0.95 * (1 + percent / 100))) for o in orders]
            assert figures[f"median_trials_to_{percent}pct"] == np.median(needed)
            assert overall[f"median_trials_to_{percent}pct"] == np.median(needed)
        for num_trials in (1, 3, 5, 10):
            best = [min([t for t in times[o[:num_trials]] if math.isfinite(t)], default=1.5) for o in orders]
            assert figures[f"mean_regret_at_{num_trials}"] == pytest.approx(np.mean(best) / 0.95 - 1)
    assert (entry["num_candidates"], entry["num_failed"], entry["best_step_time_s"]) == (10, 2, 0.95)


def test_the_keys_of_the_json(told, write):
    """Groups say what their runs share; every sampler has every figure, and none where a figure has no meaning."""
    path = write("runs.csv", *RUNS)
    result = told("--measured", path, "--samplers", "thompson,random", "--seeds", 2, "--min-candidates", 2)

    (group,) = result["groups"]
    assert result.keys() == {"groups", "overall", "skipped", "settings"}
    assert group.keys() >= {*GROUP, "num_candidates", "runtime", "samplers"}
    assert list(result["overall"]) == ["thompson", "random"]
    assert all(figures.keys() >= FIGURES for figures in result["overall"].values())
    assert all(figures.keys() >= FIGURES for figures in group["samplers"].values())
    assert {name for name, value in result["overall"]["random"].items() if value is None} == OF_THE_STOP
    assert None not in result["overall"]["thompson"].values()
