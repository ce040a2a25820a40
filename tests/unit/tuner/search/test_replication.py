import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.studies import broken_studies
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.unit.tuner.search.test_observations import failed, observations, ok, trial
from trials.backend import Observation, Status
from tuner.run.loop import run_study
from tuner.search.observations import LEAST_NOISE
from tuner.search.replication import NUM_FINALISTS, finalists, next_replication
from tuner.storage.record import completed_times_s, repeated_trials
from tuner.study_file.config import USUAL_REPEATS, load_study

TOLERANCE = 0.01

KEYS = {
    "model": "llama-7b",
    "space": "{pp: [1, 2], tp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1]}",
    "search": "{draws: 10, confidence: 1.0, repeats: 2, max_trials: 100}",
    "trial": "{backend: simulated}",
}


def steps(median_s, spread=0.0):
    """Three steps around their median."""
    return ok(median_s, median_s * (1 - spread), median_s * (1 + spread))


def test_who_may_be_faster_than_the_best_is_a_finalist():
    """Within two deviations of the difference plus the tolerance a candidate is a finalist, beyond it is none."""
    deviation = math.sqrt(2) * LEAST_NOISE  # of two candidates whose steps are all equal
    close, far = math.exp(2 * deviation - 0.011), math.exp(2 * deviation - 0.009)

    known = observations(trial(0, 1, steps(far)), trial(1, 2, steps(close)), trial(2, 3, steps(1.0)))

    assert finalists(known, TOLERANCE) == (3, 2)


def test_a_clear_best_has_no_finalists():
    """Where nothing is close, or only what was stopped, nothing is measured again; one candidate alone is no call."""
    best, stopped = trial(0, 1, steps(1.0)), failed(Status.PRUNED, 0.99, 1.0, 1.01)

    for known in ((best, trial(1, 2, steps(1.1))), (best, trial(1, 2, stopped)), (best,), ()):
        assert finalists(observations(*known), TOLERANCE) == ()


@given(
    st.lists(st.floats(0.9, 1.1), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0, 0.01, 0.1]), min_size=8, max_size=8),
)
def test_finalists_are_few_and_led_by_the_fastest(times_s, spreads):
    """Whatever was measured, there is no finalist or at least two and at most three, the fastest first."""
    measured = map(steps, times_s, spreads)
    known = observations(*(trial(at, at, one) for at, one in enumerate(measured)))

    found = finalists(known, TOLERANCE)

    assert len(found) in {0, *range(2, NUM_FINALISTS + 1)}
    logs = dict(zip(known.measured.tolist(), known.log_step_s.tolist(), strict=True))
    assert all(logs[first] <= logs[second] for first, second in pairwise(found))
    assert not found or logs[found[0]] == min(logs.values())


def test_finalists_take_turns_until_they_had_their_repeats():
    """The one with the fewest trials is next, the fastest of equals; failures count as turns."""
    first, second = steps(1.0, 0.05), steps(1.001, 0.05)
    known = [trial(0, 5, second), trial(1, 6, first)]
    order = []

    while (position := next_replication(observations(*known), TOLERANCE, repeats=2)) is not None:
        order.append(position)
        ending = failed(Status.INCIDENT) if len(order) == 2 else first if position == 6 else second
        known.append(trial(len(known), position, ending))

    assert order == [6, 5, 6, 5]


class Drifting:
    """Two candidates tie at first sight; all others are clearly slower."""

    def __init__(self):
        self.measured = []

    def measure(self, config, *, trial_number):  # noqa: ARG002 # as the executor calls it
        """As the executor calls it."""
        times_s = {1: (1.0, 1.02, 1.03), 2: (1.001, 1.0, 0.999)}.get(config.tp if config.pp == 1 else 0, (2.0,) * 3)
        time_s = times_s[self.measured.count(config)]
        self.measured.append(config)
        return Observation(status=Status.OK, step_times_s=(0.98 * time_s, time_s, 1.02 * time_s), origin="synthetic")


@pytest.fixture
def study(tmp_path):
    """A function that loads the study."""
    (tmp_path / "study.yaml").write_text(broken_studies.study(**KEYS))
    return lambda *overrides: load_study(
        tmp_path / "study.yaml", overrides=overrides, storage=f"sqlite:///{tmp_path / 'study.db'}"
    )


def run(config, backend, slots=1):
    """Runs a study in this process."""
    return run_study(config, on_progress=lambda _: None, executor=InProcessExecutor(backend, slots))


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3])
def test_a_study_ends_with_its_close_call(study, slots):
    """When all was tried, the two fastest are measured again in turn; the answer is the one that is faster together."""
    backend = Drifting()

    result = run(study(f"search.parallel_trials={slots}"), backend, slots)

    again = backend.measured[result.num_candidates :]
    assert result.stop_reason == "exhausted"
    assert [(config.pp, config.tp) for config in again] == [(1, 1), (1, 2), (1, 2), (1, 1)]
    assert result.best.params["tp"] == 2
    assert result.best.step_time_s == pytest.approx(np.exp(np.mean(np.log([1.001, 1.0, 0.999]))))
    assert {record.params["tp"] for record in repeated_trials(result.records)} == {1, 2}
    assert len(completed_times_s(result.records, result.best.params)) == 3


@pytest.mark.slow
def test_repeats_are_trials_of_the_budget(study):
    """A budget that the search has spent leaves nothing for repeats; a larger one goes on with them."""
    backend = Drifting()
    num_candidates = run(study("search.repeats=0"), backend).num_candidates

    assert len(backend.measured) == num_candidates
    result = run(study(f"search.max_trials={num_candidates + 1}"), backend)
    assert len(result.records) == num_candidates + 1
    assert result.stop_reason == "max_trials"


def test_who_repeats_unless_told(study):
    """Real training is repeated by default; a simulation, whose trials tell the same again, is not."""
    host = "trial={backend: torch}", "runtime=torch-reference", "cluster={name: cpu-host, hosts: 1}"
    torch = study(*host, "search={}", "job.precision=fp32")

    assert study("search={}").search.repeats == 0
    assert torch.search.repeats == USUAL_REPEATS > 0
