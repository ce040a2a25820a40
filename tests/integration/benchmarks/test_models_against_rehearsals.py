"""Judge of our models by rehearsals: what it counts as equal, and what it names."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.judges.models_against_rehearsals import BOUNDS, compare, kind_of, main
from benchmarks.support.rehearsed_layouts import FRAMEWORKS, Layout, RehearsedLayout, setting_of
from costmodels.blocks.operator import OpKind
from costmodels.step.memory.peak import NOT_COUNTED
from costmodels.step.stage_figures import stage_figures
from tests.support.rehearsal.megatron_study import needs_megatron
from tuner.rehearsal.answer import Collective, RankAnswer

LAYOUT = Layout(text="pp=2,tp=2,dp=2,mbs=1")
SETTING, CONFIG = setting_of(FRAMEWORKS["megatron-core"], LAYOUT)
NAMES = {
    OpKind.ALL_GATHER: "_allgather_base_",
    OpKind.REDUCE_SCATTER: "_reduce_scatter_base_",
    OpKind.ALL_REDUCE: "allreduce_",
    OpKind.SEND_RECV: "send",
}


def as_predicted(stage: int) -> RankAnswer:
    """The answer of a framework that does exactly what the cost model says."""
    figures = stage_figures(SETTING, CONFIG)
    parts = {name: int(sizes[stage]) for name, sizes in figures.memory.parts_bytes.items()}
    states = {name: parts[name] for name in ("weights", "gradients", "optimizer")}
    peak = sum(size for name, size in parts.items() if name not in NOT_COUNTED["allocated"])
    return RankAnswer(
        rank=stage * 4,
        stage=stage,
        verdict="accepted",
        parameters=round(float(figures.parameters[stage])),
        peak_bytes=peak,
        parts=states | {"activations": peak - sum(states.values())},
        collectives=tuple(
            Collective(name=NAMES[one.kind], size_bytes=one.size_bytes, ranks=one.ranks, peer=None, count=one.count)
            for one in figures.collectives[stage]
        ),
        invented={},
    )


def compared(*answers: RankAnswer, broken=()):
    """The rows of the layout with these answers."""
    return compare(RehearsedLayout(layout=LAYOUT, setting=SETTING, config=CONFIG, broken=dict(broken), answers=answers))


def test_what_agrees_has_no_remarks():
    """A framework that does what is predicted has ratios of one."""
    rows = compared(as_predicted(0), as_predicted(1))

    assert [row.unlike for row in rows] == [(), ()]
    for row in rows:
        assert row.ratios == pytest.approx(dict.fromkeys(BOUNDS, 1.0), rel=1e-6)


def test_what_differs_is_named():
    """Twice the gradients and parameters, and a collective of its own: each is named with its figure."""
    usual = as_predicted(0)
    further = Collective(name="alltoall_", size_bytes=1 << 30, ranks=(0, 1, 2, 3), peer=None, count=1)
    (row,) = compared(
        replace(
            usual,
            parameters=2 * (usual.parameters or 0),
            parts={**usual.parts, "gradients": 2 * usual.parts["gradients"]},
            collectives=(*usual.collectives, further),
        )
    )
    told = "; ".join(row.unlike)

    assert row.ratios["gradients"] == pytest.approx(0.5)
    for words in ("parameters: ", "gradients: 0.500", "all_to_all of 4 ranks, 1,073,741,824 bytes: rehearsed alone"):
        assert words in told


def test_verdicts_are_held_to_our_rules():
    """What the framework refuses and our rules allow is named, and so is the opposite."""
    refused = RankAnswer(rank=0, stage=0, verdict="refused", error="AssertionError: no", parts={}, invented={})
    (allowed,), (agreed,) = compared(refused), compared(refused, broken={"heads": "tp must divide the heads"}.items())
    (ran,) = compared(as_predicted(0), broken={"heads": "tp must divide the heads"}.items())

    assert "AssertionError: no" in allowed.unlike[0]
    assert agreed.unlike == ()
    assert "accepted, but our rules forbid it (heads: tp must divide the heads)" in ran.unlike[0]


def test_operators_of_pytorch_have_their_kinds():
    """Names of c10d and of functional collectives; receptions are counted where they are sent."""
    assert kind_of("allgather_into_tensor_coalesced_") is kind_of("all_gather_into_tensor") is OpKind.ALL_GATHER
    assert kind_of("reduce_scatter_tensor_coalesced_") is OpKind.REDUCE_SCATTER
    assert kind_of("alltoall_base_") is OpKind.ALL_TO_ALL
    assert kind_of("recv_") is None


def test_a_layout_that_is_not_there_is_a_mistake(capsys):
    """`--layouts` names no layout: exit status 2 and the text."""
    if FRAMEWORKS["megatron-core"].missing():
        pytest.skip("`make frameworks` installs megatron-core")

    assert main(["--layouts", "tp=7"]) == 2
    assert "tp=7" in capsys.readouterr().err


@pytest.mark.slow
@needs_megatron()
def test_megatron_does_what_is_predicted(capsys):
    """With tp=4 and dp=2 the framework's own states and collectives are the predicted ones."""
    main(["--layouts", "tp=4,dp=2,mbs=1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]

    for row in rows:
        for name in ("weights", "gradients", "optimizer", "bytes"):
            assert row[name] == pytest.approx(1, abs=BOUNDS[name])
