"""Replay of what ranks ran, with orders written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from costmodels.blocks.operator import OpKind
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.operators.kernels import collective_s
from costmodels.operators.layer_operators import Collective
from hardware.cluster_file import find_cluster
from tests.support.settings.random_settings import job_of, setting_for
from tuner.rehearsal.answer import RankAnswer, StepOrder
from tuner.rehearsal.recorded_prices import RecordedPrices, operator_of
from tuner.rehearsal.replay import replayed_step

RUNTIME = replace(
    find_runtime("megatron-core"), launch_s=0.0, collective_launch_s=0.0, step_overhead_s=0.0, stall_s=0.0
)
SETTING = setting_for(job_of(), find_cluster("dgx-h100", hosts=1), RUNTIME)
ONE, TWO = ParallelConfig(dp=8), ParallelConfig(pp=2, dp=4)
PRODUCT = ("aten.mm.default", ((4096, 4096), (4096, 4096)), 3 * 2 * 4096**2)
GATHER = ("_allgather_base_", 1 << 26, tuple(range(8)), -1)
PRICES = RecordedPrices(SETTING, ONE)
PRODUCT_S = PRICES.operator_s(*PRODUCT)
GATHER_S = PRICES.collective_s(*GATHER)[0]


def answer(*kinds, steps, rank=0, fewer=None, made=1):
    """The answer of a rank that ran kinds in an order, and another with fewer micro-batches in the step before."""
    orders = [StepOrder(micro_batches=made, steps=tuple(steps))]
    orders[:0] = [] if fewer is None else [StepOrder(micro_batches=made - 1, steps=tuple(fewer))]
    return RankAnswer(
        rank=rank, stage=rank // 4, verdict="accepted", parts={}, invented={}, kinds=kinds, orders=tuple(orders)
    )


def replayed(*answers, config=ONE, micro_batches=1):
    """The time of the longest rank [s]."""
    found = replayed_step(SETTING, config, answers, micro_batches)
    return max(found.ranks_s.values())


def test_operators_follow_each_other():
    """Three products take three times one, and a view takes nothing."""
    view = ("aten._unsafe_view.default", ((4096, 4096),), 1 << 25)

    assert replayed(answer(PRODUCT, view, steps=[0, 1, 0, 0])) == pytest.approx(3 * PRODUCT_S)


def test_a_collective_runs_beside_what_does_not_wait_for_it():
    """Awaited at once it adds its time; awaited after other work, it hides as far as the runtime lets it."""
    at_once = replayed(answer(PRODUCT, GATHER, steps=[0, 1, -1, 0]))
    beside = replayed(answer(PRODUCT, GATHER, steps=[0, 1, 0, -1]))
    hidden = min(PRODUCT_S, GATHER_S) * RUNTIME.overlap_efficiency

    assert at_once == pytest.approx(2 * PRODUCT_S + GATHER_S)
    assert beside == pytest.approx(at_once - hidden, rel=0.02)


def test_collectives_of_a_group_queue():
    """Two of one group follow each other though nothing waits for them; of two groups they run side by side."""
    other = (GATHER[0], GATHER[1], (0, 1), -1)
    alone_s = PRICES.collective_s(*other)[0]
    queued, side_by_side = (
        answer(GATHER, second, steps=[0, 1]) for second in ((*GATHER[:1], 1 << 25, *GATHER[2:]), other)
    )

    assert replayed(queued) == pytest.approx(GATHER_S + PRICES.collective_s(GATHER[0], 1 << 25, *GATHER[2:])[0])
    assert replayed(side_by_side) < GATHER_S + alone_s


def test_a_message_joins_two_ranks():
    """The second stage works after the first and its message: twice a product and the message."""
    message = 1 << 25
    sent, received = ("send", message, (0, 4), 4), ("recv_", message, (0, 4), 0)
    first = answer(PRODUCT, sent, steps=[0, 1, -1], rank=0)
    second = answer(PRODUCT, received, steps=[1, -1, 0], rank=4)
    message_s = RecordedPrices(SETTING, TWO).collective_s(*sent)[0]

    assert replayed(first, second, config=TWO) == pytest.approx(2 * PRODUCT_S + message_s)
    assert replayed_step(SETTING, TWO, [first], 1) is None


def test_micro_batches_that_were_not_made_are_added():
    """Of 10 micro-batches two were made: each further one takes the difference between two and one."""
    found = answer(PRODUCT, steps=[0, 0, 0, 0, 0], fewer=[0, 0, 0], made=2)

    assert replayed(found, micro_batches=10) == pytest.approx((5 + 8 * 2) * PRODUCT_S)


def test_the_host_can_be_slower_than_the_device():
    """If launching takes the host ten times as long, so does the step, nearly."""
    slow = replace(SETTING, runtime=replace(RUNTIME, launch_s=10 * PRODUCT_S))
    found = replayed_step(slow, ONE, [answer(PRODUCT, steps=[0, 0])], 1)

    assert found.ranks_s[0] == pytest.approx(20 * PRODUCT_S, rel=0.01)


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        (((14336, 4096), (8192, 4096), (8192, 14336)), (8192, 4096, 14336)),
        (((14336, 4096), (8192, 14336), (8192, 4096)), (8192, 14336, 4096)),
        (((8192, 4096), (8192, 14336), (14336, 4096)), (14336, 8192, 4096)),
    ],
    ids=["forward", "data gradient", "weight gradient"],
)
def test_products_of_transformer_engine_have_their_sizes(shapes, sizes):
    """Rows, inner length and columns follow from the operands and the result, whichever are transposed."""
    found = operator_of("te.gemm", shapes, 0)

    assert found.kind is OpKind.MATMUL
    assert found.shape[0].tolist() == pytest.approx(sizes)
    assert found.flop[0] == pytest.approx(2 * np.prod(sizes))


def test_attention_does_half_the_work_under_a_causal_mask():
    """2 b h s^2 d twice forward, two and a half times as much backward, and half of it if later keys are hidden."""
    q = (4096, 2, 32, 128)
    works = [
        operator_of(f"te.attention_{way}", (q, q, (2, 4096, 4096, causal)), 0).flop[0]
        for way, causal in (("fwd", 0), ("fwd", 1), ("bwd", 1))
    ]

    assert works == [4 * 2 * 32 * 4096**2 * 128, 2 * 2 * 32 * 4096**2 * 128, 5 * 2 * 32 * 4096**2 * 128]


def test_a_collective_is_that_of_its_links():
    """Eight neighbours of a host gather 64 MiB in the time of the link model under the runtime's efficiency."""
    group = SETTING.cluster.group_links(np.array([1]), np.array([8]))
    efficiency = RUNTIME.network_efficiency
    expected = Collective(
        name="",
        kind=OpKind.ALL_GATHER,
        wire_bytes=np.array([(1 << 26) / efficiency]),
        network_efficiency=1,
        group=group,
    )

    assert pytest.approx(collective_s(expected)[0]) == GATHER_S
