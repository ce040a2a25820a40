"""Rules of the policy, on clusters of two or three states that hypothesis draws."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from hardware.cluster_file import read_described_cluster
from hardware.dynamics import Interval
from tuner.replan.cluster_states import Figures, Setup
from tuner.replan.present import Present
from tuner.replan.replanning import Assumptions
from tuner.watch.policy import Decision, Rules, Standing, changed, decide, keep_accounts

CLUSTER = read_described_cluster({"name": "dgx-h100", "hosts": 2}, Path()).cluster
BOTH, FIRST = (0, 1), (0,)
SETUPS = (
    Setup(hosts=BOTH, config=ParallelConfig(dp=16)),
    Setup(hosts=BOTH, config=ParallelConfig(tp=8, dp=2)),
    Setup(hosts=FIRST, config=ParallelConfig(dp=8)),
)
COSTS = Assumptions(restart_s=100.0, storage_bytes_per_s=1e9, checkpoint_every_s=1000.0)
STATE_BYTES = 1e9 / 8 * 10
"""State that a host of eight devices writes or reads in ten seconds."""
LENGTHS_S = st.floats(1.0, 5000.0)
STEPS_S = st.tuples(*(st.floats(0.5, 5.0) for _ in SETUPS))
STATES = st.lists(st.tuples(LENGTHS_S, STEPS_S, st.booleans()), min_size=1, max_size=12)
RULES = st.builds(
    Rules, settle_s=st.integers(0, 3000).map(float), horizon_s=st.floats(10.0, 20000.0), costs=st.just(COSTS)
)


def figures_of(step_time_s):
    """Figures of a setup with a step time."""
    return Figures(step_time_s=step_time_s, state_bytes=STATE_BYTES, devices_per_host=8, nic_bytes_per_s=1e12)


def state(from_s, lasts_s, steps_s, *, is_whole=True):
    """State of the cluster; the second host may be lost."""
    hosts = BOTH if is_whole else FIRST
    interval = Interval(from_s=from_s, to_s=from_s + lasts_s, cluster=CLUSTER, hosts=hosts, events=())
    figures = {
        setup: figures_of(seconds) for setup, seconds in zip(SETUPS, steps_s, strict=True) if {*hosts} >= {*setup.hosts}
    }
    return Present(interval=interval, figures=figures, num_trials=0)


def follow(states, rules, *, every_s=100.0):
    """Follow the policy through states of given lengths; yield each look: time, state, standing before, verdict."""
    now_s = 0.0
    standing = Standing(running=SETUPS[0], since_s=0.0, at_s=0.0)
    looks = []
    for lasts_s, steps_s, is_whole in states:
        present = state(now_s, lasts_s, steps_s, is_whole=is_whole)
        end_s = now_s + lasts_s
        while now_s < end_s:
            standing = keep_accounts(standing, present, now_s)
            verdict = decide(standing, present, now_s, rules)
            looks.append((now_s, present, standing, verdict))
            standing = changed(standing, verdict, present, now_s)
            now_s = min(now_s + every_s, end_s)
        standing = keep_accounts(standing, present, end_s)
    return looks


@given(states=STATES, rules=RULES)
def test_a_lost_host_is_answered_at_once(states, rules):
    """Whenever the running layout cannot run on, the change is made at that look, and never otherwise forced."""
    for _, present, standing, verdict in follow(states, rules):
        assert verdict.is_forced == (standing.running not in present.figures)
        assert not verdict.is_forced or verdict.decision == Decision.CHANGE


@given(states=STATES, rules=RULES)
def test_a_change_that_can_wait_is_repaid_and_has_waited(states, rules):
    """Such a change repays its cost within the horizon, after the state has stood or staying has cost as much."""
    for now_s, present, standing, verdict in follow(states, rules):
        if verdict.decision != Decision.CHANGE or verdict.is_forced:
            continue
        change = verdict.best
        gained = rules.horizon_s / present.figures[change.setup].step_time_s
        stays = rules.horizon_s / present.figures[standing.running].step_time_s
        stood = now_s - present.interval.from_s >= rules.settle_s - 1e-6
        lost = standing.lost_steps.get(change.setup, 0.0) >= change.cost_steps * (1 - 1e-9)
        assert gained - change.cost_steps >= stays * (1 - 1e-9)
        assert stood or lost


@given(short_s=st.floats(1.0, 599.0), steps_s=STEPS_S, count=st.integers(2, 40))
def test_a_cluster_that_flaps_evenly_changes_nothing(short_s, steps_s, count):
    """If two states take turns in which two layouts swap their speeds, and neither stands, the layout that runs stays.

    What the running layout loses in one state it wins in the other, so that its account does not grow; one state alone
    is too short to lose the cost.
    """
    slow, fast = max(steps_s[:2]), min(steps_s[:2])
    states = [(short_s, (fast, slow, 50.0) if turn % 2 == 0 else (slow, fast, 50.0), True) for turn in range(count)]
    rules = Rules(settle_s=600.0, horizon_s=1e6, costs=COSTS)
    cost_steps = (COSTS.restart_s + 10.0) / fast + 10.0 / slow
    looks = follow(states, rules, every_s=short_s / 3)
    changes = [verdict for *_, verdict in looks if verdict.decision == Decision.CHANGE]

    assert not changes or short_s * (1 / fast - 1 / slow) >= cost_steps


@given(states=STATES)
def test_without_settling_a_change_has_been_paid_for(states):
    """With the account alone, steps lost before a change that can wait are at least its cost."""
    rules = Rules(settle_s=1e12, horizon_s=1e12, costs=COSTS)
    for _, _, standing, verdict in follow(states, rules):
        if verdict.decision == Decision.CHANGE and not verdict.is_forced:
            assert standing.lost_steps[verdict.best.setup] >= verdict.best.cost_steps * (1 - 1e-9)


@pytest.mark.slow
@given(steps_s=STEPS_S, lasts_s=st.floats(1.0, 1e5))
def test_the_account_alone_never_pays_more_than_twice(steps_s, lasts_s):
    """In a state of any length, the steps lost to waiting and changing are at most twice the least possible ones.

    The least is what a layout loses that knew the length: the cost of changing at once, or the loss of staying. The
    looks are close together, and the cost is that of the layout with which the policy ends.
    """
    rules = Rules(settle_s=1e12, horizon_s=1e12, costs=COSTS)
    present = state(0.0, lasts_s, (*steps_s[:2], 1e6))
    looks = follow([(lasts_s, (*steps_s[:2], 1e6), True)], rules, every_s=lasts_s / 1000)
    rates = [1 / steps_s[0], 1 / steps_s[1]]
    changes = [(now_s, verdict.best) for now_s, _, _, verdict in looks if verdict.decision == Decision.CHANGE]
    loss = lasts_s * max(rates[1] - rates[0], 0.0)
    if changes:
        at_s, change = changes[0]
        paid = at_s * change.gain_steps_per_s + change.cost_steps
        assert len(changes) == 1
        assert paid <= 2 * min(loss, change.cost_steps) + lasts_s / 1000 * change.gain_steps_per_s
    else:
        verdict = decide(Standing(running=SETUPS[0], since_s=0.0, at_s=0.0), present, 0.0, rules)
        cost = verdict.best.cost_steps if verdict.best else math.inf
        assert loss <= cost * (1 + 1e-6) + lasts_s / 1000 * rates[1]


def test_a_state_that_stands_is_followed():
    """After the settling time a layout that is faster by a fifth begins, and the answer says before when it is due."""
    rules = Rules(settle_s=300.0, horizon_s=3600.0, costs=COSTS)
    looks = follow([(1000.0, (1.2, 1.0, 50.0), True)], rules)
    decisions = [(now_s, verdict.decision, verdict.due_s) for now_s, _, _, verdict in looks]

    assert decisions[0] == (0.0, Decision.SETTLE, pytest.approx(300.0))
    assert decisions[3][:2] == (300.0, Decision.CHANGE)
    assert decisions[4][1] == Decision.STAY


def test_a_host_that_came_back_in_between_breaks_the_layout():
    """A layout whose host was lost and is back begins again, and repeats what it lost."""
    present = state(0.0, 1000.0, (1.0, 2.0, 5.0))
    standing = Standing(running=SETUPS[0], since_s=0.0, at_s=900.0, figures=figures_of(1.0))
    verdict = decide(standing, present, 900.0, Rules(costs=COSTS), is_broken=True)

    assert (verdict.decision, verdict.is_forced) == (Decision.CHANGE, True)
    assert verdict.best.setup == SETUPS[0]
    assert verdict.best.lost_work_s == 500.0
    assert verdict.best.switch_s == pytest.approx(110.0)


def test_nothing_can_run():
    """Where no layout can run the job waits, and begins with the first that can, at once."""
    nothing = Present(interval=state(0.0, 10.0, (1, 1, 1)).interval, figures={}, num_trials=0)
    rules = Rules(costs=COSTS)
    standing = Standing(running=SETUPS[0], since_s=0.0, at_s=0.0)
    wait = decide(standing, nothing, 0.0, rules)
    waiting = changed(standing, wait, nothing, 0.0)
    begin = decide(waiting, state(10.0, 10.0, (1.0, 2.0, 5.0)), 10.0, rules)

    assert (wait.decision, wait.is_forced) == (Decision.WAIT, True)
    assert waiting.running is None
    assert (begin.decision, begin.best.setup) == (Decision.CHANGE, SETUPS[0])
    assert begin.best.lost_work_s == 0.0
