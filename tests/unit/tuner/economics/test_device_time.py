from dataclasses import replace
from types import SimpleNamespace

import pytest

from trials.backend import Observation, Status
from trials.command.backend import CommandBackend
from tuner.answers.gain import Compared, Known
from tuner.answers.reference import Reference
from tuner.economics.device_time import device_time_json, device_time_of, duration, hours, payback_of
from tuner.storage.record import TrialRecord
from tuner.study_file.config import load_study

COMMAND = """
name: timed
model: llama-7b
cluster: {name: dgx-a100, hosts: 1}
job: {sequence_length: 4096, global_batch_size: 64}
current: {tp: 8}
trial: {backend: command, command: [train]}
"""
NUM_DEVICES = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study whose trials take devices."""
    return study_of(tmp_path_factory.mktemp("trained"), COMMAND)


def study_of(folder, text):
    """The study of a text."""
    (folder / "study.yaml").write_text(text)
    return load_study(folder / "study.yaml", storage=f"sqlite:///{folder / 'study.db'}")


def record(config, number=0, *, proxy_devices=0, tp=8, **observed):
    """A trial that has ended; of a smaller job if it says on how many devices."""
    observation = Observation(**({"status": Status.OK} | observed))
    values = config.problem.config_of({"tp": tp}).values(config.problem.dimensions)
    return TrialRecord(
        number=number,
        params=values,
        finished=True,
        status=observation.status,
        step_time_s=observation.step_time_s,
        predicted_s=None,
        prediction={},
        observation=observation,
        proxy=SimpleNamespace(config=SimpleNamespace(num_devices=proxy_devices)) if proxy_devices else None,
        p_star=None,
        end_order=(number, 0.0, number),
        started_at=None,
        ended_at=None,
    )


def compared_with(config, reference_s, gain):
    """The best compared with the current configuration, which was measured."""
    reference = Reference(
        role="current", config=config.problem.current, values=config.problem.current.values(config.problem.dimensions)
    )
    return Compared(reference=reference, known=Known.MEASURED, step_time_s=reference_s, gain=gain)


@pytest.mark.parametrize(
    ("observed", "steps_s", "startup_s"),
    [
        ({"step_times_s": (2.0, 2.0), "elapsed_s": 10.0, "measured_after_s": 5.0}, 5.0, 5.0),
        ({"step_times_s": (2.0, 2.0), "elapsed_s": 10.0}, 4.0, 6.0),
        ({"step_times_s": (2.0, 2.0), "elapsed_s": None}, 4.0, 0.0),
        ({"step_times_s": (2.0,), "elapsed_s": 10.0, "measured_after_s": 5.0, "lost_s": 7.0}, 5.0, 12.0),
        ({"status": Status.CRASHED, "elapsed_s": 10.0}, 0.0, 10.0),
        ({"status": Status.INCIDENT, "lost_s": 9.0}, 0.0, 9.0),
        ({"status": Status.PRUNED, "step_times_s": (2.0,), "elapsed_s": 9.0, "measured_after_s": 6.0}, 3.0, 6.0),
        ({"step_times_s": (2.0,), "elapsed_s": 10.0, "measured_after_s": 4.0, "clock": "virtual"}, 6.0, 4.0),
    ],
    ids=["told", "before_it_was_told", "no_wall_clock", "retried", "crashed", "incident", "stopped_early", "virtual"],
)
def test_a_trial_costs_its_devices_for_its_time(trained, observed, steps_s, startup_s):
    """Devices times wall clock count, apart by start-up, however the trial ended and however often it was attempted."""
    found = device_time_of(trained, [record(trained, **observed)])

    assert isinstance(trained.trials.backend, CommandBackend)
    assert found.steps_device_s == pytest.approx(NUM_DEVICES * steps_s)
    assert found.startup_device_s == pytest.approx(NUM_DEVICES * startup_s)
    assert found.device_hours == pytest.approx(NUM_DEVICES * (steps_s + startup_s) / 3600)
    assert found.is_spent


def test_a_smaller_job_costs_its_own_devices(trained):
    """A proxy on two devices costs those two."""
    observed = {"step_times_s": (3.0,), "elapsed_s": 10.0, "measured_after_s": 7.0}

    assert device_time_of(trained, [record(trained, proxy_devices=2, **observed)]).device_s == pytest.approx(20.0)


def test_running_trials_cost_nothing_yet(trained):
    """A trial counts once it has ended."""
    running = replace(record(trained, step_times_s=(1.0,)), finished=False, observation=None)

    assert device_time_of(trained, [running]).device_s == 0


def test_the_gain_pays_back_after_whole_steps(trained):
    """Each step saves the difference on every device, and the last step that is needed counts whole."""
    slow = record(trained, 0, step_times_s=(3.0,), elapsed_s=10.0)
    fast = record(trained, 1, tp=4, step_times_s=(2.0,), elapsed_s=10.5)

    compared = compared_with(trained, 3.0, 1.5)

    found = payback_of(trained, compared, [slow, fast])

    assert (found.steps, found.seconds) == (21, 42.0)  # 20.5 s on each device, a second saved a step
    told = device_time_json(trained, compared, [slow, fast])
    assert told["payback_steps"] == 21
    assert told["device_hours"] == pytest.approx(NUM_DEVICES * 20.5 / 3600)
    assert told["startup_device_hours"] == pytest.approx(NUM_DEVICES * 15.5 / 3600)


@pytest.mark.parametrize("gain", [1.0, None], ids=["no_gain", "no_best"])
def test_without_a_gain_nothing_pays_back(trained, gain):
    """Where the best is what is compared with, or there is none, no number of steps is told."""
    slow = record(trained, step_times_s=(3.0,), elapsed_s=10.0)

    assert payback_of(trained, compared_with(trained, 3.0, gain), [slow]) is None
    assert payback_of(trained, None, [slow]) is None


def test_steps_of_another_clock_pay_nothing_back(trained):
    """Seconds of a virtual clock are not those by which trials are paid."""
    virtual = replace(trained, backend=SimpleNamespace(clock="virtual", trains=True))

    assert payback_of(virtual, compared_with(trained, 3.0, 1.5), [record(trained, step_times_s=(3.0,))]) is None


def test_a_simulated_trial_is_told_as_what_it_would_have_cost(tmp_path):
    """Simulated trials take no devices: their steps count as if they had, and of start-up nothing is known."""
    config = study_of(tmp_path, COMMAND.replace("{backend: command, command: [train]}", "{backend: simulated}"))
    found = device_time_of(config, [record(config, step_times_s=(2.0, 3.0), elapsed_s=0.01)])

    assert found.device_s == NUM_DEVICES * 5.0
    assert found.startup_device_hours is None
    assert not found.is_spent


def test_times_are_told_in_units_to_plan_by():
    """Device-hours keep three digits, and a time takes the largest unit that it fills twice."""
    assert [hours(3600 * size) for size in (0, 0.12345, 12.345, 12345)] == ["0", "0.123", "12.3", "12,345"]
    assert [duration(seconds) for seconds in (5, 130, 7300, 200_000)] == ["5 s", "2.2 min", "2.0 hours", "2.3 days"]
