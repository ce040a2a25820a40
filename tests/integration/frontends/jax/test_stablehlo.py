"""StableHLO modules as JAX functions: their values, plans, names and refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

from benchmarks.zoo import FACTORIES
from costmodels.sharding.device_mesh import mesh_from
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.frontends.jax.program import find_numbers, name_arguments, trace_function
from costmodels.sharding.frontends.jax.stablehlo.reading import read_stablehlo
from hardware.io.errors import ConfigError
from tests.support.graphs.stablehlo import MODULES, PROGRAMS, run_module
from tuner.planners.planning import PlannerOptions, plan_graph


def write(folder, text):
    """Write a module to a file."""
    path = folder / "step.mlir"
    path.write_text(text)
    return path


def compute(step, arguments):
    """Return the results of a module's function for its arguments in the module's order."""
    leaves, tree = jax.tree.flatten(step.arguments)
    assert len(leaves) == len(arguments)
    with step.types():
        return jax.tree.leaves(jax.jit(step.function)(*jax.tree.unflatten(tree, arguments)))


def assert_equal(found, expected):
    """Check values, types and their number."""
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_names", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_computes_what_xla_computes_from_its_text(name, has_names, tmp_path):
    """JAX's own lowering comes back as a function with the same values, with and without names of operators."""
    function, arguments = PROGRAMS[name]
    text = jax.jit(function, keep_unused=True).lower(*arguments).as_text(debug_info=has_names)

    assert_equal(compute(read_stablehlo(write(tmp_path, text)), arguments), run_module(text, *arguments))


@pytest.mark.parametrize("name", MODULES)
def test_a_text_computes_what_xla_computes_from_it(name, tmp_path):
    """Forms that JAX itself does not write have the values that XLA gives them."""
    text, arguments = MODULES[name]

    assert_equal(compute(read_stablehlo(write(tmp_path, text)), arguments), run_module(text, *arguments))


@pytest.mark.parametrize("name", ["gemma_small_scan", "moe_small", "unet_small", "decode_small"])
def test_a_program_is_planned_as_from_its_function(name, tmp_path):
    """Its arguments have their names and states, loops are scans, and a plan costs what it costs from the function."""
    function, arguments, donated = FACTORIES[name]()
    numbers = tuple(find_numbers(donated, name_arguments(function, len(arguments)), key="donated"))
    text = jax.jit(function, donate_argnums=numbers, keep_unused=True).lower(*arguments).as_text(debug_info=True)
    step = read_stablehlo(write(tmp_path, text))
    program = trace_function(step.function, *step.arguments, donated=step.donated)
    own = trace_function(function, *arguments, donated=donated)
    graphs = [
        graph_of_jax(step.function, *step.arguments, donated=step.donated),
        graph_of_jax(function, *arguments, donated=donated),
    ]
    mesh, options = mesh_from("data=2,model=4", "dgx-a100"), PlannerOptions(planner="recursive", whole_axes=True)
    plans = [plan_graph(graph, mesh, options) for graph in graphs]

    assert graphs[0].unknown == ()
    assert program.name == own.name
    assert program.arguments == own.arguments
    products = [[op.name for op in graph.ops if op.primitive == "dot_general"] for graph in graphs]
    assert products[0] == products[1]
    assert sum(op.flop * op.times for op in graphs[0].ops) == sum(op.flop * op.times for op in graphs[1].ops)
    assert plans[0].step_time_s == pytest.approx(plans[1].step_time_s, rel=0.02)
    assert plans[0].cost.peak_memory_bytes == pytest.approx(plans[1].cost.peak_memory_bytes, rel=0.15)


def test_bytecode_and_portable_artifacts_are_read_like_texts(tmp_path):
    """What `jax.export` and MLIR itself write as bytes has the values of the text."""
    function, arguments = PROGRAMS["scanned"]
    exported = jax.export.export(jax.jit(function))(*arguments)
    expected = [np.asarray(each) for each in jax.tree.leaves(function(*arguments))]
    with jax.interpreters.mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        with (tmp_path / "own.mlirbc").open("wb") as file:
            module.operation.write_bytecode(file)
    (tmp_path / "portable.mlirbc").write_bytes(exported.mlir_module_serialized)

    for name in ("own", "portable"):
        assert_equal(compute(read_stablehlo(tmp_path / f"{name}.mlirbc"), arguments), expected)


def test_a_file_of_jax_export_is_read(tmp_path):
    """The file that `Exported.serialize` writes holds a portable artifact."""
    pytest.importorskip("flatbuffers", reason="JAX writes such files with flatbuffers")
    function, arguments = PROGRAMS["calls"]
    path = tmp_path / "step.exported"
    path.write_bytes(jax.export.export(jax.jit(function))(*arguments).serialize())

    assert_equal(compute(read_stablehlo(path), arguments), [np.asarray(function(*arguments))])


CHOLESKY = "stablehlo.custom_call @lapack_spotrf_ffi calls a kernel that Meshtune does not know"


@pytest.mark.parametrize("has_names", [False, True])
def test_an_unknown_operator_is_refused_by_name_and_line(has_names, tmp_path):
    """The line is the file's, also where the text says which line of a program an operator comes from."""
    text = jax.jit(lambda x: jnp.linalg.cholesky(x * 2) + 1).lower(jnp.eye(3)).as_text(debug_info=has_names)
    (line,) = (number for number, each in enumerate(text.splitlines(), 1) if "@lapack_spotrf_ffi" in each)
    step = read_stablehlo(write(tmp_path, text))

    with pytest.raises(ConfigError, match=re.escape(f"line {line}: {CHOLESKY}")):
        jax.make_jaxpr(step.function)(*step.arguments)


BODY = "module {{ func.func @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{\n{body}\nreturn %0 : tensor<4xf32> }} }}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("module {\n func.func @main(\n", "is no StableHLO module: line 2: expected non-function type"),
        ("module {}", "has no function main, but none"),
        (
            "module { func.func @main(%arg0: tensor<?xf32>) -> tensor<?xf32> { return %arg0 : tensor<?xf32> } }",
            "line 1: func.func has the shape tensor<?xf32>, which is not static, which Meshtune does not read",
        ),
        (
            BODY.format(body="%0 = foo.bar %arg0 : tensor<4xf32>"),
            "is no StableHLO module: line 2: Dialect `foo' not found for custom op 'foo.bar'",
        ),
        (
            BODY.format(
                body='%0 = "stablehlo.all_reduce"(%arg0) ({\n^bb0(%a: tensor<f32>, %b: tensor<f32>):\n'
                "%c = stablehlo.add %a, %b : tensor<f32>\nstablehlo.return %c : tensor<f32>\n}) "
                "{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>"
            ),
            "line 2: stablehlo.all_reduce is an operator that Meshtune does not know",
        ),
    ],
)
def test_modules_that_cannot_be_read(text, told, tmp_path):
    """A mistake, a missing main function, open shapes and unknown operators are told with their lines."""
    with pytest.raises(ConfigError, match=re.escape(told)):  # noqa: PT012 # an operator is read as it is traced
        step = read_stablehlo(write(tmp_path, text))
        jax.make_jaxpr(step.function)(*step.arguments)


def test_files_that_are_no_modules(tmp_path):
    """A missing file and foreign bytes are told apart."""
    with pytest.raises(ConfigError, match="no such file"):
        read_stablehlo(tmp_path / "none")
    (tmp_path / "foreign").write_bytes(b"\x00\xff\x07")
    with pytest.raises(
        ConfigError, match=r"is neither StableHLO text, MLIR bytecode nor a file of jax\.export|flatbuffers"
    ):
        read_stablehlo(tmp_path / "foreign")
