"""Frameworks themselves are asked whether they run what the rules offer, and whether they refuse what these refuse."""

from dataclasses import replace

import pytest

from benchmarks.judges.launchable_layouts import failed, measure
from benchmarks.support.oracles import children
from benchmarks.support.oracles.draws import draws, is_listed
from benchmarks.support.oracles.registry import FRAMEWORKS, installed
from tuner.space.rules.rule_sets import RULES

pytestmark = pytest.mark.slow

COUNT = 12


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_rules_and_frameworks_agree(target):
    """The framework runs every layout that is offered and refuses every one that is not, but for stated reasons."""
    try:
        installed(target)
    except ImportError as error:
        pytest.skip(f"{error}; `make frameworks` installs it")

    row = measure(target, COUNT, seed=11)

    assert row["both"] > 0
    assert row["neither"] > 0
    assert not failed(row), row["wrong"]


@pytest.mark.parametrize("target", FRAMEWORKS)
def test_draws_lie_around_the_edges(target):
    """Half of the layouts break no rule, most others one, and the list of the space agrees with the reasons."""
    edges = FRAMEWORKS[target].edges
    found = list(draws(edges, 60, seed=5))

    assert 20 <= sum(not broken for _, _, broken in found) <= 40
    assert len({name for _, _, broken in found for name in broken}) >= 6
    assert all(name in RULES for _, _, broken in found for name in broken)
    assert all(is_listed(setting, config) == (not broken) for setting, config, broken in found)


def test_draws_are_repeatable():
    """The same seed draws the same layouts."""
    edges = replace(FRAMEWORKS["megatron"].edges, lengths=(64,))
    configs = [[config for _, config, _ in draws(edges, 10, seed)] for seed in (1, 1, 2)]

    assert configs[0] == configs[1] != configs[2]


def test_a_process_answers_for_one_rank():
    """Answers and refusals come back, and nothing that a question changes stays."""
    state = {"asked": 0}

    def question(rank):
        state["asked"] += 1
        if rank:
            raise ValueError("no such rank\nmore")

    assert children.on_ranks((0, 0), question) is None
    assert children.on_ranks((0, 3), question).startswith("rank 3: ValueError: no such rank (")
    assert state["asked"] == 0
    with pytest.raises(ChildProcessError, match="ZeroDivisionError"):
        children.ask(lambda: 1 // 0)
