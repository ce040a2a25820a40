"""The assignment benchmark: a row for each file, with the contest's score where the best known cost is known."""

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


def test_no_file_is_a_mistake_of_the_user(capsys):
    """Without a file the benchmark ends with a sentence that says where some are."""
    assert assignment.main([]) == 2
    assert "google/iopddl" in capsys.readouterr().err
