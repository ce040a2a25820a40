"""Studies of a user's own training step in JAX: candidates, trials, the exported program, and mistakes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("jax", reason="steps in JAX need JAX: pip install 'meshtune[jax]'")

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.plan import cost_of
from hardware.io.errors import ConfigError
from tests.support.quick_xla import on_devices
from tests.support.studies.exported_programs import write_program
from tests.support.studies.in_process_executor import InProcessExecutor
from trials.backend import Status
from trials.jax_training.framework import JAX_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner import load_study, rank, run_study
from tuner.cli.main import app
from tuner.dashboard.snapshot import snapshot_of
from tuner.dashboard.study_note import study_note
from tuner.dashboard.trial_note import trial_note
from tuner.forecast.candidates import candidates_of
from tuner.own_step.plans import OwnStepPlans
from tuner.run.studies import stored_study

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import jax
import jax.numpy as jnp


def train_step(params, moments, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda moment, grad: 0.9 * moment + grad, moments, grads)
    return jax.tree.map(lambda param, moment: param - 0.1 * moment, params, moments), moments, value


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(rows=8):
    params = {"up": array(32, 64), "down": array(64, 32)}
    return train_step, (params, params, {"x": array(rows, 32), "y": array(rows, 32)}), ("params", "moments")


def odd_step():
    return step(rows=6)


def not_a_step():
    return train_step


def failing_factory():
    return {}["missing"]


def failing_step():
    return lambda x: jnp.dot(x, x[0, :2]), (array(4, 4),)


def wrongly_donated():
    return (*step()[:2], ("weights",))


import dataclasses


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict
    key: jax.Array
    apply: object = dataclasses.field(metadata={"static": True})


def step_of_state():
    def apply(params, key, x):
        hidden = jax.nn.relu(x @ params["up"])
        # as flax's dropout does; arrays on a mesh have another sharding than shapes
        mask = jax.random.bernoulli(key, 0.9, hidden.shape, out_sharding=jax.typeof(hidden).sharding)
        return jnp.where(mask, hidden / 0.9, 0.0) @ params["down"]

    def train_state(state, x):
        key, own = jax.random.split(state.key)
        value, grads = jax.value_and_grad(lambda params: jnp.mean(state.apply(params, own, x) ** 2))(state.params)
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, state.params, grads)
        return State(params, key, state.apply), value

    key = jax.eval_shape(lambda: jax.random.key(0))
    return train_state, (State(step()[1][0], key, apply), array(8, 32)), ("state",)
"""


@pytest.fixture
def study(new_study):
    """Writes a study of the program beside it, and returns its file."""
    return new_study("jax", PROGRAM)


@pytest.fixture(scope="module")
def rank_processes():
    """One server of processes for all tests."""
    with RankProcesses(JAX_RANKS) as processes:
        yield processes


def test_candidates_are_meshes_times_plans_at_their_planned_cost(study):
    """Every mesh has its plans by hand and perhaps a planner's, at the cost and the peak memory of the plan itself."""
    config = load_study(study())
    found = candidates_of(config.problem)
    grid = found.space.grid
    chosen = [grid.config(position) for position in range(len(grid))]

    assert {(each.dp, each.tp) for each in chosen} == {(4, 1), (2, 2), (1, 4)}
    assert {each.plan for each in chosen} == {"hand", "descent"}
    assert ParallelConfig(dp=4, zero_stage=0) in chosen
    for position, each in enumerate(chosen):
        cost = cost_of(config.problem.subject.plans.plan(each))
        assert found.estimate.step_time_s[position] == pytest.approx(cost.step_time_s)
        assert found.space.memory.peak_bytes[position] == pytest.approx(cost.peak_memory_bytes)
    by_hand_s = min(found.estimate.step_time_s[position] for position, each in enumerate(chosen) if each.plan == "hand")
    assert rank(config)[0]["step_time_s"] <= by_hand_s


def test_plain_data_parallelism_keeps_parameters_whole_and_fsdp_cuts_them(study):
    """The two plans by hand on the axis `data` are those that their ZeRO stages name."""
    plans = load_study(study()).problem.subject.plans
    plain, sharded = (plans.plan(ParallelConfig(dp=4, zero_stage=stage)) for stage in (0, 3))
    names = {tensor.name: number for number, tensor in enumerate(plans.graph().tensors)}

    assert plain.dims_of(names["batch.x"])[0] == sharded.dims_of(names["batch.x"])[0] == ("data",)
    assert plain.dims_of(names["params.up"]) == ((), ())
    assert ("data",) in sharded.dims_of(names["params.up"])


def test_meshes_that_do_not_divide_the_batch_are_left_out_with_the_reason(study):
    """With six rows, four devices along `data` are left out, and the reason names the sizes that there are."""
    config = load_study(study("own_program:odd_step"))
    space = config.problem.space()
    reasons = config.problem.subject.reasons_against(config.problem.options, ParallelConfig(dp=4, zero_stage=0), space)

    assert space.removed == {"data": 1}
    assert {space.grid.config(position).dp for position in range(len(space.grid))} == {1, 2}
    assert reasons == {"data": "data=4 divides the first dim of no input, its batch (sizes: 6)"}
    assert (
        "dp*tp must be the 4 devices"
        in config.problem.subject.reasons_against(config.problem.options, ParallelConfig(dp=3), space)["devices"]
    )


def test_a_study_can_tighten_the_mesh(study):
    """`space.tp` leaves only meshes of these sizes, and each other plan is counted under the key."""
    space = load_study(study(space={"tp": [2], "zero_stage": [0]})).problem.space()

    assert {space.grid.config(position).tp for position in range(len(space.grid))} == {2}
    assert {space.grid.config(position).zero_stage for position in range(len(space.grid))} == {0}
    assert set(space.removed) == {"space.tp", "space.zero_stage"}


@pytest.mark.parametrize("clock", ["virtual", "cpu"])
def test_trials_run_the_users_function_as_the_plans_shard_it(study, rank_processes, clock):
    """Each plan's trial has the loss of every other, a step time by the study's clock, and XLA's memory of a device."""
    config = load_study(study(trial={"backend": "jax", "min_steps": 2, "max_steps": 2, "clock": clock}))
    opened = OpenBackend(backend=config.trials.backend, ranks=rank_processes)
    plain, other = ParallelConfig(dp=4, zero_stage=0), ParallelConfig(tp=4, zero_stage=0)
    trials = [opened.measure(each, trial_number=0) for each in (plain, other)]

    assert [trial.status for trial in trials] == [Status.OK, Status.OK], trials[0].log_tail + trials[1].log_tail
    losses = [dict(trial.conditions)["loss"] for trial in trials]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 0
    assert {trial.clock for trial in trials} == {clock}
    # data parallelism keeps the parameters and their moments whole, 64 KiB; tensor parallelism a quarter
    assert trials[0].peak_memory_bytes > 4 * 32 * 64 * 4 > trials[1].peak_memory_bytes


def test_a_step_that_does_not_fit_ends_as_out_of_memory(study, rank_processes):
    """A compiled step above a device's memory is not run, and the trial says what it needs."""
    backend = load_study(study()).trials.backend
    (group,) = backend.cluster.groups
    small = replace(group, device=replace(group.device, memory_bytes=1000))
    opened = OpenBackend(
        backend=replace(backend, cluster=replace(backend.cluster, groups=(small,))), ranks=rank_processes
    )
    trial = opened.measure(ParallelConfig(dp=4, zero_stage=0), trial_number=0)

    assert trial.status is Status.OUT_OF_MEMORY
    assert "by XLA's memory analysis" in trial.reason + trial.log_tail


def test_stored_plans_stand_in_for_planning(study):
    """Plans that went through JSON are the same candidates at the same cost, and no planner runs for them."""
    plans = load_study(study()).problem.subject.plans
    made = {tp: [(each.config, each.step_time_s) for each in plans.on(tp).candidates] for tp in plans.degrees}
    again = OwnStepPlans(step=plans.step, cluster=plans.cluster, planner="unknown")
    again.restore(json.loads(json.dumps(plans.as_json())))

    assert {tp: [(each.config, each.step_time_s) for each in again.on(tp).candidates] for tp in made} == made


CHECK = """
import jax
import numpy as np
from own_program import step as factory
from {module} import sharded_step

function, arguments, donated = factory()
rng = np.random.default_rng(0)
values = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(leaf.dtype), arguments)
expected = jax.jit(function)(*values)
step, shardings = sharded_step()
found = step(*jax.device_put(values, shardings))
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(np.abs(other).max()))
assert found[0]["up"].sharding.is_equivalent_to(shardings[0]["up"], 2)
print(len(found[0]["up"].sharding.device_set))
"""


@pytest.mark.parametrize("chosen", [ParallelConfig(dp=2, tp=2, zero_stage=3), None])
def test_the_exported_program_runs_and_computes_the_same(study, tmp_path, chosen):
    """The written module runs as it stands, and its step equals the unsharded function to 1e-5 on four devices."""
    config = load_study(study())
    space = config.problem.space()
    planned = next(
        each for position in range(len(space.grid)) if (each := space.grid.config(position)).plan == "descent"
    )
    module = tmp_path / "sharded.py"
    write_program(config, chosen or planned, "jax", module)
    (tmp_path / "check.py").write_text(CHECK.format(module="sharded"), encoding="utf-8")
    environment = os.environ | {"XLA_FLAGS": on_devices(4), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    for program, told in (("sharded.py", "float32[32,64]"), ("check.py", "4")):
        done = subprocess.run(
            [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert told in done.stdout


def test_a_state_that_holds_functions_and_keys_runs_and_is_exported(study, tmp_path, rank_processes):
    """A state such as flax's, whose function the factory makes anew each time and whose keys have a type of their own,
    runs in a trial and in the written module.
    """
    config = load_study(study("own_program:step_of_state"))
    trial = OpenBackend(backend=config.trials.backend, ranks=rank_processes).measure(
        config.problem.space().grid.config(0), trial_number=0
    )
    write_program(config, config.problem.space().grid.config(0), "jax", tmp_path / "sharded.py")
    environment = os.environ | {"XLA_FLAGS": on_devices(4), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "sharded.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert trial.status is Status.OK, trial.log_tail
    assert done.returncode == 0, done.stderr
    assert "[0].params['up'] float32[32,64]" in done.stdout


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("own_program", "must be module:factory"),
        ("own_programme:step", "can't be imported: No module named 'own_programme'"),
        ("own_program:steps", "is not defined in own_program; did you mean 'step'"),
        ("own_program:not_a_step", "must return \\(function, arguments\\)"),
        ("own_program:failing_factory", "fails: KeyError: 'missing' \\(line 34 of .*own_program.py\\)"),
        ("own_program:failing_step", "fails: TypeError: dot_general requires .* \\(line 38 of .*own_program.py\\)"),
        ("own_program:wrongly_donated", "model.jax.donated = 'weights': must be one of the function's arguments"),
    ],
)
def test_mistakes_in_the_program_are_told_in_one_message(study, factory, message):
    """A factory that cannot be imported, fails, or returns something else is named with the reason and its line."""
    with pytest.raises(ConfigError, match=message):
        load_study(study(factory))


def test_one_command_after_the_other(study, tmp_path, meshtune, monkeypatch):
    """`init`, `run`, `best`, `export` and `report` go through on four virtual devices; the rest is refused."""
    monkeypatch.chdir(tmp_path)
    given = ["--from-jax", "own_program:step", "--cluster", "cpu-host", "--devices-per-host", "4"]
    study()
    options = ["--storage", f"sqlite:///{tmp_path}/new.db", "--set", "space.zero_stage=[0]"]
    options += ["--set", "trial.min_steps=2", "--set", "trial.max_steps=2", "--set", "search.repeats=0"]

    def told(*words, others=options):
        done = CliRunner().invoke(app, [*words, *others])
        assert done.exit_code == 0, done.output
        return done.stdout

    told("init", *given, "--out", "new.yaml", others=[])
    ran = meshtune("run", "new.yaml", "--trials", "2", "--json", *options)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["trials"] == 2
    best = told("best", "new.yaml")
    assert "mesh = Mesh(np.array(jax.devices()[:4]).reshape(" in best
    assert re.search(r"params\.up +float32\[32,64\] +P\(", best)
    assert "step, shardings = sharded_step()" in best
    told("export", "new.yaml", "--to", "jax", "--out", "best.py")
    assert "IN_SPECS" in (tmp_path / "best.py").read_text(encoding="utf-8")
    told("report", "new.yaml", "--out", "page.html")
    assert "Mesh and shardings" in (tmp_path / "page.html").read_text(encoding="utf-8")
    for refused in (["export", "new.yaml", "--to", "megatron"], ["simulate", "new.yaml", "--config", "dp=4"]):
        with pytest.raises(ConfigError, match="needs a model of the catalog"):
            CliRunner().invoke(app, refused, catch_exceptions=False)


def test_simulated_trials_answer_for_any_cluster(study):
    """A study of GPUs is simulated to its end; rank, notes of the dashboard and a resumed run take what it found."""
    file = study(cluster={"name": "dgx-h100", "hosts": 1}, trial={"backend": "simulated", "operator_error": 0.1})
    config = load_study(file)
    result = run_study(config, executor=InProcessExecutor(config.trials.backend))
    stored = stored_study(config)
    seen = snapshot_of(config, stored, stored.user_attrs, is_running=False)

    assert result.best is not None
    assert {record.status for record in result.records if record.finished} <= {Status.OK, Status.PRUNED}
    assert rank(config)[0]["step_time_s"] <= result.best.step_time_s * (1 + 1e-9)
    assert "SYNTHETIC" in study_note(seen)
    assert "tokens" not in study_note(seen) + trial_note(config, seen.records[0], seen.reference, None)
    again = load_study(file)
    assert run_study(again, executor=InProcessExecutor(again.trials.backend)).stop_reason == result.stop_reason
    assert again.problem.subject.plans.as_json() == config.problem.subject.plans.as_json()


def test_a_changed_program_is_another_study(study):
    """Trials of a program cannot be gone on with once its shapes have changed."""
    file = study(trial={"backend": "simulated"}, search={"max_trials": 1})
    config = load_study(file)
    run_study(config, executor=InProcessExecutor(config.trials.backend))
    other = load_study(file, overrides=["model.jax=own_program:odd_step"])

    with pytest.raises(ConfigError, match="was measured with"):
        run_study(other, executor=InProcessExecutor(other.trials.backend))
