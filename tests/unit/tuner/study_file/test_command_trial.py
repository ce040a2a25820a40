"""`trial: {backend: command}` as a study file says it."""

import json
import sys

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tuner.export import find_exporter
from tuner.study_file.config import load_study

STUDY = """
name: own-command
model: llama3-8b
cluster: {{name: dgx-h100, hosts: 2}}
job: {{sequence_length: 8192, global_batch_size: 128}}
trial:
  backend: command
  command: [{python}, -m, torch.distributed.run, "--nnodes={{num_hosts}}", "{{flags}}", "--train-iters={{total_steps}}"]
  flags: megatron
  environment: {{WANDB_API_KEY: hunter2, TP: "{{tp}}"}}
  logs: logs
"""

CONFIG = ParallelConfig(pp=1, tp=8, dp=2, mbs=1)


@pytest.fixture
def load(tmp_path):
    """The study, with changes."""

    def load_changed(*overrides):
        path = tmp_path / "study.yaml"
        path.write_text(STUDY.format(python=sys.executable), encoding="utf-8")
        return load_study(path, overrides=overrides, storage="sqlite:///:memory:")

    return load_changed


def test_a_command_gets_the_flags_of_its_configuration(load):
    """What a trial is started with is what the export of its configuration says, flag by flag."""
    config = load()
    plan = config.trials.backend.plan(CONFIG, 3)
    export = find_exporter("megatron")(config.problem.setting, CONFIG)

    assert plan.flags == export.arguments
    assert " ".join(plan.flags) in " ".join(export.text.replace("'", "").split())
    assert ("CUDA_DEVICE_MAX_CONNECTIONS", "1") in plan.environment
    assert f"export {'='.join(export.environment[0])}" in export.text


def test_paths_are_relative_to_the_study(load, tmp_path):
    """The command begins beside its study file, and its logs are kept there."""
    backend = load("trial.directory=run").trials.backend

    assert backend.directory == tmp_path / "run"
    assert backend.logs == tmp_path / "logs"


def test_a_trace_has_its_place(load, tmp_path):
    """The command is told where to leave its traces, beside the study; the place gives trials no other meaning."""
    config = load("trial.profile='traces/{trial}/**/rank0_trace.json'", "trial.command=[run, '{profile}', '{flags}']")
    plan = config.trials.backend.plan(CONFIG, 3)

    assert (plan.profile, plan.profile_root) == ("traces/{trial}/**/rank0_trace.json", tmp_path)
    assert "profile" not in config.meaning["trial"]


def test_a_trial_takes_whole_hosts(load):
    """Each host gives all its GPUs and has one process; a command that reaches hosts by itself takes a core."""
    hosts = load().trials.backend.hosts

    assert [(host.gpus, host.num_ranks) for host in hosts] == [(8, 1), (8, 1)]
    assert [(host.gpus, host.cpus) for host in load("trial.launch=once").trials.backend.hosts] == [(0, 1)]


def test_secrets_are_not_stored(load):
    """What a study keeps of its variables tells whether they have changed, and nothing else of them."""
    meaning = load().meaning["trial"]
    other = load("trial.environment={WANDB_API_KEY: other, TP: '{tp}'}").meaning["trial"]

    assert "hunter2" not in json.dumps(meaning)
    assert meaning["environment"]["TP"] == other["environment"]["TP"]
    assert meaning["environment"]["WANDB_API_KEY"] != other["environment"]["WANDB_API_KEY"]
    assert "logs" not in meaning


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trial.command=[]", "trial.command"),
        ("trial.command=[run, '{tpp}']", "trial.command.1 = '{tpp}': has no value for {tpp}; did you mean 'tp'?"),
        (
            "trial.command=[run]",
            "trial.flags = 'megatron': are set, but the command has no {flags}, and its own words tell no "
            "configuration",
        ),
        ("trial.flags=null", "trial.flags: is required, because the command contains {flags}"),
        ("trial.flags=megatorn", "did you mean 'megatron'"),
        ("trial.environment={A: '{tp'}", "trial.environment.A"),
        ("trial.environment={'A=B': c}", "trial.environment"),
        ("trial.environment={'': c}", "trial.environment"),
        ("trial.log=megatorn", "trial.log = 'megatorn': is not a known log format; did you mean 'megatron'?"),
        ("trial.log={pattern: ['(']}", "trial.log.pattern = '(': is not a regular expression"),
        ("trial.log={pattern: ['a']}", "has no group for the time of a step"),
        ("trial.steps=0", "trial.steps = 0: must be greater than or equal to 1"),
        ("trial.stepz=1", "trial.stepz = 1: unknown key; did you mean 'steps'?"),
        ("trial.launch=twice", "trial.launch = 'twice'"),
        ("trial.proxy={hosts: 2}", "trial.proxy.hosts = 2: must be fewer than the 2 hosts of the cluster"),
        (
            "trial.profile=traces",
            "trial.profile = 'traces': must be a different path for each trial; profile: traces/{trial}",
        ),
        ("trial.profile='{trial}/{profile}'", "must be a different path for each trial"),
        ("trial.profile='{trail}'", "trial.profile = '{trail}': has no value for {trail}; did you mean 'trial'?"),
        (
            "trial.command=[run, '{profile}', '{flags}']",
            "trial.profile: is required, because the command contains {profile}",
        ),
        (
            "trial.command=[run, '{checkpoint}', '{flags}']",
            "trial.training: is required, because the command contains {checkpoint}; training: {folder: checkpoints}",
        ),
        ("trial.training={folder: a}", "trial.training: needs {checkpoint} in the command, which loads it"),
        ("trial.training={dir: a}", "trial.training.dir: unknown key; valid: folder, start, start_step"),
    ],
)
def test_a_mistake_names_its_key(load, override, message):
    """Each mistake is one message with its key, the value seen and what would do."""
    with pytest.raises(ConfigError) as caught:
        load(override)

    assert message in str(caught.value)


def test_a_training_begins_where_a_checkpoint_says(load, tmp_path):
    """The step of the first checkpoint is what its folder says; the study must say it where the folder does not."""
    words = "trial.command=[run, '{flags}', --load, '{checkpoint}', --save, '{new_checkpoint}']"
    (tmp_path / "old").mkdir()

    with pytest.raises(ConfigError, match=r"trial.training.start_step: is required"):
        load(words, "trial.training={folder: new, start: old}")
    assert (
        load(words, "trial.training={folder: new, start: old, start_step: 9}").trials.backend.training.start_step == 9
    )
    (tmp_path / "old" / "step-40").mkdir()
    training = load(words, "trial.training={folder: new, start: old}").trials.backend.training
    assert (training.start_step, training.start, training.folder) == (40, tmp_path / "old", tmp_path / "new")
    assert load(words, "trial.training={folder: new}").trials.backend.training.start_step == 0
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "progress.json").write_text("{}", encoding="utf-8")
    assert load(words, "trial.training={folder: new, start: gone}").trials.backend.training.folder == tmp_path / "new"


def test_names_of_a_training_are_free_outside_of_one(load):
    """A knob named `checkpoint` stays one, as in studies before there were trainings; inside of one it is refused."""
    knob = "space.knobs=[{name: checkpoint, values: [true, false]}]"

    study = load("trial.command=[run, '{flags}', '{checkpoint}']", knob)
    assert [one.name for one in study.trials.backend.knobs] == ["checkpoint"]
    with pytest.raises(ConfigError, match=r"needs \{checkpoint\}, and a knob or a file has that name"):
        load("trial.command=[run, '{flags}', '{checkpoint}', '{new_checkpoint}']", knob, "trial.training={folder: a}")


def test_flags_that_end_a_command_stand_last(load):
    """The flags of torchtitan end with a subcommand: what follows them is refused, and last they are the end."""
    command = "trial.command=[python, -m, torchtitan.train, '{flags}', --training.steps=3]"
    with pytest.raises(ConfigError, match=r"trial.flags = 'torchtitan': end with a subcommand.* last in trial.command"):
        load("trial.flags=torchtitan", command)

    command = "trial.command=[python, -m, torchtitan.train, --training.steps=3, '{flags}']"
    plan = load("trial.flags=torchtitan", command).trials.backend.plan(CONFIG, 3)

    assert plan.flags[-1] == "activation-checkpoint:none"
