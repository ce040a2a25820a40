import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import jsonschema
import pytest
import yaml

from hardware.io.config_file import parse_yaml
from tests.support.studies.command_line import assert_users_mistake
from tests.support.studies.launch_scripts import (
    ARRAYS,
    ASCEND,
    CONFIG_JSON,
    DEEPSPEED,
    FLAGSCALE_EXPERIMENT,
    FLAGSCALE_TRAIN,
    GPT_NEOX,
    NANOTRON,
    STRINGS,
    TORCHTITAN,
    TORCHTITAN_SCRIPT,
)
from tests.support.studies.training_logs import LOG, LOGGED
from trials.command.backend import CommandBackend
from trials.command.patience import at_most
from tuner.study_file.config import load_study


def write(folder, name, text):
    """A file of that name."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def current_of(path):
    """The current configuration of a written study, by its degrees above 1."""
    current = load_study(path).problem.current
    return {name: size for name, size in current.values().items() if size != 1}


H100 = ("--cluster", "dgx-h100")


def init(meshtune, folder, text, *more, framework="megatron", cluster=H100):
    """Runs `meshtune init` on a file of that text."""
    return meshtune("init", f"--from-{framework}", write(folder, "train.sh", text), *cluster, *more)


def test_a_script_becomes_a_study(meshtune, tmp_path):
    """The study loads, with the script's configuration as the current one; its trials run its command; comments say
    what was read from where and what was left out.
    """
    done = init(meshtune, tmp_path, ARRAYS, "--json")

    study = load_study(tmp_path / "study.yaml")
    assert done.status == 0
    assert (done.json["written"], done.json["trial"], done.json["model"]) == ("study.yaml", "command", None)
    assert current_of(tmp_path / "study.yaml") == {"pp": 2, "tp": 4, "dp": 2, "cp": 2, "vpp": 4}
    assert done.json["current"] == study.problem.current.values()
    assert study.problem.setting.job.model.name == "llama3-8b"
    assert isinstance(study.trials.backend, CommandBackend)
    assert study.trials.backend.flags(study.problem.current).arguments[:2] == ("--tensor-model-parallel-size", "4")
    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert "train.sh`: `current:` is what it runs today" in text
    assert "# in use today: never pruned, and the first trial" in text
    assert "Left out, which a trial must not do: --save --save-interval --tensorboard-dir --wandb-project" in text
    assert "not-for-a-study" not in text


def test_what_to_do_next_is_told(meshtune, tmp_path):
    """The last lines are commands that work on the written study."""
    done = init(meshtune, tmp_path, ARRAYS)

    commands = [line.partition("#")[0].split() for line in done.out.splitlines() if line.startswith("  meshtune ")]

    assert [command[1] for command in commands] == ["space", "predict", "trial", "run"]
    for command in commands[:2]:
        assert meshtune(*command[1:]).status == 0


def test_trials_on_few_hosts_are_written(meshtune, tmp_path):
    """`--trial-hosts 2` makes all trials smaller jobs on two of the hosts, which show their command; the next step says
    so. From eight hosts on, a comment proposes them, and removing its sign gives a study that loads.
    """
    done = init(meshtune, tmp_path, ARRAYS, "--trial-hosts", "2")

    study = load_study(tmp_path / "study.yaml")
    assert (study.trials.proxy.hosts, study.trials.proxy.full_trials) == (2, 0)
    assert "  meshtune trial study.yaml --once --proxy    # run it once, as a smaller job" in done.out.splitlines()
    shown = meshtune("trial", tmp_path / "study.yaml", "--dry-run", "--proxy", "--json").json
    words = shown["command"]
    assert shown["proxy"]["hosts"] == 2
    assert words[words.index("--num-layers") + 1] == str(shown["proxy"]["layers"])
    assert words[words.index("--global-batch-size") + 1] == str(shown["proxy"]["global_batch_size"])

    init(meshtune, tmp_path, ARRAYS, "--force")
    assert "proxy" not in (tmp_path / "study.yaml").read_text(encoding="utf-8")
    init(meshtune, tmp_path, ARRAYS, "--hosts", "8", "--force")
    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert "  # proxy: {hosts: 2}  #" in text
    proposed = write(tmp_path, "proposed.yaml", text.replace("# proxy:", "proxy:"))
    assert load_study(proposed).trials.proxy.full_trials == 3


def test_trials_inside_of_a_training_are_written(meshtune, tmp_path):
    """`--checkpoints` lets trials load and save in the place of the script, from the checkpoint that it loads if that
    is here; the first trial's folders are those of the study, and the words say why.
    """
    done = init(meshtune, tmp_path, ARRAYS, "--checkpoints", "mine")
    shown = meshtune("trial", tmp_path / "study.yaml", "--dry-run", "--json").json["command"]

    assert shown[shown.index("--load") + 1] == str(tmp_path / "mine" / "new")
    assert shown[shown.index("--save") + 1] == str(tmp_path / "mine" / "trial-0000")
    assert shown[shown.index("--exit-interval") + 1] == "7"
    assert "--dist-ckpt-optim-fully-reshardable" in shown
    assert "{new_checkpoint}: trials run inside of a training" in done.out
    assert "must not do: --save-interval" in (tmp_path / "study.yaml").read_text(encoding="utf-8")

    (tmp_path / "old" / "iter_0000120").mkdir(parents=True)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("120", encoding="utf-8")
    init(meshtune, tmp_path, f"{ARRAYS.rstrip()} --load old\n", "--checkpoints", "mine", "--force")
    shown = meshtune("trial", tmp_path / "study.yaml", "--dry-run", "--json").json["command"]

    assert shown[shown.index("--load") + 1] == str(tmp_path / "old")
    assert shown[shown.index("--exit-interval") + 1] == "127"
    smaller = init(meshtune, tmp_path, ARRAYS, "--checkpoints", "mine", "--trial-hosts", "2", "--force")
    assert_users_mistake(smaller, "--checkpoints", "needs trials at full size")


@pytest.mark.parametrize("hosts", ["0", "4", "9"])
def test_trials_have_fewer_hosts_than_the_cluster(meshtune, tmp_path, hosts):
    """As many hosts as the cluster has, or none, are refused with the range."""
    assert_users_mistake(init(meshtune, tmp_path, ARRAYS, "--trial-hosts", hosts), "--trial-hosts", "from 1 to 3")


def test_a_command_that_is_not_whole_stands_as_a_comment(meshtune, tmp_path):
    """Where a value comes from elsewhere trials are simulated, and the command waits with the reason in comments;
    without their signs it is a `trial:` that loads.
    """
    done = init(meshtune, tmp_path, STRINGS.replace("python -u", "torchrun"))

    assert done.status == 0
    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert "trial: {backend: simulated}" in text
    assert "#   $1 on line 16 is given when the script is started" in text
    waiting = text.partition("# trial:\n")[2]
    trial = yaml.safe_load("trial:\n" + "".join(f"{line[2:]}\n" for line in waiting.splitlines()))["trial"]
    ready = text.partition("trial:")[0] + yaml.safe_dump({"trial": trial})
    assert isinstance(load_study(write(tmp_path, "ready.yaml", ready)).trials.backend, CommandBackend)


@pytest.mark.parametrize(
    ("framework", "text", "more", "current"),
    [
        ("megatron", STRINGS, "", {"pp": 4, "tp": 8, "dp": 4, "mbs": 2}),
        ("torchtitan", TORCHTITAN, "--hosts 2", {"tp": 4, "dp": 4, "mbs": 2}),
        ("nanotron", NANOTRON, "", {"pp": 2, "tp": 2, "dp": 4, "mbs": 2}),
        ("deepspeed", DEEPSPEED, "--hosts 2 --model llama3-8b --sequence-length 4096", {"dp": 16, "mbs": 4}),
        ("gpt-neox", GPT_NEOX, "", {"pp": 4, "tp": 2, "dp": 12, "mbs": 4}),
        ("flagscale", FLAGSCALE_TRAIN, "--hosts 4", {"pp": 4, "tp": 2, "dp": 4, "ep": 4}),
    ],
    ids=["megatron", "torchtitan", "nanotron", "deepspeed", "gpt-neox", "flagscale"],
)
def test_every_format_becomes_a_study(meshtune, tmp_path, framework, text, more, current):
    """Each framework's file becomes a study that loads, with the current configuration that the file means."""
    done = init(meshtune, tmp_path, text, *more.split(), framework=framework)

    assert (done.status, done.out.partition("\n")[0]) == (0, "wrote study.yaml")
    assert current_of(tmp_path / "study.yaml") == current


def test_an_experiment_of_flagscale_brings_the_file_that_it_names(meshtune, tmp_path):
    """The experiment's hosts and the degrees of its file for training, which lies beside it, become one study."""
    (tmp_path / "train").mkdir()
    write(tmp_path / "train", "8x7b.yaml", FLAGSCALE_TRAIN)
    done = init(meshtune, tmp_path, FLAGSCALE_EXPERIMENT, "--json", framework="flagscale")

    assert (done.status, done.json["devices"]) == (0, 32)
    assert done.json["job"]["global_batch_size"] == 2048


def test_an_experiment_of_flagscale_without_its_file_is_told(meshtune, tmp_path):
    """If the file that an experiment names is not there, the message names it."""
    done = init(meshtune, tmp_path, FLAGSCALE_EXPERIMENT, framework="flagscale")

    assert_users_mistake(done, "defaults", "train/8x7b.yaml", "not beside it")


def test_a_script_of_mindspeed_becomes_a_study(meshtune, tmp_path):
    """It is a study about MindSpeed, whose trials run the script's command with MindSpeed's flags."""
    done = init(meshtune, tmp_path, ASCEND, "--json", cluster=("--cluster", "ascend-910b"))

    study = load_study(tmp_path / "study.yaml")
    assert done.json["trial"] == "command"
    assert study.problem.setting.runtime.name == "mindspeed"
    assert current_of(tmp_path / "study.yaml") == {"tp": 2, "dp": 4, "up": 4, "ep": 8}
    assert "ulysses_cp_algo" in study.trials.backend.flags(study.problem.current).arguments


def test_a_script_of_torchtitan_becomes_a_study(meshtune, tmp_path):
    """Its trials run the script's command, of which the subcommand is the last word."""
    done = init(meshtune, tmp_path, TORCHTITAN_SCRIPT, "--json", framework="torchtitan")

    study = load_study(tmp_path / "study.yaml")
    assert done.json["trial"] == "command"
    assert current_of(tmp_path / "study.yaml") == {"tp": 4, "dp": 4, "mbs": 2}
    assert study.trials.backend.arguments[-1] == "activation-checkpoint:full"
    assert study.trials.backend.flags(study.problem.current).arguments[-1] == "activation-checkpoint:full"


def test_a_config_json_becomes_a_study_without_a_current_configuration(meshtune, tmp_path):
    """A model alone is named where it stands, also from another folder; the job is asked for."""
    (tmp_path / "model").mkdir()
    (tmp_path / "studies").mkdir()
    file = write(tmp_path / "model", "config.json", CONFIG_JSON)
    job = ("--cluster", "dgx-h100", "--hosts", "1", "--sequence-length", "4096", "--global-batch-size", "64")

    done = meshtune("init", "--from-hugging-face", file, *job, "--out", "studies/new.yaml", "--json")

    study = load_study(tmp_path / "studies" / "new.yaml")
    assert done.json["current"] is None
    assert (study.problem.current, study.problem.setting.job.model.hidden_size) == (None, 4096)


def test_an_exported_configuration_is_the_current(meshtune, tmp_path):
    """`export` and `init` are inverse: flags and JSON of a configuration become a study with it as current."""
    config = "pp=2,tp=4,dp=2,mbs=2"
    init(meshtune, tmp_path, ARRAYS, "--hosts", "2")
    for target in ("megatron", "json"):
        meshtune("export", "study.yaml", "--to", target, "--config", config, "--out", f"{target}.txt")
        given = ("--cluster", "dgx-h100", "--hosts", "2", "--model", "llama3-8b")

        done = meshtune("init", f"--from-{target}", f"{target}.txt", *given, "--out", f"{target}.yaml")

        assert done.status == 0
        assert current_of(tmp_path / f"{target}.yaml") == {"pp": 2, "tp": 4, "dp": 2, "mbs": 2}


def test_an_exported_plan_is_read_as_by_hand(meshtune, tmp_path):
    """No framework runs a planner's plan, so that today's configuration has none: `init` says what it leaves out."""
    init(meshtune, tmp_path, ARRAYS, "--hosts", "2")
    exported = ("--to", "json", "--config", "tp=4,dp=4,plan=descent", "--out", "planned.json")
    meshtune("export", "study.yaml", *exported)
    given = ("--cluster", "dgx-h100", "--hosts", "2", "--model", "llama3-8b")

    done = meshtune("init", "--from-json", "planned.json", *given, "--out", "again.yaml")

    assert done.status == 0
    assert "config.plan: descent is no framework's; read as by hand" in done.err
    assert load_study(tmp_path / "again.yaml").problem.current.plan == "hand"


def test_studies_of_one_folder_have_models_of_their_own(meshtune, tmp_path):
    """A second study in the same folder collides with nothing of the first, and each reads its own model."""
    for name, rows in (("a", 50304), ("b", 50432)):
        script = write(tmp_path, "train.sh", ARRAYS.replace("--vocab-size 128256", f"--vocab-size {rows}"))
        done = meshtune("init", "--from-megatron", script, "--cluster", "dgx-h100", "--out", f"{name}.yaml")
        assert done.status == 0, done.err

    for name, rows in (("a", 50304), ("b", 50432)):
        assert load_study(tmp_path / f"{name}.yaml").problem.setting.job.model.vocab_size == rows
        assert (tmp_path / f"{name}-model.yaml").exists()


def test_uneven_layers_are_opened(meshtune, tmp_path):
    """A layout of unequal stages is the current configuration's assignment, and the study searches such ones."""
    text = ARRAYS.replace("--num-layers-per-virtual-pipeline-stage 4", "--pipeline-model-parallel-layout 'Et*17|t*15L'")

    assert init(meshtune, tmp_path, text).status == 0
    assert str(load_study(tmp_path / "study.yaml").problem.current.assignment) == "layers=17/15"


def test_nothing_is_overwritten(meshtune, tmp_path):
    """A study, or a model's file, that is there already stays as it is without --force."""
    script = write(tmp_path, "train.sh", ARRAYS.replace("--vocab-size 128256", "--vocab-size 50257"))
    options = ("init", "--from-megatron", script, "--cluster", "dgx-h100")
    write(tmp_path, "study.yaml", "mine")
    assert_users_mistake(meshtune(*options), "--out = 'study.yaml'", "already exists", "--force")
    write(tmp_path, "new-model.yaml", "mine")
    assert_users_mistake(
        meshtune(*options, "--out", "new.yaml"),
        "--out = 'new.yaml': its model would be written to new-model.yaml beside it, which already exists",
    )

    assert not (tmp_path / "new.yaml").exists()
    assert meshtune(*options, "--force").status == 0
    assert load_study(tmp_path / "study.yaml").problem.setting.job.model.vocab_size == 50304


LAYOUT = "--pipeline-model-parallel-layout 'Et*20|t*20L'"

BROKEN = [
    ("PP=2", "PP=two", "train.sh: does not say | --pipeline-model-parallel-size (line 41): 'two' must be a whole"),
    ("PP=2", "PP=$1", "train.sh: does not say | --pp N | (line 41) | $1 on line 9 is given when the script"),
    ("PP=2", "PP=8", "train.sh | pp=8, tp=4, cp=2 | occupies 64 devices | the 32 of the cluster | --hosts 8"),
    ("PP=2", "PP=16", "train.sh: does not say | --vpp N: 32 layers are no whole number of chunks of 4 on 16 stages"),
    ("--num-query-groups 8", "--num-query-groups 5", "train.sh | num_kv_heads = 5 | must divide | nearest: 4"),
    (
        "--global-batch-size 256",
        "--global-batch-size 255",
        "train.sh | current | dp*mbs must divide the global batch of",
    ),
    ("--num-layers-per-virtual-pipeline-stage 4", LAYOUT, "train.sh | must add up to the model's 32"),
]

WRONG = {
    "--from-nanotron x.yaml": "init | one of --from-megatron, --from-deepspeed",
    "--cluster dgx-h1000": "--cluster = 'dgx-h1000' | did you mean 'dgx-h100'?",
    "--hosts few": "--hosts = 'few' | whole number",
    "--runtime megatron": "--runtime = 'megatron' | did you mean",
    "--config dp_shard=2": "--config = 'dp_shard' | valid: pp, tp",
    "--out study.txt": "--out = 'study.txt' | must end in .yaml",
}


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("echo hello\n", "", "train.sh | has no flags of Megatron-LM | --tensor-model-parallel-size"),
        *((ARRAYS.replace(old, new), "", words) for old, new, words in BROKEN),
        *((ARRAYS, more, words) for more, words in WRONG.items()),
    ],
    ids=["something else", *(new for _, new, _ in BROKEN), *WRONG],
)
def test_every_mistake_is_one_message(meshtune, tmp_path, text, more, words):
    """A script that cannot become a study, and an option that cannot be, end in one line with status 2, and nothing is
    written.
    """
    done = init(meshtune, tmp_path, text, *more.split(), cluster=() if "--cluster" in more else H100)

    assert_users_mistake(done, *words.split(" | "))
    assert not (tmp_path / "study.yaml").exists()


def test_all_that_is_missing_is_asked_for_at_once(meshtune, tmp_path):
    """One message names every option that would fill what the file leaves open."""
    done = init(meshtune, tmp_path, "--tensor-model-parallel-size 2 --num-layers 4 --hidden-size 64", cluster=())

    options = ("--cluster WHICH", "--hosts N", "--model NAME", "--sequence-length N", "--mbs N")
    assert_users_mistake(done, *options)


def test_a_zero_stage_that_only_deepspeeds_file_tells_is_asked_for(meshtune, tmp_path):
    """A script whose stage is in another file is asked for it, and for all else that the file decides."""
    flags = "--use-distributed-optimizer"
    text = ARRAYS.replace(flags, "--deepspeed --deepspeed_config ds.json").replace("--context-parallel-size 2", "")

    asked = ("--zero-stage N", "--precision NAME", "--offload NAME", "DeepSpeed's configuration file")
    assert_users_mistake(init(meshtune, tmp_path, text), *asked)
    unlike = text.replace("--sequence-parallel", "").replace("--num-layers-per-virtual-pipeline-stage 4", "")
    answers = ("--zero-stage", "1", "--precision", "bf16", "--offload", "none")
    done = init(meshtune, tmp_path, unlike, *answers, "--json")
    assert done.status == 0
    assert done.json["job"]["zero_stage"] == 1
    assert load_study(tmp_path / "study.yaml").problem.setting.runtime.name == "megatron-deepspeed"


def test_arguments_behind_two_dashes_are_those_of_the_script(meshtune, tmp_path):
    """A script that takes its degrees as arguments becomes a study once they are given."""
    script = ARRAYS.replace("PP=2", "PP=$1").replace("TP=${TP:-4}", "TP=$2")

    assert init(meshtune, tmp_path, script).status == 2
    assert init(meshtune, tmp_path, script, "--", "2", "4").status == 0
    assert current_of(tmp_path / "study.yaml") == {"pp": 2, "tp": 4, "dp": 2, "cp": 2, "vpp": 4}


HIDING = ARRAYS.replace('"${LAYOUT[@]}"', "$LAYOUT_ARGS").replace("--vocab-size 128256", "").replace("PP=2", "PP=$1")


def test_what_a_script_hides_is_asked_for(meshtune, tmp_path):
    """Every key that an unknown part of the command may state is asked for with its line, LoRA's flags are mentioned,
    and so is every other problem of the file.
    """
    done = init(meshtune, tmp_path, HIDING, "--hosts", "2")

    hidden = ["tp", "cp", "vpp", "recompute", "zero_stage", "offload", "precision", "sequence_parallel"]
    assert_users_mistake(
        done, *(f"--{key.replace('_', '-')} " for key in hidden), "may stand in $LAYOUT_ARGS (line 63)"
    )
    assert "--vocab-size N: --vocab-size is not there" in done.err
    assert "LoRA" in meshtune("init", "--from-megatron", "train.sh", *H100, *ANSWERS).err


ANSWERS = (
    *("--vocab-size", "128256", "--precision", "bf16", "--pp", "2", "--tp", "4", "--cp", "1", "--vpp", "1"),
    *("--recompute", "full", "--offload", "none", "--zero-stage", "1", "--sequence-parallel", "true"),
)


def test_the_command_of_the_message_answers_all_questions(meshtune, tmp_path):
    """The message ends in a command that, once its values are filled in, writes the study."""
    done = init(meshtune, tmp_path, HIDING, "--hosts", "2")

    told = next(line for line in done.err.splitlines() if line.startswith("  Add what it leaves open: "))
    words = shlex.split(told.partition(": meshtune ")[2])
    values = dict(zip(ANSWERS[::2], ANSWERS[1::2], strict=True))
    filled = [values.get(before, word) for before, word in zip(("", *words), words, strict=False)]
    assert filled[:7] == [
        "init",
        "--from-megatron",
        str(tmp_path / "train.sh"),
        "--cluster",
        "dgx-h100",
        "--hosts",
        "2",
    ]
    assert meshtune(*filled).status == 0
    study = load_study(tmp_path / "study.yaml")
    assert (study.problem.setting.job.precision, study.problem.setting.job.recompute, study.problem.current.pp) == (
        "bf16",
        "full",
        2,
    )


def test_the_run_that_the_message_proposes_leaves_nothing_open(meshtune, tmp_path):
    """The last line of the message is the command that captures, with the options and the arguments given so far."""
    script = ARRAYS.replace("PP=2", "PP=$(echo $1)")
    done = init(meshtune, tmp_path, script, "--hosts", "2", "--", "2")

    words = shlex.split(done.err.splitlines()[-1].partition(": meshtune ")[2])
    assert meshtune(*words[:2], "--yes", *words[2:]).status == 0
    assert current_of(tmp_path / "study.yaml")["pp"] == 2


@pytest.mark.parametrize(
    ("option", "value", "valid"),
    [
        ("--recompute", "some", "none, selective or full"),
        ("--zero-stage", "4", "3"),
        ("--sequence-parallel", "yes", "true or false"),
        ("--precision", "bf61", "did you mean 'bf16'?"),
        ("--devices-per-host", "0", "whole number of at least 1"),
        ("--tp", "x", "whole number"),
    ],
)
def test_a_wrong_answer_names_its_option(meshtune, tmp_path, option, value, valid):
    """The message has the option, the value and what is valid."""
    assert_users_mistake(init(meshtune, tmp_path, ARRAYS, option, value), f"{option} = '{value}'", valid)


REWRITTEN = """#!/bin/bash
MODEL=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000)
if [ "$LONG" = 1 ]; then
  MODEL=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 16384 --vocab-size 32000)
fi
torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL[@]}" --micro-batch-size 1 --global-batch-size 64 --bf16
"""


def test_what_stands_in_a_rewritten_array_is_said_to(meshtune, tmp_path):
    """Flags in an array that an `if` rewrites are asked for as what they are, and a run of the script is offered."""
    done = init(meshtune, tmp_path, REWRITTEN)

    place = "stands in $MODEL, which is set on line 4 under a condition, in a loop or in a function"
    assert_users_mistake(done, f"--model NAME: the model {place}", f"--sequence-length N: {place}", "init --capture")
    assert "does not state it" not in done.err
    answered = init(meshtune, tmp_path, REWRITTEN, "--model", "llama-7b", "--sequence-length", "4096")
    assert answered.status == 0, answered.err


def test_a_flag_under_a_condition_is_asked_for_alone(meshtune, tmp_path):
    """Where a script decides by itself whether it adds a flag, only that flag's key is asked for."""
    script = ARRAYS.replace("    --sequence-parallel\n)", ")\nif [ $TP -gt 1 ]; then LAYOUT+=(--sequence-parallel); fi")

    done = init(meshtune, tmp_path, script)

    assert_users_mistake(done, "--sequence-parallel BOOL: stands in $LAYOUT, which is set on line")
    assert len(done.err.splitlines()) == 4
    assert init(meshtune, tmp_path, script, "--sequence-parallel", "true").status == 0


def test_a_flag_that_no_program_has_is_asked_for(meshtune, tmp_path):
    """A fork's own flags stop `init` with their names and lines; ignored, they stand in the study's comments."""
    text = ARRAYS.rstrip() + " --hash-layers 4 --wandb-team x\n"

    done = init(meshtune, tmp_path, text)
    answered = init(meshtune, tmp_path, text, "--ignore-flags", "--hash_layers")

    line = f"(line {len(text.splitlines())})"
    assert_users_mistake(done, f"--ignore-flags hash-layers: --hash-layers {line}", "not known to any version")
    assert answered.status == 0
    written = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert (
        f"#   --hash-layers {line}: left out of the study, as --ignore-flags says, and still in the trial's command"
        in written
    )
    assert "or AIAK-Megatron: --hash-layers, --wandb-team" in written


def test_the_folder_of_the_study_is_made(meshtune, tmp_path):
    """`--out` may name a folder that is not there yet."""
    assert init(meshtune, tmp_path, ARRAYS, "--out", "new/folder/study.yaml").status == 0

    assert current_of(tmp_path / "new" / "folder" / "study.yaml")["tp"] == 4


def test_hosts_of_sixteen_dies_are_in_the_catalog(meshtune, tmp_path):
    """A script that starts 16 processes on each Ascend host becomes a study of such hosts, and of no changed ones."""
    script = ASCEND.replace("NPUS_PER_NODE=8", "NPUS_PER_NODE=16")

    assert init(meshtune, tmp_path, script, cluster=("--cluster", "ascend-a3")).status == 0

    assert "cluster: {name: ascend-a3, hosts: 4}" in (tmp_path / "study.yaml").read_text(encoding="utf-8")
    done = init(meshtune, tmp_path, script, "--force", cluster=("--cluster", "ascend-910b"))
    assert_users_mistake(
        done, "--cluster = 'ascend-910b'", "hosts of 8 devices", "16 processes", "ascend-a3, atlas-900-a3"
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to run scripts with")
def test_a_captured_script_becomes_a_study(meshtune, tmp_path):
    """What a run of the script would have started becomes the study, after it was said what runs."""
    script = write(tmp_path, "train.sh", ARRAYS.replace("PP=2", "PP=$(echo $1)"))

    done = meshtune("init", "--capture", "--yes", *H100, "--", "bash", script.name, "2")

    assert done.status == 0
    assert "Capture: runs `bash train.sh 2`" in done.err
    assert "All other commands of the script really run" in done.err
    assert current_of(tmp_path / "study.yaml") == {"pp": 2, "tp": 4, "dp": 2, "cp": 2, "vpp": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--capture", "--", "bash", "train.sh"), "--yes"),
        (("--capture", "--yes"), "--capture -- bash train.sh"),
        (("--capture", "--yes", "--", "no-such-program"), "no-such-program"),
        (("--from-megatron", "train.sh", "--capture"), "exactly one of"),
        (("--from-deepspeed", "train.sh", "--", "1"), "only a script has arguments"),
    ],
    ids=["not confirmed", "no command", "no program", "two ways", "no script"],
)
def test_a_capture_that_cannot_be_is_one_message(meshtune, tmp_path, words, message):
    """Nothing runs without the user's consent, and each mistake ends in one message with status 2."""
    write(tmp_path, "train.sh", f"touch {tmp_path}/ran\n")

    done = meshtune("init", *H100, *words)

    assert done.status == 2
    assert message in done.err.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_the_script_is_not_run(meshtune, tmp_path):
    """Whatever a script would do, reading it does nothing of it."""
    done = init(meshtune, tmp_path, f"touch {tmp_path}/made\nX=$(touch {tmp_path}/made)\n{ARRAYS}")

    assert done.status == 0
    assert not (tmp_path / "made").exists()


def test_the_command_of_a_trial_runs(meshtune, tmp_path):
    """A program that only prints its arguments gets those of the script, each once."""
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    write(tmp_path, "pretrain_gpt.py", program)
    init(meshtune, tmp_path, ARRAYS)
    study = load_study(tmp_path / "study.yaml")
    arguments = study.trials.backend.plan(study.problem.current, 0).arguments

    words = arguments[arguments.index("pretrain_gpt.py") :]
    told = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    flags = [word for word in json.loads(told) if word.startswith("--")]
    assert len(set(flags)) == len(flags), "no flag is given twice"
    assert {"--tensor-model-parallel-size", "--mock-data", "--log-interval"} <= set(flags)


def test_a_log_becomes_a_study(meshtune, tmp_path):
    """The study has the log's configuration; its steps wait in a comment, since simulated trials compare with none."""
    done = init(meshtune, tmp_path, LOG, "--json", framework="log")

    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert (done.status, done.json["trial"], done.json["devices"]) == (0, "simulated", 32)
    assert done.json["measured"] == {"step_time_s": 7.5, "readings": 3, "peak_memory_bytes": None, "source": "train.sh"}
    assert current_of(tmp_path / "study.yaml") == {"pp": 2, "tp": 4, "dp": 2, "cp": 2, "vpp": 4}
    assert load_study(tmp_path / "study.yaml").problem.setting.job.model.name == "llama3-8b"
    assert "# measured: {step_time_s: 7.5, source: train.sh}\n" in text


def test_a_log_and_its_script_measure_and_run(meshtune, tmp_path):
    """Of the script only its command is taken, so that trials train and the log's steps count as the first one."""
    script = write(tmp_path, "pretrain.sh", ARRAYS.replace("TP:-4", "TP:-2"))
    init(meshtune, tmp_path, LOG, "--from-megatron", script, framework="log")

    study, text = load_study(tmp_path / "study.yaml"), (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert isinstance(study.trials.backend, CommandBackend)
    assert study.problem.current.tp == 4
    assert (study.trials.current.step_time_s, study.trials.current.taken_from) == (7.5, "train.sh")
    assert "# Each trial runs the command of pretrain.sh" in text


def test_the_steps_of_another_configuration_are_not_those_of_the_current_one(meshtune, tmp_path):
    """If an option replaces what the log says, its steps are no measurement."""
    done = init(meshtune, tmp_path, LOG, "--global-batch-size", "512", "--json", framework="log")

    assert done.json["measured"] is None
    assert "measured: an option replaces global_batch_size, with which the log's steps were timed" in done.err


START = LOG[: LOG.index(" iteration ")]
"""Log up to its first step."""
STEPS = [LOGGED.format(number, 7500.0) for number in range(1, 9)]
MEMORY = "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.0 | reserved: 2.0 | max reserved: 20480.0\n"
TITAN = "step: 10  loss:  3.1  memory: 40.2GiB(50%)  tps: 5,000  mfu: 40%\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the log has no line of a step after its configuration"),
        (STEPS[0][:60], "the log has no line of a step after its configuration"),
        (" validation loss at iteration 10 | lm loss value: 2.1E+00 |\n", "the log has no line of a step"),
        (
            "".join(STEPS[:2]),
            "of 2 lines that may be of steps none is used, so `current` has no step time: 2 of the warm-up",
        ),
        (
            "".join(STEPS).replace("7500.0", "nan"),
            "8 without a time that can be read (first, line {first}: 'elapsed time per iteration (ms): nan",
        ),
        ("".join(STEPS).replace("size:   256", "size:    64"), "8 of another global batch (64) than the job's"),
        (TITAN * 5, "5 without a time that can be read"),
        (MEMORY * 3, "3 with memory alone"),
        (STEPS[0] * 32, "31 of a step that another rank printed too, 1 of the warm-up"),
    ],
    ids=["none", "cut off", "evaluation", "warm-up", "nan", "other batch", "other framework", "memory", "one step"],
)
def test_a_log_of_which_no_step_is_used_says_why(meshtune, tmp_path, text, said):
    """The note, the JSON and the study file tell which lines were found, that none is used, and why."""
    done = init(meshtune, tmp_path, START + text, "--json", framework="log")

    assert (done.status, done.json["measured"]) == (0, None)
    (note,) = (note for note in done.json["notes"] if note.startswith("measured: "))
    assert said.format(first=START.count("\n") + 1) in note
    assert f"note: {note}\n" in done.err
    assert f"# {note}\n" in (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert (done.json["steps"]["used"], done.json["steps"]["shape"]) == (0, None)


@pytest.mark.parametrize(
    ("millis", "said"),
    [
        (
            lambda at: 3000 if at % 10 == 9 else 2000,
            "of two kinds: 52 take 2 s and 6 take 3 s, at every interval of 10",
        ),
        (lambda at: 2000 + 10 * at, "drift from 2."),
    ],
    ids=["two kinds", "drift"],
)
def test_a_log_whose_steps_differ_says_how(meshtune, tmp_path, millis, said):
    """Steps of two kinds and steps that drift are told, with the median and the mean."""
    steps = [LOGGED.format(at + 1, millis(at) + (0.1, -0.2, 0.3, 0.0, -0.1)[at % 5]) for at in range(60)]
    done = init(meshtune, tmp_path, START + "".join(steps), framework="log")

    (note,) = (line for line in done.err.splitlines() if "measured: " in line)
    assert said in note
    assert "the median of all 58 is 2" in note
    assert "by 58 of 60 lines that may be of steps" in done.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (LOGGED.format(7, 1.0), "begins after the configuration was printed: line 1"),
        (LOG[:1000], "the printed arguments have no end"),
    ],
)
def test_a_log_that_says_too_little_is_refused(meshtune, tmp_path, text, said):
    """The message names the file and what is needed, and nothing is written."""
    done = init(meshtune, tmp_path, text, framework="log")

    assert_users_mistake(done, "train.sh", said)
    assert not (tmp_path / "study.yaml").exists()


def test_a_script_without_a_command_adds_nothing_to_a_log(meshtune, tmp_path):
    """Beside a log a file is asked for its command only."""
    done = init(meshtune, tmp_path, LOG, "--from-torchtitan", write(tmp_path, "job.toml", TORCHTITAN), framework="log")

    assert_users_mistake(done, "job.toml", "has no launch command")


def test_several_files_of_gpt_neox_become_one_study(meshtune, tmp_path):
    """The option is given once for each file, and what they say together is the study."""
    first, _, rest = GPT_NEOX.partition('"hidden')
    parts = {"model": first + "}", "local": '{"hidden' + rest}
    files = [write(tmp_path, f"{name}.yml", text) for name, text in parts.items()]

    done = meshtune("init", *(word for file in files for word in ("--from-gpt-neox", file)), *H100)

    assert done.status == 0
    assert current_of(tmp_path / "study.yaml") == {"pp": 4, "tp": 2, "dp": 12, "mbs": 4}
    again = meshtune("init", "--from-gpt-neox", files[0], "--from-gpt-neox", files[0], *H100, "--force")
    assert_users_mistake(again, "has the name of another file")


@pytest.mark.parametrize("place", ["pipe", "/dev/zero", "/dev/urandom", "folder", "none.log"])
def test_a_log_is_a_plain_file(meshtune, tmp_path, place):
    """A pipe that nobody writes to and a device without end are refused at once, as by every other reader."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with at_most(20):
        done = meshtune("init", "--from-log", tmp_path / place, *H100, "--out", tmp_path / "study.yaml")

    assert_users_mistake(done, place)


def test_an_argument_that_is_no_text_is_refused(meshtune, tmp_path):
    """A byte that is no UTF-8 in an argument of the script cannot stand in a study, and is refused in words."""
    text = ARRAYS.replace("--mock-data", '--data-path "$1"').replace("NCCL_DEBUG=WARN", 'NCCL_DEBUG="$1"')
    done = init(meshtune, tmp_path, text, "--out", tmp_path / "study.yaml", "--", "\udcff")

    assert_users_mistake(done, "a byte that is no UTF-8")


RACKS = """#!/bin/bash
#SBATCH --nodes=64
#SBATCH --gpus-per-node=4
srun python pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \\
  --group-query-attention --num-query-groups 8 --seq-length 4096 --vocab-size 128256 --tokenizer-type NullTokenizer \\
  --tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256 --train-iters 50 --bf16 --swiglu \\
  --normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear --mock-data
"""


@pytest.mark.parametrize(
    ("segment", "domains"), [("", "hosts_per_domain: 18"), ("#SBATCH --segment=8\n", "hosts_per_domain: 8")]
)
def test_racks_have_the_hosts_of_the_script(meshtune, tmp_path, segment, domains):
    """A GB200 script's hosts of four are launched, several of them in one domain, as --segment says or else evenly."""
    script = RACKS.replace("srun", f"{segment}srun", 1)

    done = init(meshtune, tmp_path, script, cluster=("--cluster", "GB200"))

    assert done.status == 0, done.err
    text = (tmp_path / "study.yaml").read_text(encoding="utf-8")
    assert f"cluster: {{device: GB200, hosts: 64, devices_per_host: 4, {domains}}}" in text
    assert ("--segment=16" in text) == (not segment)  # a hint where the script says nothing
    cluster = load_study(tmp_path / "study.yaml").problem.cluster
    assert (cluster.num_hosts, cluster.devices_per_host) == (64, 4)
    assert cluster.devices_per_domain == (32 if segment else 64)


@pytest.mark.parametrize(("framework", "text"), [("megatron", ARRAYS), ("nanotron", NANOTRON), ("gpt-neox", GPT_NEOX)])
def test_the_space_that_the_comment_proposes_is_accepted(meshtune, tmp_path, framework, text):
    """Without its `#`, the comment on `space:` opens recomputation, in modes that the runtime offers."""
    done = init(meshtune, tmp_path, text, "--out", tmp_path / "new.yaml", framework=framework)
    written = (tmp_path / "new.yaml").read_text(encoding="utf-8")

    assert done.status == 0, done.err
    (tmp_path / "opened.yaml").write_text(written.replace("\n# space: ", "\nspace: "), encoding="utf-8")
    opened = load_study(tmp_path / "opened.yaml").problem
    assert "recompute" in opened.options.opened
    assert "recompute" not in load_study(tmp_path / "new.yaml").problem.options.opened


def test_editors_find_the_schema(meshtune, tmp_path):
    """The first line of a study names the schema of this installation on the disk, and the study follows it."""
    (tmp_path / "train.sh").write_text(ARRAYS, encoding="utf-8")

    done = meshtune("init", "--from-megatron", "train.sh", "--cluster", "dgx-h100", "--out", "new.yaml")

    assert done.status == 0, done.err
    text = (tmp_path / "new.yaml").read_text(encoding="utf-8")
    uri = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)[1]
    schema = json.loads(Path(url2pathname(urlparse(uri).path)).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(parse_yaml(text))
