import json

import pytest

from tests.support.studies.command_line import assert_users_mistake

PLANNED = ("--config", "dp=4,tp=2", "--whole-axes")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["jax", "torch"])
def test_a_plan_is_exported(meshtune, simulated, tmp_path, target):
    """`--export` shows a part after the plan, `--out` writes all, and `--json` holds the same."""
    path = tmp_path / "plan.json"
    shown = meshtune("plan", simulated, *PLANNED, "--export", target)
    written = meshtune("plan", simulated, *PLANNED, "--export", target, "--out", path)
    told = meshtune("plan", simulated, *PLANNED, "--export", target, "--json")

    assert (shown.status, written.status, told.status) == (0, 0, 0)
    assert "dp=4, tp=2: 8 devices" in shown.out
    assert f"wrote {path}" in written.out
    assert json.loads(path.read_text(encoding="utf-8")) == told.json["export"]
    assert told.json["export"]["format"] == target
    assert told.json["shardings"].keys() == told.json["export"]["arguments"].keys()


@pytest.mark.slow
def test_a_jax_step_is_exported_with_its_outputs(meshtune):
    """Specs of a JAX step are by the paths of its arguments and of what it returns."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    step = ("--jax", "benchmarks.zoo:gemma_small", "--mesh", "data=2,model=4")
    told = meshtune("plan", *step, "--export", "jax", "--json").json["export"]

    assert told["mesh"] == {"data": 2, "model.0": 2, "model.1": 2}
    assert {"params.embedding", "optimizer.mean.norm", "batch.tokens"} <= told["arguments"].keys()
    kept = {path: spec for path, spec in told["outputs"].items() if path.startswith("0.")}
    assert {path.replace("0.", "params.", 1): spec for path, spec in kept.items()} == {
        path: spec for path, spec in told["arguments"].items() if path.startswith("params.")
    }
    assert told["outputs"]["2"] == []


@pytest.mark.slow
def test_a_jax_step_is_annotated_for_shardy(meshtune, tmp_path):
    """More devices than are here are no obstacle, and `--out` and `--json` have the text that Shardy's parser reads."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    from jax._src.interpreters.mlir import make_ir_context  # no public name registers Shardy's dialect
    from jaxlib.mlir import ir

    path = tmp_path / "step.mlir"
    step = ("--jax", "benchmarks.zoo:decode_small", "--mesh", "data=16,model=2", "--hosts", "4", "--whole-axes")
    written = meshtune("plan", *step, "--export", "shardy", "--out", path)
    told = meshtune("plan", *step, "--export", "shardy", "--json")
    shown = meshtune("plan", *step, "--export", "shardy")

    assert (written.status, told.status, shown.status) == (0, 0, 0)
    text = path.read_text(encoding="utf-8")
    assert told.json["export"] == {"format": "shardy", "text": text}
    assert 'sdy.mesh @mesh = <["data"=16, "model"=2]>' in shown.out
    with make_ir_context():
        assert ir.Module.parse(text).operation.verify()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--export", "jaxx"), "--export = 'jaxx': is no export target for plans; did you mean 'jax'?"),
        (("--out", "plan.json"), "--out = 'plan.json': needs --export; for example --export jax"),
        (("--export", "jax", "--out", "no/such/folder/plan.json"), "cannot be written"),
        (("--export", "shardy"), "--export = 'shardy': is only for plans of JAX functions"),
        (("--export", "megatron"), "--export = 'megatron': can't be run by Megatron-LM: axis "),
    ],
)
def test_what_can_not_be_exported(meshtune, simulated, arguments, told):
    """A mistake, or a plan that the framework has no words for, is one line and status 2."""
    assert_users_mistake(meshtune("plan", simulated, *PLANNED, *arguments), told)


@pytest.mark.slow
def test_megatron_trains_no_jax_step(meshtune):
    """A plan of a JAX function is no Megatron-LM plan, and the message names the targets that are left."""
    pytest.importorskip("jax", reason="plans of JAX programs need JAX: pip install 'meshtune[jax]'")
    step = ("--jax", "benchmarks.zoo:decode_small", "--mesh", "data=2")

    done = meshtune("plan", *step, "--export", "megatron")

    assert_users_mistake(done, "Megatron-LM trains no other programs; jax, shardy or torch")
