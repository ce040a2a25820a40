"""TOAST's tables: their meshes, what a row tells, and what is refused."""

import pytest

pytest.importorskip("jax", reason="the benchmark plans JAX programs")

from benchmarks.papers import toast_planners, toast_tables
from benchmarks.papers.toast_tables import MODELS, Model, mesh_for
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
