import importlib.util
import re

import pytest

from tests.tuner.cli.command_line import KEYS


def test_a_candidate_is_planned(meshtune, simulated):
    """`plan` shards a layer over a candidate's degrees: what it sends adds up, and every tensor is told."""
    done = meshtune("plan", simulated, "--config", "dp=4,tp=2", "--json")

    assert done.status == 0, done.err
    told = done.json
    assert told.keys() >= KEYS["plan"]
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


def test_a_plan_in_words(meshtune, simulated):
    """Totals come first, then collectives by kind and axes, then how the step's tensors lie."""
    shown = meshtune("plan", simulated, "--config", "tp=8", "--layers", "2").out

    assert shown.startswith("pp=1,tp=8,dp=1,")
    assert re.search(r"^[\d.]+ s per step, [\d.e-]+ s of them communication, nothing overlapped; ", shown, re.M)
    assert re.search(r"^  all_gather +tp\S* +[\d,]+ x ", shown, re.M)
    assert re.search(r"^  layers\.1\.attention\.out\.weight +\S", shown, re.M)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--config", "dp=4,tp=2", "--order", "prize"), "--order = 'prize': is no order; did you mean 'price'?"),
        (("--config", "dp=4,tp=2", "--layers", "99"), "--layers = 99: must be at most the "),
        (("--config", "dp=4,tp=2", "--pin", "tp"), "--pin = 'tp': must be op, dim, axis, ways, weight_s"),
        (("--config", "dp=4,tp=2", "--pin", "op=*"), "--pin = 'op=*': lacks op or dim"),
        (
            ("--config", "dp=4,tp=2", "--pin", "op=*.upp,dim=ffn,axis=tp"),
            "'*.upp': matches no operator; the nearest are ",
        ),
        (("--config", "dp=4,tp=2", "--pin", "op=*.up,dim=ffm,axis=tp"), "did you mean 'ffn'?"),
        ((), "--config: is missing; for example --config dp=4,tp=2"),
        (("--jax", "a:b"), "needs a study file or --jax, not both"),
        (("--torch", "a:b"), "needs a study file or --torch, not both"),
        (("--torch", "a:b", "--jax", "a:b"), "needs a study file, --jax or --torch alone"),
    ],
)
def test_what_can_not_be_planned(meshtune, simulated, arguments, told):
    """A mistake is one line that names the option and the way out, and status 2."""
    done = meshtune("plan", simulated, *arguments)

    assert done.status == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1


def test_a_jax_step_is_planned(meshtune):
    """A factory's function is traced, and its arguments are what the step begins with."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    done = meshtune("plan", "--jax", "benchmarks.zoo_jax:gemma_small", "--mesh", "data=2,model=4", "--json")

    assert done.status == 0, done.err
    assert done.json["mesh"] == {"data": 2, "model.0": 2, "model.1": 2}
    assert {"params.embedding", "params.layers.0.gate_up"} <= done.json["shardings"].keys()
    assert done.json["unknown_primitives"] == {}


@pytest.mark.parametrize(
    ("factory", "mesh", "told"),
    [
        ("benchmarks.zoo_jax", "data=8", "--jax = 'benchmarks.zoo_jax': must be module:factory"),
        ("benchmarks.zoo_jaxx:moe", "data=8", "can't be imported: No module named 'benchmarks.zoo_jaxx'"),
        ("benchmarks.zoo_jax:mole", "data=8", "did you mean 'moe'?"),
        ("benchmarks.zoo_jax:JOB", "data=8", "is nothing that benchmarks.zoo_jax has"),
        ("benchmarks.zoo_jax:moe_small", "data=3", "is 3 devices, which do not divide the 8"),
        ("benchmarks.zoo_jax:moe_small", "data=2,data=4", "names an axis twice"),
        ("benchmarks.zoo_jax:moe_small", "data", "must be axes with sizes from 1 to 8"),
    ],
)
def test_jax_steps_that_can_not_be_planned(meshtune, factory, mesh, told):
    """A factory or a mesh that can't be is one message."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    done = meshtune("plan", "--jax", factory, "--mesh", mesh)

    assert done.status == 2
    assert told in done.err


def test_a_torch_step_is_planned(meshtune):
    """A factory's module is traced with its loss, and parameters, moments and inputs are what the step begins with."""
    pytest.importorskip("torch", reason="plans of torch modules need torch: pip install 'meshtune[torch]'")
    done = meshtune("plan", "--torch", "benchmarks.zoo_torch:mixtral_small", "--mesh", "data=2,model=4", "--json")

    assert done.status == 0, done.err
    assert done.json["mesh"] == {"data": 2, "model.0": 2, "model.1": 2}
    assert {"layers.0.mlp.gate", "layers.0.mlp.gate.mean", "inputs.1"} <= done.json["shardings"].keys()
    assert done.json["unknown_primitives"] == {}


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


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("factory", "mesh", "told"),
    [
        ("torch_steps", "data=8", "--torch = 'torch_steps': must be module:factory"),
        ("torch_stepps:silent", "data=8", "can't be imported: No module named 'torch_stepps'"),
        ("torch_steps:silend", "data=8", "did you mean 'silent'?"),
        ("torch_steps:layer.weight", "data=8", "is nothing that torch_steps has"),
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

    assert done.status == 2
    assert told in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(("option", "library"), [("--torch", "torch"), ("--jax", "jax")])
def test_a_library_that_is_missing(meshtune, monkeypatch, option, library):
    """Without the library the message names the extra that brings it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))
    done = meshtune("plan", option, "my_training:step", "--mesh", "data=8")

    assert done.status == 2
    assert f"pip install 'meshtune[{library}]'" in done.err
