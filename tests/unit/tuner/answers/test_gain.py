from dataclasses import replace

import pytest

from tests.support.studies.broken_studies import study
from trials.backend import Observation, Status
from tuner.answers.gain import Known, compared_of, gains
from tuner.answers.reference import Reference
from tuner.search.gain import KnownGain
from tuner.storage.record import TrialRecord
from tuner.study_file.config import load_study


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A study whose current configuration fits."""
    path = tmp_path_factory.mktemp("compared") / "study.yaml"
    path.write_text(study(current="{tp: 8}"), encoding="utf-8")
    return load_study(path)


def reference_of(config, **degrees):
    """A current configuration with those degrees."""
    chosen = config.problem.config_of({"tp": 8, **degrees})
    return Reference(role="current", config=chosen, values=chosen.values(config.problem.dimensions))


def trial(config, number, status=Status.OK, step_times_s=(), **degrees):
    """A trial that has ended."""
    observation = Observation(status=status, step_times_s=step_times_s)
    return TrialRecord(
        number=number,
        params=config.problem.config_of({"tp": 8, **degrees}).values(config.problem.dimensions),
        finished=True,
        status=status,
        step_time_s=observation.step_time_s,
        predicted_s=None,
        prediction={},
        observation=observation,
        proxy=None,
        p_star=None,
        end_order=(number, 0.0, number),
        started_at=None,
        ended_at=None,
    )


@pytest.mark.parametrize(
    ("status", "step_times_s", "known", "words"),
    [
        (Status.OUT_OF_MEMORY, (), Known.FAILED, "does not run (it ran out of memory in trial 0)"),
        (Status.OUT_OF_MEMORY, (3.0,), Known.FAILED, "does not run (it ran out of memory in trial 0)"),
        (Status.CRASHED, (), Known.FAILED, "does not run (it crashed in trial 0)"),
        (Status.TIMEOUT, (), Known.FAILED, "does not run (it reached the time limit before a step ended in trial 0)"),
        (Status.TIMEOUT, (3.0,), Known.CUT_OFF, ""),
        (Status.PRUNED, (3.0,), Known.CUT_OFF, ""),
        (Status.INCIDENT, (), Known.PREDICTED, ""),
        (Status.CANCELLED, (), Known.PREDICTED, ""),
        (Status.OK, (3.0,), Known.MEASURED, ""),
    ],
)
def test_how_a_reference_ended_decides_whether_anything_is_compared(config, status, step_times_s, known, words):
    """Only a reference that runs, or may run for all that is known, has a gain; the others say why they have none."""
    first, best = trial(config, 0, status, step_times_s), trial(config, 1, step_times_s=(2.0,), tp=4, dp=2)
    reference = reference_of(config)
    kept = KnownGain(best=best.params, reference=dict(reference.values), median=1.4, low=1.2, high=1.7, trials=2)

    found = compared_of(config.problem, reference, [first, best], best, kept)

    assert (found.known, found.reason) == (known, words)
    assert (found.gain, found.interval) == ((None, None) if words else (1.4, (1.2, 1.7)))
    assert found.measured_gain == (1.5 if known is Known.MEASURED else None)
    assert bool(found.not_compared) == bool(words)
    assert gains(found)["reference"]["known"] == known.value


def test_a_reference_that_ran_once_runs(config):
    """A failure beside a completed trial does not count against it."""
    trials = [trial(config, 0, Status.CRASHED), trial(config, 1, step_times_s=(3.0,))]

    assert compared_of(config.problem, reference_of(config), trials, trials[1], None).known is Known.MEASURED


def test_a_reference_that_is_predicted_not_to_fit_is_not_compared(config):
    """Without a trial the prediction decides, and the reason tells what is needed and what there is."""
    wide = config.problem.config_of({"tp": 1, "dp": 8, "mbs": 2})
    reference = Reference(role="current", config=wide, values=wide.values(config.problem.dimensions))
    best = trial(config, 0, step_times_s=(2.0,))

    found = compared_of(config.problem, reference, [best], best, None)

    assert found.known is Known.MISFIT
    assert "is predicted not to fit in memory (" in found.not_compared
    assert "GiB of 79.1 GiB): nothing" in found.not_compared
    assert found.gain is None


def test_a_gain_over_other_configurations_does_not_count(config):
    """A kept gain of an earlier best or another reference gives way to the ratio of measured steps."""
    first, best = trial(config, 0, step_times_s=(3.0,)), trial(config, 1, step_times_s=(2.0,), tp=4, dp=2)
    reference = reference_of(config)
    kept = KnownGain(best=first.params, reference=dict(reference.values), median=9.0, low=8.0, high=10.0, trials=1)

    found = compared_of(config.problem, reference, [first, best], best, kept)

    assert (found.gain, found.interval) == (1.5, None)
    assert compared_of(config.problem, None, [first, best], best, replace(kept, best=best.params)) is None
