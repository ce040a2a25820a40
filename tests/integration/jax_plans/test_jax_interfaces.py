"""What a JAX user says of a step holds in its plan: `shard_map`, static and donated arguments, a state from a file."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from hardware.io.errors import ConfigError
from tests.support.benchmark_runs import ROOT, json_of
from tuner.planners import plan_jax


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a program on eight devices tells of its planned step."""
    return json_of("tests.support.graphs.jax_interfaces", tmp_path_factory.mktemp("state"))


def test_shard_map_is_kept_with_its_specs_as_pins(told):
    """Parameters lie as the specs of the body and of its gradient say, both count as their bodies on each shard, and
    the step computes the same.
    """
    assert told["specs"] == {"up": "P(None, 'model')", "down": "P('model', None)"}
    assert told["unknown"] == []
    assert told["pins"] == 4
    assert told["held"]
    # one product of 32 x 64 x 16 in the forward pass, and two in the backward pass
    assert told["flop"] == [2 * 32 * 64 * 16, 4 * 32 * 64 * 16]
    assert told["error"] < 1e-5


def test_donated_memory_is_reused(told):
    """XLA's aliases have all bytes of a device's parameters and moments, and the donated arrays are gone."""
    assert told["donated"] == [1, 2]
    assert told["alias_bytes"] == told["state_bytes"] > 0
    assert told["is_gone"]


def test_static_arguments_are_planned_with_their_values(told):
    """A static argument has no spec, and with another value the step is planned again, with a warning."""
    assert told["static"] == [0]
    (warning,) = told["warnings"]
    assert "planned again: with static (Config(width=2, rate=0.1),)" in warning
    assert told["error_of_other"] < 1e-5


def test_a_state_is_loaded_as_the_plan_has_it(told):
    """Parameters and moments from files lie as planned, and the next step is that of one device; the mesh is the
    user's.
    """
    assert told["is_placed"]
    assert told["error_after_loading"] < 1e-5
    assert told["is_mesh"]


def test_a_shard_map_on_another_mesh_is_refused():
    """A body for more devices along an axis than the plan has is named, with the plan's mesh."""
    mesh = AbstractMesh((4,), ("data",))
    body = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    with pytest.raises(ConfigError, match=r"shard_map = 'data=4': of shard_map is not the plan's; .* data=2"):
        plan_jax(lambda x: body(x) + 1, jnp.ones(8), mesh="data=2")


def test_static_arguments_need_a_hash():
    """A static argument that JAX could not take is named."""
    with pytest.raises(ConfigError, match="static = 'sizes': must have a hash"):
        plan_jax(lambda sizes, x: x * sizes[0], [2], jnp.ones(8), mesh="data=2", static=("sizes",))


def test_documented_example(tmp_path):
    """The JAX example of the documentation runs as it stands there."""
    text = (ROOT / "docs" / "plans-in-your-code.md").read_text(encoding="utf-8")
    example = text[text.index("## JAX") :].partition("```python\n")[2].partition("```")[0]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]
