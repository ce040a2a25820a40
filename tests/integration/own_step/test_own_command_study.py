"""Studies of a user's own step whose trials run the user's own command, with the plan of the trial as a file."""

import re
import sys

import pytest

pytest.importorskip("torch", reason="steps in torch need torch: pip install 'meshtune[torch]'")

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tuner import load_plan, load_study

PROGRAM = """
import sys
import time

import torch
from torch import nn

from tuner import load_plan


def step(micro_batches=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return net, (torch.randn(8 // micro_batches, 32), torch.randn(8 // micro_batches, 32)), squared


def squared(module, x, y):
    return ((module(x) - y) ** 2).mean()


def main(path, steps):
    torch.distributed.init_process_group("gloo")
    module, inputs, loss = step()
    plan = load_plan(path)
    planned = plan.parallelize(module, *inputs, loss=loss)
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.5)
    for number in range(int(steps)):
        begun_s = time.perf_counter()
        value = planned(*inputs)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.distributed.get_rank() == 0:
            told = f"{plan.mesh} {plan.own_way} {float(value):.6f}"
            print(f"step {number} took {time.perf_counter() - begun_s} s {told}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
"""
COMMAND = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node={world_size}", "--master-port"]
COMMAND += ["{master_port}", "own_program.py", "{plan}", "{total_steps}"]
PATTERN = {"pattern": ["step (?P<iteration>\\d+) took (?P<step_s>[\\d.e-]+) s"]}
TRIAL = {"backend": "command", "command": COMMAND, "log": PATTERN, "warmup_steps": 1, "steps": 3, "logs": "logs"}


@pytest.fixture
def write(new_study):
    """Writes a study of the program on two devices, with changes of its trial."""
    new = new_study("torch", PROGRAM)
    return lambda **changes: new(devices=2, trial=TRIAL | changes)


def test_each_trial_runs_its_plan(write, meshtune, tmp_path):
    """A study tries all candidates by the user's program, whose losses do not depend on the plan."""
    file = write()
    told = meshtune("run", str(file), "--set", "search.confidence=1", "--set", "search.prune=false")

    assert told.returncode == 0, told.stderr
    candidates = [each for tp in (1, 2) for each in load_study(file).problem.subject.plans.on(tp).candidates]
    logs = [path.read_text() for path in sorted((tmp_path / "logs").iterdir())]
    found = [re.findall(r"took \S+ s (\{.*\}) (\w+) ([\d.]+)", log) for log in logs]
    assert {(mesh, way) for lines in found for mesh, way, _ in lines} >= {
        ("{'data': 2, 'model': 1}", "ddp"),
        ("{'data': 2, 'model': 1}", "fsdp"),
        ("{'data': 1, 'model': 2}", "None"),
    }
    assert len(found) >= len(candidates)
    losses = [[float(loss) for _, _, loss in lines] for lines in found]
    assert all(one[:4] == pytest.approx(losses[0][:4], rel=1e-5) for one in losses)
    assert losses[0][3] < losses[0][0]


def test_micro_batches_reach_the_program(new_study, tmp_path):
    """A candidate with micro-batches says how many there are, in its plan and by its placeholder."""
    file = new_study("torch", PROGRAM)(
        devices=2, space={"mbs": [1]}, trial=TRIAL | {"command": [*COMMAND, "{num_micro_batches}"]}
    )
    backend = load_study(file).trials.backend
    plan = backend.plan(ParallelConfig(dp=2, mbs=1, zero_stage=0), 0)
    (tmp_path / "plan.json").write_text(plan.files[0][2])

    values = dict(plan.values)
    assert (values["num_micro_batches"], values["global_batch_size"]) == ("4", "8")
    assert (plan.step.samples, plan.step.tokens, plan.step.devices) == (8, 8 * 32, 2)
    assert load_plan(tmp_path / "plan.json").micro_batches == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ["python", "own_program.py"]}, r'must name \{plan\}.*--plan, "\{plan\}" in trial.command'),
        ({"command": [*COMMAND, "{sequence_length}"]}, r"has no value for \{sequence_length\}"),
        ({"profile": "traces/{trial}"}, "trial.profile.*corrects predictions of models of the catalog"),
        ({"flags": "megatron"}, "trial.flags"),
    ],
)
def test_what_such_a_command_lacks(write, changes, message):
    """A command without a plan, and what only a model of the catalog has, are refused by name."""
    with pytest.raises(ConfigError, match=message):
        load_study(write(**changes))


def test_init_writes_the_command(write, meshtune, tmp_path):
    """`init` takes the command of the trials behind `--`, and refuses one that takes no plan."""
    write()
    words = ("--from-torch", "own_program:step", "--cluster", "cpu-host", "--devices-per-host", "2")
    written = meshtune("init", *words, "--out", "new.yaml", "--", *COMMAND)
    refused = meshtune("init", *words, "--out", "other.yaml", "--", "python", "own_program.py")

    assert written.returncode == 0, written.stderr
    assert load_study(tmp_path / "new.yaml").trials.backend.arguments == tuple(COMMAND)
    assert refused.returncode == 2
    assert "must name {plan}" in refused.stderr
