"""The assignment benchmark: a row for each file, with the contest's score where the best known cost is known."""

import argparse
import json

import pytest

from benchmarks.assignment import __main__ as assignment

PROBLEM = {
    "name": "two",
    "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[5, 1], [2, 3]], "usages": [[1, 4], [2, 2]]},
    "edges": {"nodes": [[0, 1]], "costs": [[0, 7, 2, 0]]},
    "usage_limit": 5,
}


@pytest.mark.parametrize(("name", "score"), [("mine", None), ("asplos-2025-iopddl-G", 217_039 / 7)])
def test_each_file_has_a_row(answered, tmp_path, name, score):
    """Cost and bound are the optimum that hand calculation gives; a score stands where the name is a contest file's."""
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({"problem": PROBLEM}), encoding="utf-8")
    (row,) = answered(assignment, str(file), "--time-limit", 2)["rows"]

    assert (row["cost"], row["bound"], row["feasible"]) == (
        7.0,
        7.0,
        True,
    )  # the first node's other strategy holds too much
    assert row["score"] == score


@pytest.mark.parametrize("seeds", [1, 4])
def test_the_spread_over_seeds_is_that_of_the_rows(answered, tmp_path, seeds):
    """Best and worst are the least and the largest cost of the rows, the median is one of them, and points add up."""
    files = [tmp_path / "asplos-2025-iopddl-G.json", tmp_path / "asplos-2025-iopddl-B.json", tmp_path / "mine.json"]
    for file in files:
        file.write_text(json.dumps({"problem": PROBLEM}), encoding="utf-8")
    figures = answered(assignment, *map(str, files), "--time-limit", 2, "--seeds", seeds, "--cpu")

    for summary in figures["instances"]:
        costs = [row["cost"] for row in figures["rows"] if row["instance"] == summary["instance"]]
        assert len(costs) == seeds == summary["seeds"]
        assert (summary["best"], summary["worst"]) == (min(costs), max(costs))
        assert summary["median"] in costs
        assert 0.0 < summary["feasible_s"] <= 2.0
    assert figures["points"] == {"of": 2, **dict.fromkeys(("median", "best", "worst"), 217_039 / 7 + 532_843 / 7)}


def test_a_run_without_an_assignment_is_the_worst(tmp_path):
    """Where no assignment is feasible, costs and times are missing and the points are none."""
    lean = {**PROBLEM, "usage_limit": 2}
    file = tmp_path / "asplos-2025-iopddl-G.json"
    file.write_text(json.dumps({"problem": lean}), encoding="utf-8")
    (summary,) = assignment.measure(assignment_arguments(file))["instances"]

    assert (summary["median"], summary["worst"], summary["feasible_s"]) == (None, None, None)
    assert summary["worst_points"] == 0.0


def assignment_arguments(file):
    """Return the parsed arguments of a short run."""
    return argparse.Namespace(files=[file], time_limit=2, cpu=True, seeds=1)
