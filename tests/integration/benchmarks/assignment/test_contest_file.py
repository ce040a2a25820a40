"""Files of the contest's form: read, written, and told what is wrong with them."""

import copy
import functools
import gzip
import json
import operator

import numpy as np
import pytest

from benchmarks.assignment.contest_file import read_problem, write_problem
from benchmarks.assignment.solve_file import main
from hardware.io.errors import ConfigError
from tests.support.settings.assignment_problems import EXAMPLE, least_by_trying_all

ARRAYS = ("intervals", "starts", "costs", "usages", "edges", "edge_starts", "edge_costs")


def written(path, content):
    """A file that holds JSON."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def example(tmp_path):
    """The contest's example, as a file."""
    return written(tmp_path / "example.json", {"problem": EXAMPLE})


@pytest.mark.parametrize("name", ["copy.json", "copy.json.gz"])
def test_what_is_written_reads_the_same(example, tmp_path, name):
    """A problem survives being written and read, plain and compressed, to the letter, and can't be changed."""
    problem = read_problem(example)
    write_problem(problem, tmp_path / name)
    again = read_problem(tmp_path / name)

    assert (again.name, again.limit) == (problem.name, problem.limit)
    assert all(np.array_equal(getattr(again, array), getattr(problem, array)) for array in ARRAYS)
    content = (tmp_path / name).read_bytes()
    assert json.loads(gzip.decompress(content) if name.endswith("gz") else content) == {"problem": EXAMPLE}
    with pytest.raises(ValueError, match="read-only"):
        problem.costs[0] = 0.0


def test_costs_are_those_of_the_nodes_and_edges(example):
    """The example's costs and its peak, added up by hand."""
    problem = read_problem(example)

    assert problem.cost_of([0, 0, 0, 0, 0]) == 15 + 55 + 25 + 85 + 95 + 30 + 50 + 90 + 60 + 70
    assert problem.peak_usage([0, 0, 1, 0, 0]) == 10 + 25 + 20
    assert not problem.is_feasible([0, 0, 1, 0, 0])
    assert problem.is_feasible([0, 0, 2, 0, 0])


def change(path, value):
    """The example with another value at a path of keys; None removes it."""
    content = copy.deepcopy({"problem": EXAMPLE})
    *above, last = path
    inner = functools.reduce(operator.getitem, above, content)
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("problem",), None, "problem: is required and missing"),
        (("problem",), 3, "problem = 3: must be a mapping"),
        (("problem", "usage_limit"), None, "problem.usage_limit: is required and missing"),
        (("problem", "usage_limit"), "50", "problem.usage_limit = '50': must be a number"),
        (("problem", "usage_limits"), 50, "problem.usage_limits: is not known; did you mean 'usage_limit'"),
        (("problem", "nodes", "costs", 1), [55, True], "problem.nodes.costs.1.1 = True: must be a number"),
        (("problem", "nodes", "costs", 1), [55, float("nan")], "problem.nodes.costs.1.1 = nan: must be finite"),
        (("problem", "nodes", "costs", 1), 7, "problem.nodes.costs.1 = 7: must be a list"),
        (("problem", "nodes", "costs", 0), [], "problem.nodes.usages.0: must hold as many as the node's costs"),
        (("problem", "nodes", "usages", 2), [15, 20, -1], "problem.nodes.usages.2.2 = -1: must be finite and at least"),
        (("problem", "nodes", "intervals", 3), [110], "problem.nodes.intervals.3 = [110]: must be two whole numbers"),
        (("problem", "nodes", "intervals"), [], "problem.nodes.costs: must hold 0 lists, but holds 5"),
        (("problem", "edges", "nodes", 4), [3, 5], "problem.edges.nodes.4 = [3, 5]: must name two of the nodes"),
        (("problem", "edges", "nodes", 4), [3, 3], "problem.edges.nodes.4 = [3, 3]: must join two different nodes"),
        (("problem", "edges", "costs", 2), [90], "problem.edges.costs.2: must hold a cost for each of 2 x 2 pairs"),
    ],
)
def test_each_mistake_is_told_by_key_value_and_rule(tmp_path, path, value, message):
    """A bad file ends in one error that names the file, the key, the value seen and the rule."""
    file = written(tmp_path / "bad.json", change(path, value))

    with pytest.raises(ConfigError) as caught:
        read_problem(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_the_command_prints_what_it_found(example, tmp_path, capsys):
    """The command's JSON holds the optimum, a bound not above it, the time, and that it is feasible."""
    assert main([str(example), "--time-limit", "3", "--json", "--out", str(tmp_path / "plan.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    problem = read_problem(example)
    strategies = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))

    assert printed["feasible"] is True
    assert printed["cost"] == least_by_trying_all(problem) == problem.cost_of(strategies)
    assert printed["bound"] <= printed["cost"]
    assert printed["seconds"] > 0
