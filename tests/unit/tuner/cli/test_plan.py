import importlib.util
import re
from pathlib import Path

import pytest

from costmodels.xla.compiler import has_gpu_compiler
from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import assert_users_mistake

KINDS_OF_MODELS = Path(__file__).resolve().parents[4] / "configs" / "measured" / "kinds" / "models"


def test_a_candidate_is_planned(meshtune, simulated):
    """`plan` shards a layer over a candidate's degrees: what it sends adds up, and every tensor is told."""
    done = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--json")

    assert done.status == 0, done.err
    told = done.json
    assert told["mesh"] == {"dp.0": 2, "dp.1": 2, "tp": 2}
    sent_s = sum(each["seconds"] * each["times"] for each in told["collectives"])
    assert told["comm_s"] == pytest.approx(sent_s)
    assert told["step_time_s"] > told["comm_s"] > 0
    weight = told["shardings"]["layers.0.dense_mlp.up.weight"]
    assert len(weight["axes"]) == len(weight["shape"])
    assert told["pins"] == []


def test_whole_axes(meshtune, simulated):
    """With --whole-axes the mesh is that of the degrees."""
    told = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--whole-axes", "--json").json

    assert told["mesh"] == {"dp": 4, "tp": 2}


def test_a_pin_holds_and_is_reported(meshtune, simulated):
    """A pin cuts what it says, and the report tells what it saved."""
    pin = ("--pin", "op=*.dense_mlp.up,dim=ffn,axis=tp")
    told = meshtune("plan", simulated, "--config", "dp=4,tp=2", *pin, "--json").json
    shown = meshtune("plan", simulated, "--config", "dp=4,tp=2", *pin).out

    (report,) = told["pins"]
    assert (report["ops"], report["held"], report["missing"]) == (1, 1, 0)
    assert "tp" in told["shardings"]["layers.0.dense_mlp.up.weight"]["axes"][-1]
    assert re.search(r"pin \*\.dense_mlp\.up ffn on tp: holds; without it a step takes [\d.e-]+ s (more|less)", shown)


def test_other_kinds_of_blocks_are_planned(meshtune, tmp_path):
    """A layer of every kind is planned under the cost model's names, with the state's heads as a dim to pin."""
    path = tmp_path / "study.yaml"
    path.write_text(study(model=str(KINDS_OF_MODELS / "nemotron-3-nano-30b-a3b.json")), encoding="utf-8")
    pin = ("--pin", "op=*.mamba2.core.scan,dim=state_heads,axis=tp")
    told = meshtune("plan", path, "--config", "tp=8", "--whole-axes", *pin, "--json").json

    (report,) = told["pins"]
    assert (report["ops"], report["held"]) == (1, 1)
    assert {name.split(".")[2] for name in told["shardings"] if name.startswith("layers.")} == {
        *("mamba2", "moe_mlp", "attention")
    }


def test_prediction_modules_are_planned_where_asked(meshtune, tmp_path):
    """With --prediction the modules are planned beside the layers, and without it they are left out."""
    path = tmp_path / "study.yaml"
    path.write_text(study(model="deepseek-v3"), encoding="utf-8")
    asked = ("plan", path, "--config", "tp=8", "--whole-axes", "--planner", "recursive", "--order", "topological")
    with_modules, without = (meshtune(*asked, *more, "--json").json for more in (("--prediction",), ()))

    more = set(with_modules["shardings"]) - set(without["shardings"])
    assert "prediction.0.prediction_join.proj.weight" in more
    assert all(name.startswith("prediction.0.") for name in more)


UP = "op=*.dense_mlp.up,dim=ffn,axis=tp"


@pytest.mark.slow
def test_a_limit_of_memory(meshtune, simulated):
    """With --memory-gib a plan fits, is no faster than that without, and what it needs stands beside the limit."""
    free = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--json").json
    limit_gib = 0.97 * free["peak_memory_bytes"] / 2**30
    limited = ("plan", simulated, "--config", "dp=4,tp=2", "--memory-gib", limit_gib)
    told = meshtune(*limited, "--json").json
    shown = meshtune(*limited).out

    assert told["peak_memory_bytes"] <= told["memory_limit_bytes"] == pytest.approx(limit_gib * 2**30)
    assert told["step_time_s"] >= free["step_time_s"]
    assert free["memory_limit_bytes"] is None
    assert f"{told['peak_memory_bytes'] / 2**30:.3f} GiB per device (limit {limit_gib:g})" in shown


def test_the_limit_of_a_device(meshtune, simulated):
    """`--memory-gib device` is what the cluster's devices have."""
    told = meshtune("plan", simulated, "--config", "tp=8", "--memory-gib", "device", "--json").json

    assert 70 * 2**30 < told["memory_limit_bytes"] < 80 * 2**30
    assert told["peak_memory_bytes"] <= told["memory_limit_bytes"]


@pytest.mark.slow
def test_a_limit_that_nothing_keeps(meshtune, simulated):
    """Where no plan fits, one line tells what is needed without a limit, and the least that was found."""
    done = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--whole-axes", "--memory-gib", "0.5")

    assert done.status == 2
    assert re.fullmatch(
        r"meshtune: --memory-gib = 0\.5: no plan was found that fits: without a limit [\d.]+ are needed; "
        r"the least that was found is [\d.]+\n",
        done.err,
    )
    least_gib = done.err.rpartition(" ")[2].strip()
    again = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--whole-axes", "--memory-gib", least_gib)
    assert again.status == 0


@pytest.mark.slow
def test_a_limit_and_a_pin(meshtune, simulated):
    """Pins hold under a limit."""
    limits = ("--whole-axes", "--memory-gib", "3", "--pin", UP)
    told = meshtune("plan", simulated, "--config", "dp=4,tp=2", *limits, "--json").json

    assert told["peak_memory_bytes"] <= 3 * 2**30
    assert (told["pins"][0]["held"], told["pins"][0]["missing"]) == (1, 0)


@pytest.mark.slow
def test_a_diagnosis(meshtune, simulated):
    """With --diagnose every pin is left out once, and its other ways and dims take its place one at a time."""
    asked = ("plan", simulated, "--config", "dp=2,tp=4", "--pin", UP + ",ways=2", "--diagnose")
    told = meshtune(*asked, "--json").json
    shown = meshtune(*asked).out

    (left_out,) = told["diagnosis"]["left_out"]
    assert left_out == {"pin": "*.dense_mlp.up ffn 2 ways on tp", "saved_s": told["pins"][0]["saved_s"]}
    others = {each["instead"]: each for each in told["diagnosis"]["perturbed"]}
    assert others.keys() == {
        "*.dense_mlp.up ffn 4 ways on tp",
        *(f"*.dense_mlp.up {dim} 2 ways on tp" for dim in ("batch", "sequence", "hidden", "gates")),
    }
    for each in others.values():
        assert each["pin"] == left_out["pin"]
        assert each["more_s"] == pytest.approx(each["step_time_s"] - told["step_time_s"])
        assert each["instead"] in shown
    assert "diagnosis" not in meshtune(*asked[:-1], "--json").json


def test_a_plan_in_words(meshtune, simulated):
    """Totals come first, then collectives by kind and axes, then how the step's tensors lie."""
    shown = meshtune("plan", simulated, "--config", "tp=8", "--layers", "2").out

    assert shown.startswith("pp=1,tp=8,dp=1,")
    assert re.search(r"^[\d.]+ s per step without overlap, of which [\d.e-]+ s communication; ", shown, re.M)
    assert re.search(r"^  all_gather +tp\S* +[\d,]+ x ", shown, re.M)
    assert re.search(r"^  layers\.1\.attention\.out\.weight +\S", shown, re.M)


def test_colours_are_searched_and_explained(meshtune, simulated, tmp_path):
    """TOAST tells its steps, of which the last is as fast as any, and --explain the colours; the drawing is a graph."""
    given = ("plan", simulated, "--config", "tp=8", "--whole-axes", "--planner", "toast", "--explain", "colours")
    told = meshtune(*given, "--drawing", tmp_path / "dims.dot", "--json").json

    assert told["step_time_s"] == pytest.approx(min(step["step_time_s"] for step in told["steps"]))
    assert {"unsharded", "search", "edited", "given", "polished"} <= {step["name"] for step in told["steps"]}
    assert told["explained"]["colours"] > told["explained"]["conflicts"] == 0
    assert (tmp_path / "dims.dot").read_text().startswith("digraph dims {")


WRONG = {
    "--order prize": "--order = 'prize': is no order; did you mean 'price'?",
    f"--planner toast --pin {UP} --diagnose": "--diagnose = 'toast': needs another planner; --planner descent tells it",
    "--explain colors": "--explain = 'colors': is no known explanation",
    "--drawing x.dot": "--drawing = 'x.dot': needs --explain",
    "--layers 99": "--layers = 99: must be at most the ",
    "--prediction": "--prediction: needs modules of multi-token prediction, and ",
    "--pin tp": "--pin = 'tp': must be op, dim, axis, ways, weight_s",
    "--pin op=*": "--pin = 'op=*': lacks op or dim",
    "--pin op=*.upp,dim=ffn,axis=tp": "'*.upp': matches no operator; the nearest are ",
    "--pin op=*.up,dim=ffm,axis=tp": "did you mean 'ffn'?",
    "--pin op=*.dense_mlp.up,dim=result9.0,axis=tp": "dim = 'result9.0': is no dim of layers.0.dense_mlp.up; valid: ",
    "--pin op=*.attention.norm,dim=hidden,axis=tp": (
        "--pin[0].dim = 'hidden': can't be cut: layers.0.attention.norm needs it whole; valid: sequence, batch"
    ),
    f"--pin {UP} --pin op=*.up,dim=hidden,axis=tp": (
        "--pin[1] = '*.up hidden on tp': no level is left to cut hidden of layers.0.dense_mlp.up into 2 parts; "
        "--pin[0] (*.dense_mlp.up ffn on tp) has taken them"
    ),
    "--pin op=*.dense_mlp.up,dim=gates,ways=2 --pin op=*.up,dim=gates,ways=8": (
        "--pin[1] = '*.up gates 8 ways': together with --pin[0] (*.dense_mlp.up gates 2 ways) cuts gates of "
        "layers.0.dense_mlp.up, which is 2, into 8 parts, which do not divide it; at most 2 ways"
    ),
    "--pin op=*.up,dim=ffn,ways=3": (
        "--pin[0].ways = 3: does not divide the 8 devices of the mesh; valid: 1, 2, 4, 8, or weight_s for a soft pin"
    ),
    "--pin op=*.up,dim=ffn,axis=cp": "'cp': is no axis of the mesh dp=4,tp=2; did you mean 'tp'? (valid: dp, tp)",
    "--memory-gib lots": "--memory-gib = 'lots': must be a number above 0, or device",
    "--memory-gib 5 --planner recursive": "--memory-gib: needs another planner",
    "--prove 0": "--prove = '0'",
    "--prove soon": "--prove = 'soon'",
    "--diagnose": "--diagnose: needs --pin",
    "--judge h1000": "--judge = 'h1000': is not a known device; did you mean 'H100'?",
    "--judge h100": "--judge = 'h100': needs --jax or --stablehlo; XLA compiles no other programs",
    "--jax a:b --judge h100 --export torch": "--judge = 'h100': chooses plans for XLA, not for torch",
    "": "--config: is missing; for example --config dp=4,tp=2",
    "--jax a:b": "needs a study file or --jax, not both",
    "--torch a:b": "needs a study file or --torch, not both",
    "--torch a:b --jax a:b": "needs a study file, --jax, --torch or --stablehlo alone",
    "--stablehlo a:b": "needs a study file or --stablehlo, not both",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_can_not_be_planned(meshtune, simulated, arguments):
    """A mistake is one line that names the option and the way out, and status 2."""
    config = () if not arguments or "a:b" in arguments else ("--config", "dp=4,tp=2")

    assert_users_mistake(meshtune("plan", simulated, *config, *arguments.split()), WRONG[arguments])


def test_a_wish_is_taken_as_near_as_the_devices_allow(meshtune, simulated):
    """Ways of a soft pin that do not divide the devices become the nearest that do, and both outputs say so."""
    arguments = ("plan", simulated, "--config", "dp=4,tp=2", "--pin", "op=*.up,dim=ffn,ways=3,weight_s=1")
    told, shown = meshtune(*arguments, "--json"), meshtune(*arguments)

    assert told.json["pins"][0]["ways"] == 4
    assert "pin *.up ffn 3 ways: taken as 4 ways, the nearest that divides devices and dim; holds" in shown.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "factory", "arguments"),
    [
        ("jax", "benchmarks.zoo:gemma_small", {"params.embedding", "params.layers.0.gate_up"}),
        (
            "torch",
            "benchmarks.zoo.torch_modules:mixtral_small",
            {"layers.0.mlp.gate", "layers.0.mlp.gate.mean", "inputs.1"},
        ),
    ],
)
def test_a_step_is_planned(meshtune, library, factory, arguments):
    """A factory's function or module is traced, and its arguments, parameters and moments are what the step begins
    with.
    """
    pytest.importorskip(library, reason=f"pip install 'meshtune[{library}]'")
    on_eight = ("--mesh", "data=2,model=4", "--planner", "recursive")  # the planner that takes least time
    done = meshtune("plan", f"--{library}", factory, *on_eight, "--json")

    assert done.status == 0, done.err
    assert done.json["mesh"] == {"data": 2, "model.0": 2, "model.1": 2}
    assert arguments <= done.json["shardings"].keys()
    assert done.json["unknown_primitives"] == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "mesh", "told"),
    [
        ("benchmarks.zoo", "data=8", "--jax = 'benchmarks.zoo': must be module:factory"),
        ("benchmarks.zoo:mole", "data=8", "did you mean 'moe'?"),
        ("benchmarks.zoo:moe_small", "data=2,data=4", "names an axis twice"),
        ("benchmarks.zoo:moe_small", "data", "must be axes with sizes from 1 to 8"),
    ],
)
def test_jax_steps_that_can_not_be_planned(meshtune, factory, mesh, told):
    """A factory or a mesh that can't be is one message."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")

    assert_users_mistake(meshtune("plan", "--jax", factory, "--mesh", mesh), told)


@pytest.mark.slow
def test_a_module_is_planned_as_its_function_is(meshtune, tmp_path):
    """`--stablehlo` answers like `--jax`, and reads what `--export shardy` has written from either."""
    jax = pytest.importorskip("jax", reason="modules of StableHLO need JAX: pip install 'meshtune[jax]'")
    from benchmarks.zoo import decode_small

    function, arguments, _ = decode_small()
    path, annotated = tmp_path / "step.mlir", tmp_path / "annotated.mlir"
    text = jax.jit(function, donate_argnums=1, keep_unused=True).lower(*arguments).as_text(debug_info=True)
    path.write_text(text, encoding="utf-8")
    on_eight = ("--mesh", "data=2,model=4", "--planner", "recursive", "--whole-axes", "--json")
    own = meshtune("plan", "--jax", "benchmarks.zoo:decode_small", *on_eight)
    read = meshtune("plan", "--stablehlo", path, *on_eight, "--export", "jax")
    written = meshtune("plan", "--stablehlo", path, *on_eight, "--export", "shardy", "--out", annotated)
    again = meshtune("plan", "--stablehlo", annotated, *on_eight)

    assert [done.status for done in (own, read, written, again)] == [0] * 4, read.err + again.err
    named = {name: each for name, each in read.json["shardings"].items() if not name.startswith("constant.")}
    assert named == {name: each for name, each in own.json["shardings"].items() if not name.startswith("constant.")}
    assert read.json["step_time_s"] == pytest.approx(own.json["step_time_s"], rel=0.02)
    assert "params.embedding" in read.json["export"]["arguments"]
    assert len(again.json["shardings"]) >= len(named)


@pytest.mark.slow
def test_the_missing_compiler_of_a_judge_is_named(meshtune):
    """Without XLA's compiler for GPUs, one message names its packages."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    if has_gpu_compiler():
        pytest.skip("XLA's compiler for GPUs is installed here")
    done = meshtune("plan", "--jax", "benchmarks.zoo:decode_small", "--mesh", "data=8", "--judge", "h100")

    assert_users_mistake(done, "pip install jax-cuda12-pjrt")


@pytest.fixture
def jax_factories(tmp_path, monkeypatch):
    """A module of JAX steps in the directory that the command runs in."""
    monkeypatch.chdir(tmp_path)
    lines = (
        "from jax import ShapeDtypeStruct, grad, numpy as jnp, random",
        "def array(*shape): return ShapeDtypeStruct(shape, jnp.float32)",
        "def product(w, x): return (jnp.tanh(x @ w) @ w.T).sum()",
        "def step(): return grad(product), (array(1024, 4096), array(8192, 1024))",
        "def sample(w, x): return jnp.tanh(random.gamma(random.key(0), x @ w))",
        "def samples(): return sample, (array(1024, 1024), array(1024, 1024))",
    )
    tmp_path.joinpath("jax_steps.py").write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.usefixtures("jax_factories")
@pytest.mark.parametrize("place", ["result.0", "operand.1", "operand1.1"])
def test_dims_of_a_jax_step_are_pinned_by_their_places(meshtune, place):
    """`result.0` is the first dim of the first result, `operand1.1` the second of the second operand."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    pin = f"op=dot_general,dim={place},axis=model"
    done = meshtune("plan", "--jax", "jax_steps:step", "--mesh", "model=2", "--pin", pin, "--json")

    assert done.status == 0, done.err
    assert (done.json["pins"][0]["ops"], done.json["pins"][0]["missing"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("jax_factories")
def test_an_operator_without_a_rule_is_counted_and_stays_whole(meshtune):
    """A primitive that nobody wrote a rule for is no error: the report counts it, and no pin can cut it."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    asked = ("plan", "--jax", "jax_steps:samples", "--mesh", "data=2,model=4")
    pinned = meshtune(*asked, "--pin", "op=*random_gamma,dim=result.0,axis=data")

    assert meshtune(*asked, "--json").json["unknown_primitives"] == {"random_gamma": 1}
    assert (
        "no sharding rule is known for random_gamma (1 times); their operands and results are not sharded"
        in meshtune(*asked).out
    )
    assert pinned.status == 2
    assert re.search(r"--pin\[0\].dim = 'result.0': can't be cut: \S*random_gamma needs it whole; no dim", pinned.err)


def test_a_mesh_that_the_cluster_can_not_form(meshtune):
    """A mesh is checked before a factory is imported, and the message says what the cluster has."""
    done = meshtune("plan", "--jax", "nowhere:step", "--mesh", "data=3", "--cluster", "dgx-h100", "--hosts", "2")
    many = meshtune("plan", "--torch", "nowhere:step", "--mesh", "data=8,model=8")

    assert_users_mistake(done, "--mesh = 'data=3': is 3 devices, which do not divide the 16 of dgx-h100")
    assert_users_mistake(many, "--mesh = 'data=8,model=8': is 64 devices, which do not divide the 8 of dgx-a100")


@pytest.mark.slow
def test_dims_of_a_torch_module_are_pinned_by_their_places(meshtune):
    """A product that a module calls is cut along the second dim of its second operand, as the pin says."""
    pytest.importorskip("torch", reason="plans of torch modules need torch: pip install 'meshtune[torch]'")
    asked = ("plan", "--torch", "benchmarks.zoo.torch_modules:llama_small", "--mesh", "data=2,model=4")
    done = meshtune(*asked, "--pin", "op=layers.*.mlp.up.mm,dim=operand1.1,axis=model", "--json")

    assert done.status == 0, done.err
    (report,) = done.json["pins"]
    assert report["ops"] == report["held"] > 0


@pytest.fixture
def factories(tmp_path, monkeypatch):
    """A module of factories in the directory that the command runs in."""
    monkeypatch.chdir(tmp_path)
    lines = (
        "from torch import empty, nn",
        "layer = nn.Linear(4, 4, device='meta')",
        "def silent(): return layer",
        "def vectors(): return layer, (empty(2, 4),)",
        "def strange(): return layer, (empty(2, 4),), 'sum'",
        "def narrow(): return layer, (empty(2, 3),), lambda module, x: module(x).sum()",
    )
    tmp_path.joinpath("torch_steps.py").write_text("\n".join(lines))


@pytest.mark.slow
@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "mesh", "told"),
    [
        ("torch_steps", "data=8", "--torch = 'torch_steps': must be module:factory"),
        ("torch_stepps:silent", "data=8", "can't be imported: No module named 'torch_stepps'"),
        ("torch_steps:silend", "data=8", "did you mean 'silent'?"),
        ("torch_steps:layer.weight", "data=8", "is not defined in torch_steps"),
        ("torch_steps:silent", "data=8", "must return (module, inputs) or (module, inputs, loss)"),
        ("torch_steps:strange", "data=8", "must return (module, inputs) or (module, inputs, loss)"),
        ("torch_steps:vectors", "data=8", "must be one number that depends on a parameter"),
        ("torch_steps:narrow", "data=8", "--torch = 'torch_steps:narrow': can't be traced: "),
        ("torch_steps:vectors", "data=3", "is 3 devices, which do not divide the 8"),
        ("torch_steps:vectors", None, "--mesh: is missing; for example --mesh data=2,model=4"),
    ],
)
def test_torch_steps_that_can_not_be_planned(meshtune, factory, mesh, told):
    """A factory or a mesh that can't be is one message."""
    pytest.importorskip("torch", reason="plans of torch modules need torch: pip install 'meshtune[torch]'")
    done = meshtune("plan", "--torch", factory, *(() if mesh is None else ("--mesh", mesh)))

    assert_users_mistake(done, told)


@pytest.mark.parametrize(("option", "library"), [("--torch", "torch"), ("--jax", "jax")])
def test_a_library_that_is_missing(meshtune, monkeypatch, option, library):
    """Without the library the message names the extra that brings it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))

    done = meshtune("plan", option, "my_training:step", "--mesh", "data=8")

    assert_users_mistake(done, f"pip install 'meshtune[{library}]'")


@pytest.mark.slow
def test_how_short_a_step_can_be_is_proved(meshtune, simulated):
    """With --prove a bound is told that the plan is not below, and on one axis it is the plan's own step."""
    told = meshtune("plan", simulated, "--config", "tp=2,dp=4", "--whole-axes", "--prove", "60", "--json").json
    alone = meshtune("plan", simulated, "--config", "tp=8", "--whole-axes", "--prove", "60").out

    assert 0 < told["bound_s"] <= told["step_time_s"] * (1 + 1e-6)
    assert "this one is within 0.00%" in alone
    assert meshtune("plan", simulated, "--config", "tp=8", "--json").json["bound_s"] is None
