"""The benchmark of the event simulator: which configurations it draws, what it says of their differences, its speed."""

from functools import partial

import numpy as np
import pytest

from benchmarks.judges import simulator
from benchmarks.judges.simulator import CAUSES, STUDIES, Compared, _draw_tasks, _feasible, agreement, compared
from costmodels.job.parallel_config import ParallelConfig
from costmodels.step.breakdown import BREAKDOWN

SMALL = next(path for path in STUDIES if path.stem == "llama2-34b-16")
"""The study with the fewest feasible configurations."""
OTHER = next(path for path in STUDIES if path.stem == "llama-13b-8")


@pytest.fixture
def one_timing(monkeypatch):
    """One case is timed: nothing contends, so it is quick."""
    case = next(simulator._speed_cases())
    monkeypatch.setattr(simulator, "_speed_cases", lambda: iter([case]))


@pytest.fixture
def told(answered):
    """Runs the benchmark in one process; its object."""
    return partial(answered, simulator, "--workers", "1", "--repeats", "1")


def of_difference(difference, **left):
    """A configuration with such a difference, all of it in the bubble."""
    parts = dict.fromkeys(BREAKDOWN, 0.0) | {"bubble": difference or 0.0}
    return Compared(study="some", config=ParallelConfig(pp=2), difference=difference, parts=parts, left=left)


def test_every_study_gives_its_share_and_a_small_one_all_it_has():
    """The number asked for is drawn, each configuration once, and as many of each study as it can give."""
    tasks = list(_draw_tasks([SMALL, OTHER], 40, seed=0))
    of_study = {path: [at for task in tasks if task.study == path for at in task.positions] for path in (SMALL, OTHER)}

    assert sorted(of_study[SMALL]) == list(range(len(_feasible(SMALL).grid)))
    assert sum(map(len, of_study.values())) == 40
    assert all(len(set(own)) == len(own) for own in of_study.values())
    assert tasks == list(_draw_tasks([SMALL, OTHER], 40, seed=0))
    assert tasks != list(_draw_tasks([SMALL, OTHER], 40, seed=1))


def test_a_slow_first_stage_is_no_difference():
    """Both models know what the first of two stages hides of the second if it is the slower one."""
    known = _feasible(next(path for path in STUDIES if path.stem == "ultrascale-llama-8b-128"))
    config = ParallelConfig(pp=2, tp=32, dp=2, mbs=64, zero_stage=0)
    found = compared("some", known.setting, config, known.memory.take(np.array([0])))

    assert abs(found.difference) < 0.005
    assert not found.left
    assert sum(found.parts.values()) == pytest.approx(found.difference)


def test_figures_are_quantiles_and_shares():
    """Quantiles keep the sign, shares and classes do not, and each far one counts for its cause."""
    left = dict.fromkeys(CAUSES, 0.05) | {"messages": -0.001, "all": 0.0004}
    figures = agreement([of_difference(-0.01), of_difference(0.0), of_difference(0.01), of_difference(0.06, **left)])
    row = next(row for row in figures["classes"] if row["class"] == "pp > 1, vpp = 1")

    assert (figures["quantiles"]["0"], figures["quantiles"]["1"]) == (-0.01, 0.06)
    assert figures["within_2pct"] == row["within_2pct"] == 0.75
    assert (row["beyond"], row["messages"], row["gradients"], row["largest_without_all"]) == (1, 1, 0, 0.0004)
    assert (figures["largest"][0]["part"], figures["largest"][0]["cause"]) == ("bubble", "messages")


@pytest.mark.usefixtures("one_timing")
def test_the_keys_of_the_json(told):
    """Agreement has quantiles, classes and the largest differences; speed has tasks, events and seconds."""
    result = told("--studies", SMALL, "--configs", 3)

    assert result.keys() >= {"seed", "quantiles", "within_2pct", "classes", "largest", "speed"}
    assert result["configurations"] == len(result["largest"]) == 3
    assert result["studies"] == {"llama2-34b-16": 3}
    (row,) = result["speed"]
    assert row["events_per_s"] == pytest.approx(row["events"] / row["seconds"])
    assert row["events"] > row["tasks"] > 0
