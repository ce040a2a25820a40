"""What planned steps compute and send on real ranks, and trials that run them."""

import functools
import math
from dataclasses import replace

import pytest

from costmodels.job.parallel_config import HAND, ParallelConfig
from tests.support.programs.sharded_ranks import train_planned
from tests.support.programs.sharded_steps import (
    GPT,
    LLAMA,
    MIXTRAL,
    PINNED,
    by_chance,
    job_of,
    of_planner,
    of_study,
    unsharded,
    wide,
)
from tests.support.programs.small_backends import cluster_of
from trials.backend import Status
from trials.rank_backend import OpenBackend
from trials.torch_training.framework import TORCH
from trials.torch_training.planned.traffic import planned_traffic, recorded_traffic, traffic_mismatches
from trials.training.planned import PlannedBackend
from tuner.planners.sharding.pins import Pin
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.step_planner import LayeredStepPlanner

DESCENT = LayerPlanning(name="descent")
EXPERTS_OVER_TP, EXPERTS_OVER_BOTH = (
    LayerPlanning(name=name, pins=tuple(Pin(op=f"*.moe_mlp.{op}", dim="experts", **ways) for op in ("up", "down")))
    for name, ways in (("descent", {"axis": "tp"}), ("recursive", {"ways": 4}))
)
EXPERTS = wide(MIXTRAL).changed(expert_ffn_size=512)
CASES = {
    "gpt by hand, dp=4": (GPT, lambda: of_study(GPT, 4, dp=4)),
    "gpt by hand, dp=2, tp=2, no sequence parallelism, no ZeRO": (
        GPT,
        lambda: of_study(GPT, 4, dp=2, tp=2, sequence_parallel=False, zero_stage=0),
    ),
    "gpt by hand, dp=2, tp=4": (GPT, lambda: of_study(GPT, 8, dp=2, tp=4)),
    "llama by hand, dp=2, cp=2, tp=2": (LLAMA, lambda: of_study(LLAMA, 8, dp=2, cp=2, tp=2)),
    "llama by hand, cp=2, up=2, tp=2": (LLAMA, lambda: of_study(LLAMA, 8, cp=2, up=2, tp=2)),
    "llama by a study's descent, dp=2, up=2": (LLAMA, lambda: of_study(LLAMA, 4, DESCENT, dp=2, up=2)),
    "gpt pinned, dp=2, tp=4": (GPT, lambda: of_study(GPT, 8, PINNED, dp=2, tp=4)),
    "wide gpt by D-Rec": (wide(GPT), lambda: of_planner(wide(GPT), "recursive")),
    "wide llama by D-Rec on three axes": (wide(LLAMA), lambda: of_planner(wide(LLAMA), "recursive", (2, 2, 2))),
    "wide llama by descent": (wide(LLAMA), lambda: of_planner(wide(LLAMA), "descent", (2, 2))),
    "wide gpt by TOAST": (wide(GPT), lambda: of_planner(wide(GPT), "toast", (2, 2))),
    "wide mixtral by descent, experts over both axes": (EXPERTS, lambda: of_planner(EXPERTS, "descent", (2, 2))),
    "mixtral pinned, experts over tp, dp=2, tp=4": (MIXTRAL, lambda: of_study(MIXTRAL, 8, EXPERTS_OVER_TP, dp=2, tp=4)),
    "mixtral pinned, experts over dp and tp, dp=2, ep=2, tp=2": (
        MIXTRAL,
        lambda: of_study(MIXTRAL, 4, EXPERTS_OVER_BOTH, dp=2, ep=2, tp=2),
    ),
    "mixtral by chance": (MIXTRAL, lambda: by_chance(MIXTRAL, 1, (2, 2))),
    "gpt by chance": (GPT, lambda: by_chance(GPT, 1)),
}


@pytest.fixture(scope="module")
def alone(on_ranks):
    """Losses of a model's steps on one rank."""
    return functools.cache(lambda model: on_ranks(1, train_planned, unsharded(model), MIXTRAL.top_k)[0][0][0])


@pytest.fixture(scope="module")
def trained(on_ranks):
    """Model and plan of a case, and what its ranks told."""

    @functools.cache
    def train(case):
        model, make = CASES[case]
        plan = make()
        return model, plan, [told for (told,) in on_ranks(plan.mesh.num_devices, train_planned, plan, MIXTRAL.top_k)]

    return train


@pytest.mark.parametrize("case", CASES)
def test_a_plan_changes_no_loss(trained, alone, case):
    """Three steps on all ranks have the losses of three steps on one, and the model learns."""
    model, _, told = trained(case)

    for losses, _ in told:
        assert losses == pytest.approx(alone(model), abs=1e-5)
        assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("case", CASES)
def test_ranks_send_what_the_plan_says(trained, case):
    """Every rank's calls have the bytes of the plan's list, byte for byte, for every kind and group of ranks."""
    _, plan, told = trained(case)

    assert traffic_mismatches(plan, [recording for _, recording in told]) == ()
    for _, recording in told:
        assert recorded_traffic(recording) == planned_traffic(plan, recording.rank) != {}


def test_the_cases_send_every_kind_of_collective(trained):
    """Every kind of collective that plans have occurs, along one axis and along several together."""
    found = {
        (kind, len(ranks) > max(trained(case)[1].mesh.sizes))
        for case in CASES
        for kind, ranks in planned_traffic(trained(case)[1], 0)
    }

    kinds = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    assert {(kind, several) for kind in kinds for several in (False, True)} <= {
        (str(kind), any_) for kind, any_ in found
    }


def test_a_plan_that_no_order_of_sends_can_follow_says_so(on_ranks, alone):
    """Where a dim is too short for both layouts of a move at once, losses are the same, and the surplus is told."""
    plan = by_chance(MIXTRAL, 6)
    told = [told for (told,) in on_ranks(8, train_planned, plan, MIXTRAL.top_k)]

    assert told[0][0] == pytest.approx(alone(MIXTRAL), abs=1e-5)
    assert any("the plan has" in sentence for sentence in traffic_mismatches(plan, [told[0][1]]))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("mixtral pinned")])
def test_pinned_experts_are_placed_as_the_pins_say(trained, case):
    """Each rank computes the experts of its place along the pinned axes, and no others."""
    _, plan, told = trained(case)
    products = [
        (op.rule, row)
        for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)
        if op.name.endswith(("moe_mlp.up", "moe_mlp.down"))
    ]

    assert len(products) == 2
    for rule, row in products:
        ways = [
            size for size, factor in zip(plan.mesh.sizes, row, strict=True) if rule.factors[factor].name == "experts"
        ]
        assert math.prod(ways) == MIXTRAL.num_experts
    assert len(told) == plan.mesh.num_devices


CONFIG = ParallelConfig(dp=2, up=2, mbs=4)


def backend_of(model=LLAMA, planning=DESCENT, **changes):
    """Build a backend of four ranks, with three steps, whose trials run plans."""
    options = {"warmup_steps": 1, "min_steps": 3, "max_steps": 3, "hang_limit_s": 60.0} | changes
    return PlannedBackend(
        framework=TORCH,
        job=job_of(model),
        cluster=cluster_of(4),
        planner=LayeredStepPlanner(planning=planning),
        **options,
    )


def test_trials_run_pinned_experts(rank_processes):
    """A trial whose experts are pinned to tp, which by hand cuts each of them, has the loss of one process."""
    backend = backend_of(MIXTRAL, EXPERTS_OVER_TP)
    pinned = ParallelConfig(dp=2, tp=2, mbs=4, plan="descent")
    trials = [
        (backend, replace(pinned, plan=HAND)),
        (backend, pinned),
        (replace(backend, cluster=cluster_of(1)), ParallelConfig(mbs=8)),
    ]

    found = [OpenBackend(backend=own, ranks=rank_processes).measure(config, trial_number=0) for own, config in trials]

    for each in found:
        assert each.status is Status.OK, each.reason + each.log_tail
        assert "the plan has" not in each.reason
    assert ["planner shards it" in each.reason for each in found] == [False, True, False]
    losses = [dict(each.conditions)["loss"] for each in found]
    assert losses == pytest.approx([losses[2]] * 3, abs=1e-5)


@pytest.mark.parametrize("clock", ["wall", "virtual"])
def test_trials_run_the_plan_of_their_candidate(rank_processes, clock):
    """A candidate runs by hand or as the planner found it, as its plan says, with the same loss."""
    opened = OpenBackend(backend=backend_of(chosen_clock=clock), ranks=rank_processes)

    found = [opened.measure(replace(CONFIG, plan=plan), trial_number=0) for plan in (HAND, DESCENT.name)]

    for each in found:
        assert (each.status, each.clock, len(each.step_times_s)) == (Status.OK, clock, 3), each.reason + each.log_tail
        assert "the plan has" not in each.reason
        assert each.peak_memory_bytes > 100_000
    assert ["planner shards it" in each.reason for each in found] == [False, True]
    losses = [dict(each.conditions)["loss"] for each in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_planned_step_that_does_not_fit_is_out_of_memory(rank_processes):
    """Ranks may allocate what a device has, as those of the trainer."""
    backend = backend_of()
    (group,) = backend.cluster.groups
    device = replace(group.device, memory_bytes=2**20)
    small = replace(backend, cluster=replace(backend.cluster, groups=(replace(group, device=device),)))

    found = OpenBackend(backend=small, ranks=rank_processes).measure(CONFIG, trial_number=0)

    assert found.status is Status.OUT_OF_MEMORY, found.reason
