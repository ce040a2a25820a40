"""The programs of passes: the same kernels and collectives as the closed form, in an order, on two streams."""

import itertools

import pytest
from hypothesis import given

from costmodels.blocks.operator import LAYER_FAMILIES, OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.operators.kernels import collective_s, kernel_s
from costmodels.simulator.operator_prices import OperatorPrices
from costmodels.simulator.pass_program import Segment, Work, piece_launches, piece_programs
from costmodels.step.block_costs import block_times
from costmodels.step.communication import issued_collectives, layer_collectives, layer_uses
from costmodels.step.placement import place
from tests.support.settings.random_settings import cases


def programs_of(case):
    """The programs of a case's first configuration on its first kind of device, with its grid of one."""
    grid = ConfigGrid.from_configs([case.grid.config(0)])
    groups = place(case.cluster, grid)
    config, device = case.grid.config(0), case.cluster.devices[0]
    prices = OperatorPrices(case.job, case.runtime, [config])
    return grid, groups, piece_programs(case.job, case.runtime, config, groups, device, prices=prices)


@given(cases(max_configs=1))
def test_a_program_has_the_closed_forms_kernels(case):
    """The kernels of each piece take as long, and are launched as often, as the closed form says of its blocks.

    In a layer's backward pass the gradients of the MLP's kernels come before those of attention, and a product's before
    those of its inputs.
    """
    grid, _, programs = programs_of(case)
    times = block_times(case.job, case.cluster.devices[0], case.runtime, grid, kernel_s)
    issued = issued_collectives(case.job, case.runtime, grid)

    model = case.job.model
    assert {piece for piece, _ in programs} == set(range(len(model.pieces)))
    for (piece, phase), program in programs.items():
        sums = times.forward if phase == Phase.FORWARD else times.backward
        expected = sum(sums[block, 0] for block in model.pieces[piece].blocks)
        assert sum(segment.kernels_s for segment in program) == pytest.approx(expected)
    config = case.grid.config(0)
    prices = OperatorPrices(case.job, case.runtime, [config])
    for piece, (kernels, collectives) in zip(model.pieces, piece_launches(model, prices, config).T, strict=True):
        assert kernels == pytest.approx(sum(times.launches[block, 0] for block in piece.blocks))
        assert collectives == pytest.approx(sum(issued[block, 0] for block in piece.blocks))
    for at, piece in enumerate(model.pieces):
        names = [work.name for segment in programs[at, Phase.BACKWARD] for work in segment.kernels]
        gradients = [name for name in names if "gradient" in name]
        blocks = [name.partition(".")[0] for name in gradients]
        assert [block for block, _ in itertools.groupby(blocks)] == [model.block_names[at] for at in piece.blocks[::-1]]
        for mlp in {"dense_mlp", "moe_mlp"}.intersection(blocks):
            assert gradients.index(f"{mlp}.down.data_gradient") < gradients.index(f"{mlp}.up.data_gradient")


@given(cases(max_configs=1))
def test_a_program_has_the_closed_forms_collectives(case):
    """Each collective runs as often as `layer_uses` counts it; hidden exchanges add only what their messages wait."""
    grid, groups, programs = programs_of(case)
    alone_s = {
        site: float(collective_s(collective)[0])
        for site, collective in layer_collectives(case.job, case.runtime, grid, groups).items()
    }

    pieces = case.job.model.pieces
    for (piece, phase), program in programs.items():
        found: dict[str, float] = {}
        for segment in program:
            for work in segment.traffic:
                found[work.name] = found.get(work.name, 0.0) + work.seconds
        found.pop("cp.start", None)
        expected: dict[str, float] = {}
        for use in layer_uses(case.job, case.runtime, grid):
            # forward collectives that recomputation repeats count as forward, but run in the backward pass
            if use.block in pieces[piece].blocks and use.phase == phase:
                once = use.count[0] / (2.0 if _is_repeated(case, use) else 1.0)
                expected[use.site] = expected.get(use.site, 0.0) + once * alone_s[use.site]
            elif use.block in pieces[piece].blocks and phase == Phase.BACKWARD and _is_repeated(case, use):
                expected[use.site] = expected.get(use.site, 0.0) + use.count[0] / 2.0 * alone_s[use.site]
        expected = {site: seconds for site, seconds in expected.items() if seconds > 0}
        assert found == pytest.approx(expected)


def _is_repeated(case, use):
    in_layer = case.job.model.blocks[use.block].family in LAYER_FAMILIES
    recompute = case.grid.config(0).recompute
    # torchtitan's selective recomputation keeps attention
    keeps_core = case.runtime.selective_products
    of_core = recompute == "selective" and not keeps_core and use.site.startswith(("cp.", "up."))
    return ((recompute == "full" and in_layer) or of_core) and use.phase == Phase.FORWARD


def test_streams_beside_each_other_save_the_stated_share():
    """A segment takes both streams' time less the hidden share of the shorter one."""
    kernel = Work(name="a", kind=OpKind.MATMUL, part="compute", seconds=3.0)
    collective = Work(name="tp.all_gather", kind=OpKind.ALL_GATHER, part="tp", seconds=2.0, link="intra")
    segment = Segment(kernels=(kernel,), traffic=(collective,))

    assert [segment.duration_s(hidden) for hidden in (1.0, 0.5, 0.0)] == [3.0, 4.0, 5.0]
