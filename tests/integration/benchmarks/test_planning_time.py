"""The benchmark of planning time: a row for each number of layers, and one for each mesh."""

import pytest

pytest.importorskip("jax", reason="the benchmark plans a JAX program")

from benchmarks.speed import planning_time


def test_layers_and_meshes_have_rows(answered):
    """Layers are told on the first mesh, meshes at the number of layers nearest to 18; descent makes none worse."""
    meshes = ("data=2,model=2", "data=4,model=2")
    rows = answered(planning_time, "--layers", 1, 2, "--meshes", *meshes, "--repeats", 1)["rows"]

    assert [(row["layers"], row["mesh"]) for row in rows] == [(1, meshes[0]), (2, meshes[0]), (2, meshes[1])]
    assert all(row["descent_over_d_rec"] <= 1 + 1e-9 for row in rows)
    assert rows[0]["operators"] < rows[1]["operators"]
