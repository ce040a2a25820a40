import json

import pytest

from tests.support.settings.placements import placed_rl
from tuner.place.search.state import finish_s
from tuner.place.timeline import at_work_s, chrome_trace, devices_in_words, events_of, text_timeline


@pytest.fixture(scope="module")
def placed():
    """PPO on 16 devices with a placement of it."""
    return placed_rl()


def test_runs_hold_their_devices_alone(placed):
    """No two runs of different tasks hold a cell at the same time, and each begins after its inputs have ended."""
    problem, state = placed
    runs = {event.module: event for event in events_of(problem, state) if event.kind == "run"}
    names = [module.name for module in problem.workload.modules]
    for one in runs.values():
        for other in runs.values():
            if one is not other and one.cells & other.cells:
                assert one.end_s <= other.start_s + 1e-9 or other.end_s <= one.start_s + 1e-9
    for edge in problem.workload.edges:
        if problem.workload.waits_for(edge):
            assert runs[names[edge.source]].end_s <= runs[names[edge.target]].start_s + 1e-9


def test_phases_fill_their_runs(placed):
    """The phases of a module add up to its run."""
    problem, state = placed
    events = events_of(problem, state)
    for run in [event for event in events if event.kind == "run"]:
        phases = [event for event in events if event.kind == "phase" and event.module == run.module]

        assert sum(one.end_s - one.start_s for one in phases) == pytest.approx(run.end_s - run.start_s)


def test_the_trace_has_a_row_per_device(placed):
    """Every run is a complete event on every cell that it holds, in microseconds."""
    problem, state = placed
    rows = json.loads(chrome_trace(problem, state))["traceEvents"]
    for run in [event for event in events_of(problem, state) if event.kind == "run"]:
        own = [row for row in rows if row["ph"] == "X" and row["name"] == run.name and row["cat"] != "send"]

        assert len(own) == run.cells.bit_count()
        assert {row["ts"] for row in own} == {round(run.start_s * 1e6, 3)}
    ends_s = [(row["ts"] + row["dur"]) / 1e6 for row in rows if row["ph"] == "X"]
    assert max(ends_s) == pytest.approx(finish_s(problem, state))


def test_text_names_devices_and_modules(placed):
    """The timeline of a terminal has a row for each kind of devices, as wide as the others, and a legend."""
    problem, state = placed
    *rows, axis, legend = text_timeline(problem, state, finish_s(problem, state))

    assert len({len(row) for row in rows}) == 1
    assert all(module.name in legend for module in problem.workload.modules)
    assert axis.strip().startswith("0")
    assert 0.5 < at_work_s(problem, state, finish_s(problem, state)) <= 1.0


def test_devices_in_words(placed):
    """Whole hosts and parts of a host are told apart."""
    problem, _ = placed

    assert devices_in_words(problem, problem.whole) == "hosts 0-1"
    assert devices_in_words(problem, 0b1111) == "host 0 devices 0-3"
    assert devices_in_words(problem, problem.whole & ~0b11) == "host 1, host 0 devices 2-7"
