"""The planners' benchmark: a row for the optimum and for each order, none of which is below it."""

import pytest

from benchmarks import planner


@pytest.mark.parametrize("parts", [(), ("--parts",)])
def test_no_order_is_below_the_bound(answered, parts):
    """For every number of layers stand the optimum and all orders, and no step is shorter than the bound."""
    options = ("--model", "llama-7b", "--layers", 1, 2, "--mesh", "model=2", "--repeats", 1, *parts)
    rows = answered(planner, *options)["rows"]

    assert [row["layers"] for row in rows] == [1] * 5 + [2] * 5
    assert rows[0]["planner"] == "HiGHS (optimal)"
    assert rows[0]["over_bound"] == pytest.approx(1.0)
    assert all(row["over_bound"] >= 1.0 - 1e-6 for row in rows)


def test_an_unknown_model_is_a_mistake_of_the_user(capsys):
    """A model that the catalog lacks ends the benchmark with a sentence."""
    assert planner.main(["--model", "lama"]) == 2
    assert "lama" in capsys.readouterr().err
