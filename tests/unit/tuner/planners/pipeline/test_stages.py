import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from tests.oracles.stage_exhaustive import plan_stages_exhaustively
from tests.oracles.stage_milp import plan_stages_by_milp
from tests.support.settings.pipelines import changed, random_pipeline
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known, Limits, Stop
from tuner.planners.pipeline.segments import SLACK, least_recompute
from tuner.planners.pipeline.stage_search import StagesProblem
from tuner.planners.pipeline.stages import plan_of

HIGHS_TOLERANCE = 1e-6
"""HiGHS takes a whole number for one and a limit for kept within this."""

pipelines = st.builds(
    lambda seed, num_stages, more, num_kinds, num_types, room: random_pipeline(
        np.random.default_rng(seed),
        num_layers=num_stages + more,
        num_stages=num_stages,
        num_kinds=num_kinds,
        num_types=num_types,
        room=room,
    ),
    seed=st.integers(0, 2**32),
    num_stages=st.integers(1, 3),
    more=st.integers(0, 3),
    num_kinds=st.integers(1, 2),
    num_types=st.integers(1, 2),
    room=st.floats(0.7, 2.0),
)


@given(pipeline=pipelines, most_caps=st.integers(1, 4))
def test_it_finds_what_trying_everything_finds(pipeline, most_caps):
    """On small pipelines the plan costs what the best of all plans costs, or both say that there is none; its stages
    hold every layer once, within the memory and the supply of their kinds.
    """
    outcome = branch_and_bound(StagesProblem(pipeline, most_caps=most_caps))
    best = plan_stages_exhaustively(pipeline)

    assert outcome.stop is Stop.EXHAUSTED
    if best is None:
        assert (outcome.known, outcome.best, outcome.bound) == (Known.INFEASIBLE, None, math.inf)
    else:
        assert outcome.known is Known.OPTIMAL
        assert outcome.best.cost == pytest.approx(best.step_s, rel=1e-12)
        stages = outcome.best.solution.stages
        assert all(stage.memory_bytes <= pipeline.capacity_bytes[stage.kind] * (1 + SLACK) for stage in stages)
        assert (np.bincount([stage.kind for stage in stages], minlength=pipeline.num_kinds) <= pipeline.supply).all()
        assert sum(stage.num_layers for stage in stages) == pipeline.num_layers


@pytest.mark.parametrize("seed", range(8))
def test_it_finds_what_highs_finds(seed):
    """On pipelines too large to try everything, HiGHS proves the same step time, or the same lack of a plan."""
    rng = np.random.default_rng(seed)
    pipeline = random_pipeline(
        rng, num_layers=int(rng.integers(8, 13)), num_stages=4, num_types=1 + seed % 2, room=rng.uniform(0.9, 1.5)
    )

    ours, theirs = branch_and_bound(StagesProblem(pipeline)), plan_stages_by_milp(pipeline)

    assert ours.known is theirs.known
    if ours.best is not None:
        assert ours.best.cost == pytest.approx(theirs.best.cost, rel=HIGHS_TOLERANCE)


@given(pipeline=pipelines, most_caps=st.integers(1, 3), seed=st.integers(0, 99))
def test_no_bound_is_above_what_lies_below_it(pipeline, most_caps, seed):
    """On the way to any plan that fits, every node's bound is at most that plan's step time, and bounds never fall."""
    rng = np.random.default_rng(seed)
    problem = StagesProblem(pipeline, most_caps=most_caps)
    node = problem.root()
    bounds = [problem.lower_bound(node)]
    while math.isfinite(bounds[-1]) and problem.complete(node) is None:
        children = list(problem.children(node, math.inf))
        node = children[rng.integers(len(children))]
        bounds.append(problem.lower_bound(node))
    if math.isfinite(bounds[-1]):
        assert bounds == sorted(bounds)
        assert bounds[-1] == pytest.approx(problem.complete(node).cost, rel=1e-12)


@given(pipeline=pipelines, data=st.data())
def test_no_cheaper_recomputation_suffices(pipeline, data):
    """What a stage recomputes fits, and of all that fits it takes the least time."""
    counts = np.array([data.draw(st.integers(0, 4)) for _ in range(pipeline.num_types)])
    kind = data.draw(st.integers(0, pipeline.num_kinds - 1))
    saved = pipeline.in_flight[0] * (pipeline.kept_bytes - pipeline.recomputed_bytes)
    held = counts @ (pipeline.state_bytes + pipeline.in_flight[0] * pipeline.kept_bytes) + pipeline.fixed_bytes(0)
    choices = np.array(list(np.ndindex(*(counts + 1))))
    fits = held - choices @ saved <= pipeline.capacity_bytes[kind]
    least_s = (choices @ pipeline.recompute_s[kind])[fits].min(initial=math.inf)

    time_s, recomputed = least_recompute(pipeline, kind, 0, counts[None, :])

    assert time_s[0] == pytest.approx(least_s, rel=1e-12)
    if fits.any():
        assert recomputed[0] @ pipeline.recompute_s[kind] == pytest.approx(least_s, rel=1e-12)


@settings(max_examples=40)
@given(pipeline=pipelines)
def test_settled_kinds_stay(pipeline):
    """With the kinds of the best plan settled the best plan is found again, and it costs no less with any others."""
    best = branch_and_bound(StagesProblem(pipeline)).best
    if best is None:
        return
    kinds = tuple(stage.kind for stage in best.solution.stages)

    again = branch_and_bound(StagesProblem(changed(pipeline, kinds=kinds))).best
    backwards = branch_and_bound(StagesProblem(changed(pipeline, kinds=kinds[::-1]))).best

    assert again.cost == pytest.approx(best.cost, rel=1e-12)
    assert tuple(stage.kind for stage in again.solution.stages) == kinds
    if backwards is not None:
        assert tuple(stage.kind for stage in backwards.solution.stages) == kinds[::-1]
        assert backwards.cost >= best.cost * (1 - 1e-12)


@pytest.mark.parametrize("vpp", [1, 4])
def test_the_step_is_that_of_the_schedules(vpp):
    """Without hops, a plan's step is m times its slowest stage and one micro-batch through all others."""
    rng = np.random.default_rng(5)
    pipeline = changed(random_pipeline(rng, num_layers=8, num_stages=4), hop_s=np.zeros((2, 2)), vpp=vpp)
    plan = plan_of(pipeline, [0, 1, 0, 1], [2, 1, 3, 2], [(0,), (1,), (0,), (2,)])
    stage_s = np.array([stage.time_s for stage in plan.stages])[:, None]

    bubble = (stage_s.sum() - stage_s.max()) / vpp

    assert plan.step_s == pytest.approx(pipeline.num_micro_batches * stage_s.max() + bubble, rel=1e-12)


def test_a_large_pipeline_is_proven_within_seconds():
    """2 kinds, 8 stages and 96 layers are settled well within a second, and within a limit of nodes."""
    pipeline = random_pipeline(np.random.default_rng(1), num_layers=96, num_stages=8, room=1.2)

    outcome = branch_and_bound(StagesProblem(pipeline), limits=Limits(time_s=5.0, nodes=1000))

    assert outcome.known is Known.OPTIMAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_flight": np.ones(9)}, "pp = 9: must be at most the number of layers, 6"),
        ({"supply": np.array([1, 1])}, "pp = 3: must be at most the stages that the devices can serve, 2"),
        ({"kinds": (0, 1)}, r"kinds = \(0, 1\): must name one kind per stage, 3"),
    ],
)
def test_what_cannot_be_is_said(change, message):
    """More stages than layers or devices, or kinds for other stages, are refused in words."""
    pipeline = random_pipeline(np.random.default_rng(0), num_layers=6, num_stages=3)

    with pytest.raises(ConfigError, match=message):
        changed(pipeline, **change)
