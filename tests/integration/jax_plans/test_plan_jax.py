"""`plan_jax` shards a JAX function: the same numbers, specs in the caller's trees, and annotations for Shardy."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from costmodels.sharding.device_mesh import mesh_of
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.benchmark_runs import ROOT, json_of
from tests.support.programs.jax_perceptron import ARGUMENTS, array, step
from tests.support.quick_xla import on_devices
from tuner.planners import plan_jax
from tuner.planners.planning import WHOLE_AXES, PlannerOptions

EIGHT_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": on_devices(8)}


def test_zoo():
    """Plans of small programs on eight devices have the caller's trees, cut outputs, and a place in the text for each
    constraint; run, they compute the same numbers to 1e-5 and take what is donated.

    test_referee.py compares the numbers of the others.
    """
    found = json_of("tests.support.graphs.jax_on_devices", "gemma_small_scan", "decode_small")

    for name, plan in found["described"].items():
        assert plan["cut"] > 0, name
        assert plan["is_in_tree"], name
        assert plan["is_out_tree"], name
        assert plan["constraints"] > 0, name
        assert plan["missing"] == [], name
    for name, numbers in found["run"].items():
        assert numbers["error"] < 1e-5, name
        assert numbers["donated"] > numbers["kept"] == 0, name


def test_documented_example():
    """The first example of the documentation runs as it stands there."""
    text = (ROOT / "docs" / "sharding-plans.md").read_text(encoding="utf-8")
    section = text[text.index("## From Python") :]
    example = section[section.index("```python\n") + len("```python\n") :].partition("```")[0]
    environment = os.environ | EIGHT_DEVICES | {"PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", example], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr[-4000:]


def test_specs_are_in_the_callers_words():
    """Parameters are cut over `model` where they lie and where they come back, and each gradient is added up once."""
    options = replace(WHOLE_AXES, overlap=False)
    plan = plan_jax(step, *ARGUMENTS, mesh="data=2,model=4", donated=("params",), options=options)

    params = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}
    assert plan.in_specs[0] == params
    assert plan.out_specs == (params, PartitionSpec())
    added = [(each.op, each.spec) for each in plan.constraints if each.at == "written" and "grad" in each.op]
    assert added == [
        ("grad.dot_general", PartitionSpec(None, "model")),
        ("grad.dot_general.2", PartitionSpec("model", None)),
    ]
    assert plan.in_specs[1]["x"] == PartitionSpec("data", None)
    assert plan.donate_argnums == (0,)
    assert plan.more_sent == ()


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "model": 4},
        AbstractMesh((2, 4), ("data", "model")),
        mesh_of("data=2,model=4", find_cluster("dgx-a100")),
    ],
    ids=["sizes", "abstract", "on a cluster"],
)
def test_a_mesh_may_be_given_otherwise(mesh):
    """Sizes by names, a mesh of JAX and one of Meshtune lead to the plan that the text does."""
    found = plan_jax(step, *ARGUMENTS, mesh=mesh)

    assert found.in_specs == plan_jax(step, *ARGUMENTS, mesh="data=2,model=4").in_specs
    assert found.planned.plan.mesh.cluster.name == "dgx-a100"


def test_a_large_mesh_has_as_many_hosts_as_it_fills():
    """Axes of 16 devices stand on two hosts of eight, and on hosts of another kind if that is asked for."""
    mesh = plan_jax(step, *ARGUMENTS, mesh="data=4,model=4", cluster="dgx-h100").planned.plan.mesh

    assert mesh.cluster.num_hosts == 2
    assert mesh.cluster.name == "dgx-h100"


def test_axes_that_divide_nothing_leave_all_whole():
    """A mesh whose size divides no dim is no mistake, but told: nothing is cut, and the function still runs."""
    x = jnp.arange(8.0)
    with pytest.warns(UserWarning, match=r"a=7 of the mesh divides no dim .* can be cut: 8$"):
        plan = plan_jax(lambda x: x * 2, x, mesh="a=7", cluster="dgx-a100")

    assert plan.in_specs == (PartitionSpec(None),)
    assert jax.jit(plan.function)(x).tolist() == (x * 2).tolist()


def test_split_axes_have_names_of_their_own():
    """Without whole axes the specs name a part of an axis for each prime factor."""
    plan = plan_jax(step, *ARGUMENTS, mesh="all=8", options=PlannerOptions())

    assert plan.planned.plan.mesh.names == ("all.0", "all.1", "all.2")


def test_arguments_are_donated_by_name():
    """The function keeps the names of its arguments, so that `jax.jit` finds the donated ones by them."""
    values = jax.tree.map(lambda _: jnp.full((4, 4), 0.5), ARGUMENTS)
    plan = plan_jax(step, *values, mesh="data=1", donated=("params",))

    jax.jit(plan.function, donate_argnames=("params",))(*values)

    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(values[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(values[1]))


def test_too_few_devices_are_told_when_they_are_needed():
    """A plan for more devices than are here is made, annotated, and refused where it would be placed."""
    plan = plan_jax(step, *ARGUMENTS, mesh="data=256,model=4")

    assert 'sdy.mesh @mesh = <["data"=256, "model"=4]>' in plan.shardy()
    with pytest.raises(ConfigError, match=r"mesh = 'data=256,model=4': needs 1024 devices; \d+ (is|are) here"):
        _ = plan.in_shardings


def test_shardy_annotates_arguments_results_and_constraints():
    """The text has the specs of arguments and results, what is donated, and a pin where partial sums are added up."""
    options = replace(WHOLE_AXES, overlap=False)
    plan = plan_jax(step, *ARGUMENTS, mesh="data=2,model=4", donated=("params",), options=options)
    lines = [line.strip() for line in plan.shardy().splitlines()]
    arguments, _, results = next(line for line in lines if "@main" in line).partition(") -> (")

    assert arguments.count("sdy.sharding =") == 4
    assert '%arg0: tensor<8192x2048xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"model"}, {}]>' in arguments
    assert arguments.count("tf.aliasing_output") == 2
    assert results.count("sdy.sharding =") == 3
    products = [number for number, line in enumerate(lines) if "stablehlo.dot_general" in line]
    assert [lines[number + 1].partition(" <@mesh, ")[2] for number in products] == [
        '[{"data"}, {"model"}]> : tensor<8192x8192xf32>',
        '[{"data"}, {}]> : tensor<8192x2048xf32>',  # added up
        '[{}, {"model"}]> : tensor<2048x8192xf32>',
        '[{"data"}, {"model"}]> : tensor<8192x8192xf32>',
        '[{"model"}, {}]> : tensor<8192x2048xf32>',
    ]


def test_without_shardy_there_is_no_text():
    """With Shardy switched off, JAX's annotations would be GSPMD's, and the message names the switch."""
    plan = plan_jax(step, *ARGUMENTS, mesh="data=2")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with pytest.raises(ConfigError, match="jax_use_shardy_partitioner: is off"):
            plan.shardy()
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mesh": "data"}, "mesh = 'data': must be axes with sizes of at least 1; for example data=2,model=4"),
        ({"mesh": {"data": 0}}, "mesh = {'data': 0}: must have named axes of at least one device"),
        ({"mesh": "data=2", "cluster": "dgx-a10"}, "did you mean 'dgx-a100'"),
        ({"mesh": "data=2", "donated": ("parms",)}, "donated = 'parms': must be one of the function's arguments"),
    ],
)
def test_mistakes_are_told(given, told):
    """A mesh, a cluster or a donated argument that can't be is named, with what could."""
    with pytest.raises(ConfigError) as caught:
        plan_jax(step, *ARGUMENTS, **given)

    assert told in str(caught.value)


def test_other_shapes_than_planned_are_planned_again():
    """Another batch is planned when the function is traced with it, once, with a warning that names what differs."""
    params, batch = jax.tree.map(lambda leaf: jnp.full((16, 16), 0.01, leaf.dtype), ARGUMENTS)
    smaller = jax.tree.map(lambda leaf: leaf[:8], batch)
    plan = plan_jax(step, params, batch, mesh="data=2")

    with pytest.warns(UserWarning, match=r"step is planned again: with \[1\]\['x'\]: float32\[8, ?16\]"):
        found = jax.eval_shape(plan.function, params, smaller)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = jax.eval_shape(plan.function, params, smaller)
        planned = jax.eval_shape(plan.function, params, batch)

    assert found == again == jax.eval_shape(step, params, smaller)
    assert planned == jax.eval_shape(step, params, batch)


def test_operators_without_a_rule_are_told_by_name():
    """An operator that no rule describes is warned of by its name, or refused if that is asked for."""

    def samples(x, weight):
        return jax.random.gamma(jax.random.key(0), x @ weight) + jax.random.gamma(jax.random.key(1), x @ weight)

    given = (array(64, 32), array(32, 16))

    with pytest.warns(UserWarning, match=r"samples: no sharding rule is known for random_gamma \(2 times\)"):
        plan = plan_jax(samples, *given, mesh="data=2")
    with pytest.raises(
        ConfigError, match=r"samples = 'random_gamma \(2 times\)': has operators without a sharding rule"
    ):
        plan_jax(samples, *given, mesh="data=2", strict=True)
    assert jax.eval_shape(plan.function, *given) == jax.eval_shape(samples, *given)


SIZES = {"data": 2, "model": 4}
PLACED = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))


@pytest.mark.parametrize("donated", [(), ("params",)])
def test_in_shardings_of_the_user_are_pins(donated):
    """What the user says of arguments holds in the plan, for leaves and whole trees, in specs or shardings."""
    wanted = PartitionSpec("model", None)
    shardings = ({"up": NamedSharding(PLACED, wanted), "down": None}, PartitionSpec(("data", "model")))

    plan = plan_jax(step, *ARGUMENTS, mesh=SIZES, in_shardings=shardings, donated=donated)

    assert plan_jax(step, *ARGUMENTS, mesh=SIZES, donated=donated).in_specs[0]["up"][0] != "model"
    assert plan.in_specs[0]["up"][0] == "model"
    assert all(set(spec[0]) == {"data", "model"} for spec in plan.in_specs[1].values())
    assert all(report.is_held for report in plan.planned.found.reports)


def test_constraints_of_the_user_are_pins():
    """`with_sharding_constraint` in the function holds in the plan, and the gradient's constraint beside it."""

    def loss(weight, x):
        hidden = jax.lax.with_sharding_constraint(x @ weight, NamedSharding(PLACED, PartitionSpec(None, "data")))
        return jnp.sum(hidden**2)

    plan = plan_jax(jax.grad(loss), array(64, 128), array(256, 64), mesh=SIZES).planned.plan

    rows = {op.name: row for op, row in zip(plan.graph.ops, plan.served.tolist(), strict=True)}
    constrained = [row for name, row in rows.items() if "sharding_constraint" in name]
    assert len(constrained) == 2
    assert all(row[0] == 1 for row in constrained)


@pytest.mark.parametrize(
    ("shardings", "told"),
    [
        ((PartitionSpec(), PartitionSpec("dat")), "in_shardings = 'dat'"),
        ((PartitionSpec(None, None, "data"), None), "has more dims than params.down of shape (8192, 2048)"),
        (("data", None), "must be a NamedSharding, a PartitionSpec or None"),
        ((None,), "must be a tree like the arguments"),
    ],
)
def test_wrong_shardings_are_refused(shardings, told):
    """A sharding that belongs to another mesh, another shape or another tree is named."""
    with pytest.raises(ConfigError) as caught:
        plan_jax(step, *ARGUMENTS, mesh=SIZES, in_shardings=shardings)

    assert told in str(caught.value)


def test_keyword_arguments_are_planned():
    """Arguments by keyword have specs and can be donated, and the planned function takes them either way."""

    def scaled(x, *, weight, bias):
        return x @ weight + bias

    x, weight, bias = jnp.ones((4, 8)), jnp.full((8, 16), 0.5), jnp.ones(16)
    plan = plan_jax(scaled, x, mesh="data=1", keywords={"bias": bias, "weight": weight}, donated=("bias",))

    assert len(plan.in_specs) == 3
    assert plan.donate_argnums == (1,)
    for found in (jax.jit(plan.function)(x, bias, weight), jax.jit(plan.function)(x, weight=weight, bias=bias)):
        assert (found == scaled(x, weight=weight, bias=bias)).all()
    with pytest.raises(ConfigError, match="keywords = 'weigth'"):
        plan_jax(scaled, x, mesh="data=1", keywords={"weigth": weight})
