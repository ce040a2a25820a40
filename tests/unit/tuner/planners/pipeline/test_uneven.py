"""Uneven work for many configurations: cuts against trying all, and what a plan may never do."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.pipeline.stage_tables import StageTables, stage_tables
from costmodels.step.replicas import ReplicaKind
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping, find_cluster
from tests.support.settings.random_settings import grid_of, job_of
from tuner.planners.engine.outcome import Known
from tuner.planners.pipeline.stage_problem import best_stages, over_chunks, within_chunks
from tuner.planners.pipeline.uneven import (
    PARTS,
    cut_layers,
    host_orders,
    plan_uneven_work,
    refine_stages,
    share_micro_batches,
)

MEGATRON = find_runtime("megatron-core")
TWO_KINDS = cluster_from_mapping(
    {"groups": [{"name": "dgx-h100", "hosts": 2}, {"name": "dgx-a100", "hosts": 2}]}, Path()
)


def on(job, cluster=TWO_KINDS):
    """A job on a cluster under Megatron."""
    return Setting(job=job, cluster=cluster, runtime=MEGATRON)


def step_s(job, grid, cluster=TWO_KINDS):
    """Predicted step times [n]."""
    return estimate_step(on(job, cluster), grid).step_time_s


def fits(job, grid, headroom=0.08, cluster=TWO_KINDS):
    """Whether each has so much memory to spare [n]."""
    return estimate_memory(on(job, cluster), grid).fits(headroom)


def compositions(total, parts):
    """All ways to write `total` as an ordered sum of `parts` numbers of at least 1."""
    for bars in itertools.combinations(range(1, total), parts - 1):
        yield tuple(end - start for start, end in itertools.pairwise((0, *bars, total)))


@st.composite
def tables(draw):
    """Stages of a few layers, each with a time and a need of memory of its own, and the number of micro-batches."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stages, layers = draw(st.integers(2, 4)), draw(st.integers(4, 9))
    each, fixed = rng.uniform(0.5, 3.0, stages), rng.uniform(0.0, 1.0, stages)
    kept, saved = rng.uniform(1.0, 3.0, stages), rng.uniform(0.0, 0.9, stages)
    running = rng.uniform(0.0, 0.5) * saved * kept  # memory of a layer that runs again
    numbers = np.arange(layers + 1.0)
    times = fixed[:, None] + each[:, None] * numbers
    needed = kept[:, None] * numbers
    return (
        StageTables(
            time_s=times[:, :, None],
            again_s=(times + each[:, None] * numbers / 3)[:, :, None],
            needed_bytes=needed[:, :, None],
            first_bytes=(needed + ((running - saved * kept)[:, None] * (numbers > 0)))[:, :, None],
            again_bytes=(needed * (1 - saved[:, None]) + running[:, None] * (numbers > 0))[:, :, None],
            capacity_bytes=rng.uniform(0.6, 3.0, stages) * layers,
        ),
        draw(st.sampled_from([1, 4, 64])),
    )


def needed_by(table, stage, held, repeated):
    """The memory of a stage with so many layers, of which some are recomputed."""
    plain, first, full = (
        figures[stage, held, 0] for figures in (table.needed_bytes, table.first_bytes, table.again_bytes)
    )
    return plain if repeated == 0 else first - (first - full) * (repeated - 1) / max(held - 1, 1)


def best_by_trying(table, micro_batches, *, may_recompute):
    """The least step time over all cuts and all numbers of recomputed layers that fit."""
    stages, size, _ = table.time_s.shape
    best_s = np.inf
    for layers in compositions(size - 1, stages):
        times = []
        for stage, held in enumerate(layers):
            room = table.capacity_bytes[stage]
            options = [
                table.time_s[stage, held, 0]
                + (table.again_s[stage, held, 0] - table.time_s[stage, held, 0]) * repeated / held
                for repeated in range(held + 1 if may_recompute else 1)
                if needed_by(table, stage, held, repeated) <= room + 1e-9
            ]
            times.append(min(options, default=np.inf))
        best_s = min(best_s, (micro_batches - 1) * max(times) + sum(times))
    return best_s


@given(tables(), st.booleans())
def test_a_cut_is_nearly_the_best_there_is(drawn, may_recompute):
    """Within 8% of trying everything, feasible whenever anything is, and within the memory."""
    table, micro_batches = drawn
    best_s = best_by_trying(table, micro_batches, may_recompute=may_recompute)
    least = np.ones(len(table.time_s), dtype=np.int64)
    cut = cut_layers(table, np.array([micro_batches]), 1, 1.0, least, may_recompute=may_recompute)
    layers, again = cut.layers[:, 0], cut.recomputed[:, 0]
    size = table.time_s.shape[1]

    assert (layers.sum() == size - 1 and (layers > 0).all()) == np.isfinite(best_s)
    if np.isfinite(best_s):
        stage = np.arange(len(layers))
        share = again / layers
        needed = [needed_by(table, *each) for each in zip(stage, layers, again, strict=True)]
        assert (np.array(needed) <= table.capacity_bytes + 1e-9).all()
        times = table.time_s[stage, layers, 0] * (1 - share) + table.again_s[stage, layers, 0] * share
        assert (micro_batches - 1) * times.max() + times.sum() <= 1.08 * best_s


@given(st.lists(st.floats(0.2, 4.0), min_size=1, max_size=4), st.integers(1, 3), st.integers(4, 40))
def test_shares_end_together(paces, count, rounds):
    """Every replica gets a micro-batch, all are given out, and no other share ends earlier by one micro-batch."""
    kinds = [
        ReplicaKind(replicas=tuple(range(at * count, (at + 1) * count)), micro_batches=1, devices=((at,),))
        for at in range(len(paces))
    ]
    pace_s = np.array(paces)
    shares = share_micro_batches(pace_s, np.zeros(len(paces)), kinds, rounds, 1)

    assert (shares is None) == (rounds < count * len(paces))
    if shares is not None:
        of_each = np.repeat(pace_s, count)
        ends_s = of_each * shares
        assert sum(shares) == rounds
        assert min(shares) >= 1
        slowest = int(ends_s.argmax())
        if shares[slowest] > 1:
            assert (ends_s + of_each >= ends_s[slowest] * (1 - 1e-9)).all()


def test_tables_are_the_closed_forms_stages():
    """An even cut's slowest stage, read from the tables, sets the pace of the closed form; so does its memory."""
    job = job_of(batch=64)
    grid = grid_of(*[ParallelConfig(pp=4, tp=tp, dp=8 // tp) for tp in (2, 4, 8)])
    found = stage_tables(on(job), grid)
    estimate = estimate_step(on(job), grid)
    micro_batches = 64 // grid.dp
    passes = sum(estimate.breakdown_s[part] for part in ("compute", "tp", "host")) / micro_batches

    assert found.time_s[:, 8].max(axis=0) == pytest.approx(passes)
    needed = estimate_memory(on(job), grid).needed_bytes
    assert found.needed_bytes[:, 8].max(axis=0) == pytest.approx(needed)


def test_orders_of_hosts_are_all_different_and_whole():
    """Each names every host once; the cluster's own comes first; hosts of both groups in turns are among them."""
    orders = host_orders(TWO_KINDS)

    assert orders == ((), (2, 3, 0, 1), (0, 2, 1, 3))
    assert host_orders(find_cluster("dgx-h100", hosts=4)) == ((),)


def test_a_plan_is_never_slower_than_equal_shares():
    """On unlike hosts most configurations gain, none loses, and what fitted still fits."""
    job = job_of(batch=128)
    grid = grid_of(
        *[
            ParallelConfig(pp=pp, tp=tp, dp=32 // pp // tp, vpp=vpp)
            for pp, tp, vpp in itertools.product((1, 2, 4), (4, 8), (1, 2))
            if vpp == 1 or pp > 1
        ]
    )
    found = plan_uneven_work(on(job), grid, PARTS, memory_headroom=0.08)
    before, after, fitted = step_s(job, grid), step_s(job, found), fits(job, grid)

    assert (after[fitted] <= before[fitted] * (1 + 1e-9)).all()
    assert np.median(before / after) > 1.3
    assert fits(job, found)[fitted].all()
    for position in range(len(grid)):
        config = found.config(position)
        assert replace(config, assignment=grid.config(position).assignment) == grid.config(position)


def test_only_what_may_be_uneven_is():
    """A plan of hosts and layers alone leaves micro-batches and recomputation as they are."""
    grid = grid_of(ParallelConfig(tp=8, dp=4), ParallelConfig(pp=2, tp=8, dp=2))
    found = plan_uneven_work(on(job_of(batch=64)), grid, ("layers", "hosts"), memory_headroom=0.08)

    assert not any(found.config(at).assignment.micro_batches or found.config(at).assignment.recomputed for at in (0, 1))
    assert found.config(1).assignment.layers


def test_recomputing_some_layers_makes_room():
    """Where even stages do not fit, the plan recomputes no more layers than it must, and fits."""
    job = job_of("llama3-70b", batch=64)
    cluster = find_cluster("dgx-h100", hosts=4)
    grid = grid_of(ParallelConfig(pp=4, tp=8, mbs=2))
    found = plan_uneven_work(on(job, cluster), grid, ("layers", "recomputed"), memory_headroom=0.4)
    full = grid_of(replace(grid.config(0), recompute="full"))

    assert not fits(job, grid, 0.4, cluster)[0]
    assert fits(job, found, 0.4, cluster)[0]
    assert 0 < sum(found.config(0).assignment.recomputed) < 80
    assert step_s(job, found, cluster)[0] < step_s(job, full, cluster)[0]


def test_branch_and_bound_never_makes_a_plan_slower():
    """Of layers with and without experts, under a tight memory, proven stages are at least as fast and fit."""
    job = job_of("deepseek-v3", batch=256)
    cluster = find_cluster("dgx-h200", hosts=64)
    grid = grid_of(*[ParallelConfig(pp=pp, tp=2, dp=256 // pp, ep=16, mbs=1) for pp in (4, 8, 16)])
    parts = ("layers", "recomputed")
    found = plan_uneven_work(on(job, cluster), grid, parts, memory_headroom=0.08)
    proven = refine_stages(on(job, cluster), found, parts, memory_headroom=0.08)
    before, after = (step_s(job, each, cluster) for each in (found, proven))
    fits_before, fits_after = (fits(job, each, cluster=cluster) for each in (found, proven))

    assert (fits_after | ~fits_before).all()
    assert (after[fits_before] <= before[fits_before] * (1 + 1e-9)).all()


def test_a_proof_places_stages_on_the_hosts_that_it_names():
    """Branch and bound's stages stand on whole hosts of their kind, and its cost is near the closed form's."""
    job, config = job_of(batch=128), ParallelConfig(pp=4, tp=8)
    best, outcome = best_stages(on(job), config, memory_headroom=0.08)
    hosts = best.assignment.hosts or tuple(range(4))
    names = ["H100-SXM-80" if host < 2 else "A100-SXM-80" for host in hosts]

    assert outcome.known is Known.OPTIMAL
    assert [TWO_KINDS.devices[stage.kind].name for stage in outcome.best.solution.stages] == names
    assert best.assignment.layers == tuple(stage.num_layers for stage in outcome.best.solution.stages)
    assert outcome.best.cost == pytest.approx(step_s(job, grid_of(best))[0], rel=0.08)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6), st.integers(1, 6), st.floats(0.0, 4.0))
def test_chunks_hold_the_layers_of_their_stage(of_stage, vpp, head):
    """All of them; the last chunk gives up what the head takes, and no other chunk of its stage stays empty."""
    held = np.array(over_chunks(np.array(of_stage), vpp, (0.0, head))).reshape(vpp, -1)

    assert held.sum(axis=0).tolist() == of_stage
    assert held.min() >= 0
    last = held[:, -1]
    assert last[-1] == last.min()
    if vpp > 1 and of_stage[-1] >= vpp - 1:
        assert last[:-1].min() >= 1


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(1, 6), st.data())
def test_recomputed_layers_are_layers_of_their_chunk(of_stage, vpp, data):
    """Each chunk recomputes its share of the stage's, and no more than it holds."""
    again = [data.draw(st.integers(0, layers)) for layers in of_stage]
    held = over_chunks(np.array(of_stage), vpp, (0.5, 1.5))
    found = np.array(within_chunks(np.array(again), held)).reshape(vpp, -1)

    assert found.sum(axis=0).tolist() == again
    assert (found <= np.array(held).reshape(vpp, -1)).all()
