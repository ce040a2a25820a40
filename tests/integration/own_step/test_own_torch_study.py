"""Studies of a user's own module in torch: candidates, trials, the exported program, and mistakes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch", reason="steps in torch need torch: pip install 'meshtune[torch]'")

from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.plan import cost_of
from hardware.io.errors import ConfigError
from tests.support.studies.exported_programs import write_program
from trials.backend import Status
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from trials.torch_training.rank_setup import TORCH_RANKS
from tuner import load_study, rank
from tuner.cli.main import app

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=64, device=None):
        super().__init__()
        self.up, self.down = nn.Linear(32, width, device=device), nn.Linear(width, 32, device=device)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def squared(module, x, y):
    return ((module(x) - y) ** 2).mean()


def step():
    return Net(), (torch.randn(8, 32), torch.randn(8, 32)), squared


def descent(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def step_with_optimizer():
    return *step(), descent


def step_on_meta():
    x = torch.empty(8, 32, device="meta")
    return Net(device="meta"), (x, x), squared


def large_step():
    return Net(1 << 18), (torch.randn(8, 32), torch.randn(8, 32)), squared


def normed_step():
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    return net, (torch.randn(8, 32), torch.randn(8, 32)), squared


class Routed(nn.Module):
    def __init__(self, experts=4, width=64):
        super().__init__()
        self.router = nn.Linear(32, experts)
        self.up = nn.Parameter(0.1 * torch.randn(experts, 32, width))
        self.down = nn.Parameter(0.1 * torch.randn(experts, width, 32))

    def forward(self, x):
        # each token takes the next of an expert's eight slots; those beyond are dropped
        scores, chosen = self.router(x).topk(2)
        weights = x.new_zeros((*x.shape[:2], len(self.up))).scatter(-1, chosen, scores.softmax(-1))
        turn = (weights > 0).cumsum(1) - 1
        places = ((weights > 0)[..., None] & (turn[..., None] == torch.arange(8))).to(x.dtype)
        made = torch.einsum("ebsh,ehf->ebsf", torch.einsum("btes,bth->ebsh", places, x), self.up).relu()
        return torch.einsum(
            "btes,ebsh->bth", places * weights[..., None], torch.einsum("ebsf,efh->ebsh", made, self.down)
        )


def step_with_experts():
    return Routed(), (torch.randn(8, 16, 32), torch.randn(8, 16, 32)), squared


def not_a_step():
    return squared


def failing_factory():
    return {}["missing"]


def failing_step():
    return Net(), (torch.randn(8, 16), torch.randn(8, 32)), squared


def no_number():
    return Net(), (torch.randn(8, 32),)


def crashing_step():
    return *step(), lambda parameters: torch.optim.SGD(parameters, lr=-1.0)
"""

PLAIN, FSDP = (ParallelConfig(dp=2, zero_stage=stage) for stage in (0, 3))
TENSORS = ParallelConfig(tp=2, zero_stage=0)


@pytest.fixture
def study(new_study):
    """Writes a study of the program beside it, and returns its file."""
    return new_study("torch", PROGRAM)


@pytest.fixture(scope="module")
def rank_processes():
    """One server of ranks for all tests."""
    with RankProcesses(TORCH_RANKS) as processes:
        yield processes


@pytest.fixture
def measured(rank_processes):
    """Runs trials of a backend, one after the other."""

    def measure(backend, *configs):
        opened = OpenBackend(backend=backend, ranks=rank_processes)
        return [opened.measure(config, trial_number=0) for config in configs]

    return measure


def trained_alone(factory):
    """Return the losses of two measured steps after two to warm up, in one process, from the seed of the study."""
    import torch

    torch.manual_seed(0)
    module, inputs, loss, *optimizer = factory()
    make = optimizer[0] if optimizer else lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    made = make(module.parameters())
    losses = []
    for _ in range(4):
        value = loss(module, *inputs)
        value.backward()
        made.step()
        made.zero_grad()
        losses.append(value.item())
    return losses


def test_candidates_are_meshes_times_plans_at_their_planned_cost(study):
    """Every mesh has its plans by hand, at the cost of the plan itself; the first is no slower than any of them."""
    config = load_study(study())
    grid = config.problem.space().grid
    chosen = [grid.config(position) for position in range(len(grid))]
    names = {tensor.name: number for number, tensor in enumerate(config.problem.subject.plans.graph().tensors)}
    plain, sharded = (config.problem.subject.plans.plan(ParallelConfig(dp=4, zero_stage=stage)) for stage in (0, 3))

    assert {(each.dp, each.tp) for each in chosen} == {(4, 1), (2, 2), (1, 4)}
    assert rank(config)[0]["step_time_s"] == pytest.approx(
        min(cost_of(config.problem.subject.plans.plan(each)).step_time_s for each in chosen)
    )
    assert plain.dims_of(names["inputs.0"])[0] == sharded.dims_of(names["inputs.0"])[0] == ("data",)
    assert plain.dims_of(names["up.weight"]) == ((), ())
    assert ("data",) in sharded.dims_of(names["up.weight"])


def test_statistics_that_a_step_replaces_are_no_batch(study):
    """A module with BatchNorm has candidates on every mesh, though its statistics lie along its channels."""
    grid = load_study(study("own_program:normed_step")).problem.space().grid

    assert {grid.config(position).tp for position in range(len(grid))} == {1, 2, 4}


@pytest.mark.parametrize(
    ("factory", "clock"),
    [("step", "virtual"), ("step_with_optimizer", "cpu"), ("step_with_experts", "cpu"), ("step", "wall")],
)
def test_trials_train_the_users_module_as_one_process_does(study, measured, factory, clock):
    """Each plan's last loss is that of one process under the same optimizer, with a time by the study's clock."""
    config = load_study(study(f"own_program:{factory}", devices=2, trial=trial_keys(clock=clock)))
    trials = measured(config.trials.backend, FSDP, TENSORS)
    expected = trained_alone(getattr(sys.modules["own_program"], factory))

    assert [trial.status for trial in trials] == [Status.OK, Status.OK], trials[0].log_tail + trials[1].log_tail
    for trial in trials:
        assert dict(trial.conditions)["loss"] == pytest.approx(expected[-1], rel=1e-5)
        assert (trial.clock, len(trial.step_times_s)) == (clock, 2)
    assert expected[-1] < expected[0]


def trial_keys(**others):
    """Return the keys of a short trial."""
    return {"backend": "torch", "min_steps": 2, "max_steps": 2} | others


def test_tensors_on_meta_get_values(study, measured):
    """A module and inputs without values train from values that depend on the seed alone, whatever the plan."""
    config = load_study(study("own_program:step_on_meta", devices=2))
    losses = [dict(trial.conditions)["loss"] for trial in measured(config.trials.backend, PLAIN, TENSORS)]
    (other,) = measured(replace(config.trials.backend, seed=1), PLAIN)

    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] > 0
    assert dict(other.conditions)["loss"] != pytest.approx(losses[0], rel=1e-5)


def test_memory_is_that_of_training_and_ends_a_trial_that_needs_more(study, measured):
    """Cut parameters need less than whole ones, and a device without room for the step ends as out of memory."""
    config = load_study(study("own_program:large_step", devices=2))
    whole, cut = measured(config.trials.backend, PLAIN, TENSORS)
    (group,) = config.trials.backend.cluster.groups
    small = replace(group, device=replace(group.device, memory_bytes=100 << 20))
    cluster = replace(config.trials.backend.cluster, groups=(small,))
    (lacking,) = measured(replace(config.trials.backend, cluster=cluster), PLAIN)
    parameters_bytes = 4 * (2 * 32 * (1 << 18) + (1 << 18) + 32)

    # parameters, gradients and two moments
    assert whole.peak_memory_bytes > 4 * parameters_bytes > cut.peak_memory_bytes > 2 * parameters_bytes
    assert lacking.status is Status.OUT_OF_MEMORY, lacking


def test_a_failure_of_the_program_is_one_of_the_trial(study, measured):
    """An error in the user's code while training ends the trial as crashed, with the error and its traceback."""
    config = load_study(study("own_program:crashing_step", devices=2))
    (trial,) = measured(config.trials.backend, PLAIN)

    assert trial.status is Status.CRASHED
    assert "Invalid learning rate: -1.0" in trial.reason
    assert "own_program.py" in trial.log_tail


CHECK = """
import torch
import torch.distributed as dist
from own_program import step as factory
from sharded import PLACEMENTS, sharded_module

dist.init_process_group("gloo")
torch.manual_seed(0)
module, inputs, loss = factory()
expected = loss(module, *inputs)
expected.backward()
torch.manual_seed(0)
planned, given = sharded_module()
found = planned(*given)
found.backward()
torch.testing.assert_close(found, expected)
for name, parameter in planned.named_parameters():
    torch.testing.assert_close(parameter.grad.full_tensor(), module.get_parameter(name).grad)
    assert tuple(parameter.placements) == PLACEMENTS[name]
fewer = [each[:4] for each in given]
torch.testing.assert_close(planned(*fewer), loss(module, *fewer))
print("alike", flush=True)
dist.destroy_process_group()
"""


def test_the_exported_program_runs_and_computes_the_same(study, tmp_path):
    """The written module runs under torchrun as it stands, and has the loss and the gradients of one process, also on
    inputs of other shapes.
    """
    config = load_study(study(devices=2))
    module = tmp_path / "sharded.py"
    write_program(config, TENSORS, "torch", module)
    (tmp_path / "check.py").write_text(CHECK, encoding="utf-8")

    for program, told in (("sharded.py", "step 2: loss"), ("check.py", "alike")):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert told in done.stdout


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("own_programme:step", "model.torch = .*can't be imported: No module named 'own_programme'"),
        ("own_program:steps", "is not defined in own_program; did you mean 'step'"),
        ("own_program:not_a_step", "must return \\(module, inputs\\)"),
        ("own_program:failing_factory", "fails: KeyError: 'missing' \\(line \\d+ of .*own_program.py\\)"),
        ("own_program:failing_step", "model.torch = .*can't be traced: .*\\[8, 16\\] X .*line 12 of .*own_program"),
        ("own_program:no_number", "model.torch.loss = .*must be one number"),
    ],
)
def test_mistakes_in_the_program_are_told_in_one_message(study, factory, message):
    """A factory that cannot be imported, fails, or returns something else is named with the reason."""
    with pytest.raises(ConfigError, match=message):
        load_study(study(factory))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cluster": {"name": "dgx-h100", "hosts": 1}}, "cluster = .*cannot run sharding plans; a cluster of"),
        ({"trial": {"backend": "torch", "profile": False}}, "trial.profile = False: is for models of the catalog"),
        ({"trial": {"backend": "torch", "capacity_factor": 1.0}}, "trial.capacity_factor = 1.0: is for models"),
        ({"trial": {"backend": "simulated", "fidelity": "simulator"}}, "or backend: torch, which runs it for real"),
    ],
)
def test_keys_of_trials_of_the_catalog_are_refused(study, keys, message):
    """Keys of the torch backend that only a model of the catalog can have, and devices that it lacks, are named."""
    with pytest.raises(ConfigError, match=message):
        load_study(study(**keys))


def test_the_answer_names_the_devices_and_a_whole_batch(study, tmp_path, monkeypatch):
    """On GPUs, the mesh is one of CUDA devices; where a plan leaves the batch whole, `best` says so beside its dp."""
    monkeypatch.chdir(tmp_path)
    study()
    given = ["--from-torch", "own_program:step", "--cluster", "dgx-h100", "--out", "gpus.yaml"]
    assert CliRunner().invoke(app, ["init", *given]).exit_code == 0

    best = CliRunner().invoke(app, ["best", "gpus.yaml"])

    assert 'mesh = init_device_mesh("cuda", (8, 1), mesh_dim_names=' in best.stdout, best.output
    assert "the plan leaves the batch whole: every device has all inputs" in best.stdout


def test_one_command_after_the_other(study, tmp_path, meshtune, monkeypatch):
    """`init`, `run`, `best`, `export` and `report` go through on two ranks; the other library's target is refused."""
    monkeypatch.chdir(tmp_path)
    study()
    options = ["--storage", f"sqlite:///{tmp_path}/new.db", "--set", "space.zero_stage=[0]"]
    options += ["--set", "trial.min_steps=2", "--set", "trial.max_steps=2", "--set", "search.repeats=0"]

    def told(*words, others=options):
        done = CliRunner().invoke(app, [*words, *others])
        assert done.exit_code == 0, done.output
        return done.stdout

    given = ["--from-torch", "own_program:step", "--cluster", "cpu-host", "--devices-per-host", "2"]
    assert "operators, on 2 devices" in told("init", *given, "--out", "new.yaml", others=[])
    ran = meshtune("run", "new.yaml", "--trials", "2", "--json", *options)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["trials"] == 2
    best = told("best", "new.yaml")
    assert 'mesh = init_device_mesh("cpu", (' in best
    assert re.search(r"up\.weight +float32\[64,32\] +\((Shard|Replicate)\(", best)
    assert "module, inputs = sharded_module()" in best
    found = json.loads(told("best", "new.yaml", "--json"))["shardings"]
    assert [leaf["path"] for leaf in found["inputs"]] == ["inputs.0", "inputs.1"]
    assert {leaf["path"] for leaf in found["parameters"]} == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert "parallelize_as" in told("export", "new.yaml", "--to", "torch")
    told("report", "new.yaml", "--out", "page.html")
    assert "sharded_module" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads(told("status", "new.yaml", "--json"))["trials"] == 2
    for refused, why in (
        (["export", "new.yaml", "--to", "jax", *options], "is not the library of own_program:step; --to torch"),
        (["init", *given, "--from-jax", "own_program:step"], "--from-torch = 'own_program:step': cannot be combined"),
    ):
        done = CliRunner().invoke(app, refused)
        assert isinstance(done.exception, ConfigError) or done.exit_code == 2
        assert why in f"{done.output}{done.exception}"
