"""Trials of torchtitan keep the words of the script, and exchange what a configuration changes in place."""

import json
import re
from dataclasses import replace

import pytest

from hardware.io.errors import ConfigError
from tuner.imports.trial_words import MEETING
from tuner.study_file.config import load_study

LAUNCH = "torchrun --nproc_per_node=8 --rdzv_backend c10d --rdzv_endpoint=localhost:0 -m torchtitan.train"
OF_0_3 = (
    "--module llama3 --config llama3_8b --training.steps 200 --compile.enable --parallelism.tensor-parallel-degree=2 "
    "--parallelism.pipeline_parallel_degree 1 --parallelism.context_parallel_degree 1 --training.seq_len 4096 "
    "--training.local_batch_size 2 --metrics.log_freq 1 activation-checkpoint:selective"
)
OF_FILE = (
    "--job.config_file ./train.toml --training.steps=50 --activation_checkpoint.mode selective --metrics.log_freq=1"
)
TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
MEETS = [["--rdzv_endpoint=localhost:0", "--rdzv_endpoint={master_address}:{master_port}", MEETING]]
PIPELINE = (
    "--parallelism.pipeline_parallel_schedule 1F1B --parallelism.pipeline_parallel_microbatch_size 1 "
    "--parallelism.pipeline_parallel_layers_per_stage 16 --parallelism.pipeline_parallel_first_stage_less_layers 0 "
    "--parallelism.pipeline_parallel_last_stage_less_layers 0"
)
GLOBAL, SHARD = "--training.global_batch_size 8", "--parallelism.data_parallel_shard_degree"


@pytest.fixture(name="study")
def make_study(meshtune, tmp_path):
    """Return the study that `init` makes of the words behind the program, with the differences that it tells."""

    def make(words, toml=""):
        script = words if "\n" in words else f"{LAUNCH} {words}\n"
        (tmp_path / "train.sh").write_text(script, encoding="utf-8")
        (tmp_path / "train.toml").write_text(toml, encoding="utf-8")
        beside = f"--from-torchtitan {tmp_path}/train.toml" if toml else ""
        options = f"--from-torchtitan {tmp_path}/train.sh {beside} --out {tmp_path}/s.yaml --cluster dgx-h100 --hosts 1"
        done = meshtune("init", *options.split(), "--json")
        assert done.status == 0, done.err
        told = [[one["script"], one["trial"], one["why"]] for one in json.loads(done.out)["differences"]]
        return load_study(tmp_path / "s.yaml"), told

    return make


def words_of(study, **changes):
    """The words behind the program in a trial of the current configuration with changed values."""
    arguments = study.trials.backend.plan(replace(study.problem.current, **changes), 0).arguments
    return " ".join(arguments[arguments.index("torchtitan.train") + 1 :])


@pytest.mark.parametrize(("words", "toml", "flags"), [(OF_0_3, "", "torchtitan"), (OF_FILE, TOML, "torchtitan-toml")])
def test_the_first_trial_starts_the_words_of_the_script(study, tmp_path, words, toml, flags):
    """Of a recipe in Python, and of a TOML file; the address alone is the trial's own."""
    found, told = study(words, toml)

    assert words_of(found) == words
    assert told == MEETS
    assert f"flags: {flags}\n" in (tmp_path / "s.yaml").read_text()


def test_what_a_trial_must_not_do_is_told(study):
    """Flags of whole sections go, each with its reason, and every step is logged."""
    words = OF_0_3.replace("--compile.enable", "--checkpoint.enable --profiler.enable_profiling --metrics.enable_wandb")
    found, told = study(words.replace("log_freq 1", "log_freq 10"))

    assert words_of(found) == OF_0_3.replace(" --compile.enable", "")
    assert sorted(told) == sorted(
        [
            *MEETS,
            ["--checkpoint.enable", "", "a trial neither saves nor loads checkpoints, nor validates"],
            ["--profiler.enable_profiling", "", "a trial is timed without a profiler"],
            ["--metrics.enable_wandb", "", "a trial reports to no tracker"],
            ["--metrics.log_freq 10", "--metrics.log_freq 1", "each step of a trial is logged"],
        ]
    )


@pytest.mark.parametrize(
    ("changes", "exchanged"),
    [
        ({"recompute": "full"}, {":selective": ":full"}),
        (
            {"tp": 4, "dp": 2},
            {
                "--parallelism.tensor-parallel-degree=2": "--parallelism.tensor_parallel_degree 4",
                " activation": f" {GLOBAL} {SHARD} 2 activation",
            },
        ),
        (
            {"tp": 1, "cp": 2},
            {
                "--parallelism.tensor-parallel-degree=2": "--parallelism.tensor_parallel_degree 1",
                "--parallelism.context_parallel_degree 1": "--parallelism.context_parallel_degree 2",
            },
        ),
        ({"mbs": 1}, {"local_batch_size 2": "local_batch_size 1", " activation": f" {GLOBAL} activation"}),
        (
            {"pp": 2, "dp": 2, "mbs": 1},
            {
                "local_batch_size 2": "local_batch_size 4",
                "pipeline_parallel_degree 1": "pipeline_parallel_degree 2",
                " activation": f" {GLOBAL} {SHARD} 2 --parallelism.fsdp_reshard_after_forward always "
                f"--training.disable_cuda_graphs {PIPELINE} activation",
            },
        ),
    ],
    ids=["recompute", "tp", "cp", "mbs", "pp"],
)
def test_a_trial_exchanges_what_its_configuration_changes(study, changes, exchanged):
    """Every other word stays; batches are stated where their default would be another, and so is what FSDP keeps."""
    found, _ = study(OF_0_3)
    expected = OF_0_3
    for before, after in exchanged.items():
        assert before in expected
        expected = expected.replace(before, after)

    def sections(text):
        return sorted(re.split(r" (?=--|activation)", text))

    told = words_of(found, **changes)
    assert sections(told) == sections(expected)
    assert told.split()[-1].startswith("activation-checkpoint:")


def test_a_pipeline_of_the_script_keeps_its_schedule(study):
    """Another tp leaves the schedule and the split alone, and graphs stay off without the pipeline."""
    own = (
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --training.disable_cuda_graphs "
        "--parallelism.fsdp_reshard_after_forward never"
    )
    found, _ = study(
        OF_0_3.replace(
            "pipeline_parallel_degree 1", f"pipeline_parallel_degree 2 {own} --training.global_batch_size 16"
        )
    )
    assert own in words_of(found, tp=1, dp=4)

    alone = words_of(found, pp=1, vpp=1, dp=4)
    assert "--training.disable_cuda_graphs" in alone
    assert "pipeline_parallel_schedule" not in alone
    assert "--parallelism.fsdp_reshard_after_forward never" in alone


def test_versions_with_a_file_have_flags_of_their_own(study):
    """The policy is a flag, no subcommand, and what 0.3 added is not written."""
    found, _ = study(OF_FILE, TOML)

    told = words_of(found, recompute="full", tp=1, dp=8)
    assert told == (
        "--job.config_file ./train.toml --training.steps=50 --activation_checkpoint.mode full --metrics.log_freq=1 "
        "--training.local_batch_size 2 --training.global_batch_size 8 --parallelism.data_parallel_shard_degree 8 "
        "--parallelism.tensor_parallel_degree 1"
    )
    piped = words_of(found, pp=2, dp=2, mbs=1)
    assert "cuda_graphs" not in piped
    assert "sequence_parallel" not in piped
    assert "--parallelism.pipeline_parallel_degree 2" in piped


def test_a_script_without_flags_of_its_layout_is_read(study, tmp_path):
    """A known recipe says all, so that a candidate's flags come last."""
    found, told = study("--module llama3 --config llama3_8b --metrics.log_freq 1")

    assert "which later versions do not take" in (tmp_path / "s.yaml").read_text()
    assert told == MEETS
    assert words_of(found) == "--module llama3 --config llama3_8b --metrics.log_freq 1"
    assert words_of(found, tp=2, dp=4).startswith("--module llama3 --config llama3_8b --metrics.log_freq 1 --training.")


def test_the_launch_on_all_devices_is_the_trials(study):
    """A dry run on one process, which torchtitan's own script may start instead, is no trial."""
    dry = f'NGPU="$NGPU" LOCAL_RANK=0 python3 -m torchtitan.train {OF_0_3} --comm.mode=fake_backend'
    real = f"A=expandable_segments:True {LAUNCH.replace('=8', '=$NGPU')} {OF_0_3}"
    found, told = study(f'\nNGPU=8\nif [ -n "$DRY" ]; then\n{dry}\nelse\n{real}\nfi')

    assert words_of(found) == OF_0_3
    assert found.trials.backend.arguments[0] == "torchrun"
    assert dict(found.trials.backend.environment) == {"A": "expandable_segments:True"}
    assert told == MEETS


def test_a_knob_stands_before_the_subcommand(study, tmp_path):
    """A knob's flag is one of the program, also in place."""
    study(OF_0_3.replace("--compile.enable ", ""))
    text = (tmp_path / "s.yaml").read_text()
    flags = "{'true': --training.gc_debug, 'false': ''}"
    knob = f"space: {{knobs: [{{name: graphs, values: [false, true], today: false, flag: {flags}}}]}}"
    (tmp_path / "s.yaml").write_text(f"{text}\n{knob}\n")
    found = load_study(tmp_path / "s.yaml")

    assert words_of(found, knobs=(("graphs", True),)).endswith("--training.gc_debug activation-checkpoint:selective")


def test_flags_of_a_command_without_a_place_need_no_layout(study, tmp_path):
    """The old form, `{flags}` last, is taken as before."""
    study(OF_0_3)
    text = (tmp_path / "s.yaml").read_text()
    old = text.replace('"activation-checkpoint:selective"', '"{flags}"')
    assert old != text
    (tmp_path / "s.yaml").write_text(old)
    found = load_study(tmp_path / "s.yaml")

    assert found.trials.backend.plan(found.problem.current, 0).flags[-1] == "activation-checkpoint:selective"
    (tmp_path / "s.yaml").write_text(text.replace("flags: torchtitan", "flags: torchtitn"))
    with pytest.raises(ConfigError, match="did you mean 'torchtitan'"):
        load_study(tmp_path / "s.yaml")
