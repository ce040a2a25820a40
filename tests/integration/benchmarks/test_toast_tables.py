"""TOAST's tables: their meshes, what a row tells, and what is refused."""

import math

import pytest

pytest.importorskip("jax", reason="the benchmark plans JAX programs")

from benchmarks.papers import toast_planners, toast_tables
from benchmarks.papers.toast_tables import MODELS, Model, mesh_for, over_manual
from costmodels.sharding.device_mesh import DeviceMesh
from hardware.cluster_file import find_cluster


@pytest.mark.parametrize(
    ("model", "devices", "mesh"),
    [
        ("T2B", 8, "data=4,model=2"),
        ("T2B", 128, "data=16,model=8"),
        ("T2B-32k", 128, "batch=2,seq=32,model=2"),
        ("T2B-16k", 32, "batch=4,seq=4,model=2"),
    ],
)
def test_meshes_are_those_of_the_paper(model, devices, mesh):
    """Two axes, or three for long sequences: 2x32x2 for 32k tokens on 128 devices, as figure 10 says."""
    cluster = find_cluster("dgx-a100", devices // 8)

    assert mesh_for(MODELS[model], cluster, devices).in_words == mesh


@pytest.mark.parametrize(
    ("fits", "ratio"),
    [((True, True), 0.5), ((True, False), 0.0), ((False, True), math.inf), ((False, False), 0.5)],
    ids=["both fit", "ours fits", "theirs fits", "neither fits"],
)
def test_what_fits_comes_before_what_is_fast(fits, ratio):
    """Times are compared where both plans fit or neither; else the one that fits wins, whatever its time."""
    ours, theirs = fits
    cells = {"unseeded": {"step_time_s": 1.0, "fits": ours}, "manual": {"step_time_s": 2.0, "fits": theirs}}

    assert over_manual({"cells": cells}) == ratio


def test_a_row_tells_of_every_planner(answered, monkeypatch):
    """Each planner's plan is costed alike, and HiGHS's is the fastest."""
    monkeypatch.setitem(MODELS, "T2B-scan", Model(factory="decode_small"))

    def two_devices(_model, cluster, _devices):
        return DeviceMesh(names=("data", "model"), sizes=(1, 2), cluster=cluster)

    monkeypatch.setattr(toast_tables, "mesh_for", two_devices)
    asked = (
        "--models",
        "T2B-scan",
        "--clusters",
        "TPUv3",
        "--devices",
        8,
        "--prove",
        60,
        "--automap",
        30,
        "--seeds",
        2,
    )
    (row,) = answered(toast_tables, *asked)["rows"]
    cells = row["cells"]

    assert list(cells) == list(toast_planners.PLANNERS)
    assert cells["milp"]["known"] == "optimal"
    assert all(cell["step_time_s"] >= cells["milp"]["step_time_s"] * (1 - 1e-9) for cell in cells.values())
    assert all(cell["fits"] for cell in cells.values())
    assert cells["seeded"]["step_time_s"] <= cells["unseeded"]["step_time_s"] * (1 + 1e-9)
    assert len(cells["unseeded"]["runs_s"]) == cells["unseeded"]["fitting_runs"] == 2
    assert not row["only_ours_fit"]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--models", "T2", "did you mean 'T2B'?"),
        ("--devices", "16", "--devices = 16"),
        ("--planners", "alpa", "manual"),
    ],
)
def test_what_the_tables_do_not_have(capsys, option, value, told):
    """A name that is none is one message, and status 2."""
    assert toast_tables.main([option, value]) == 2
    assert told in capsys.readouterr().err
