"""Targets: what `meshtune init` reads, as far as the study that it writes."""

from __future__ import annotations

import json
from pathlib import Path

from hardware.io.config_file import read_text
from tests.fuzz.mutation import Mutation, of_json, of_lines, of_yaml
from tests.fuzz.target import Target
from tests.support.studies import launch_scripts as scripts
from tests.support.studies import recipe_scripts as recipes
from tests.support.studies.training_logs import LOG
from tuner.capture.read_records import read_records
from tuner.capture.run_script import Capture
from tuner.imports.captured import import_captured
from tuner.imports.flagscale import join_files
from tuner.study_file.answers import Added
from tuner.study_file.config import load_study
from tuner.study_file.new_study import MOST_BYTES, NewStudy, new_study, read_import, read_log, read_several

ADDED = {
    "megatron": Added(cluster="dgx-h100"),
    "torchtitan": Added(cluster="dgx-h100", model="llama3-8b", answers={"hosts": 8, "global_batch_size": 512}),
    "deepspeed": Added(cluster="dgx-h100", model="llama3-8b", answers={"hosts": 2, "sequence_length": 4096}),
    "nanotron": Added(cluster="dgx-h100", answers={"hosts": 2}),
    "gpt-neox": Added(cluster="dgx-h100", answers={"hosts": 12}),
    "flagscale": Added(cluster="dgx-h100", answers={"hosts": 4}),
    "verl": Added(cluster="dgx-h100"),
    "hugging-face": Added(cluster="dgx-h100", answers={"hosts": 1, "sequence_length": 4096, "global_batch_size": 64}),
    "json": Added(cluster="dgx-h100", model="llama3-8b"),
    "log": Added(cluster="dgx-h100", answers={"sequence_length": 4096}),
}

EXPORTED = {
    "config": {"pp": 2, "tp": 2, "dp": 4}
    | dict.fromkeys(("cp", "up", "vpp", "ep", "mbs"), 1)
    | {
        "recompute": "none",
        "offload": "none",
        "zero_stage": 1,
        "sequence_parallel": True,
        "expert_tp": 0,
        "dp_shard": 0,
        "recompute_layers": 0,
    }
    | {"assignment": "layers=20/12"},
    "job": {"model": "llama3-8b", "sequence_length": 4096, "global_batch_size": 64, "precision": "bf16"},
    "cluster": {"groups": [{"device": "H100-SXM-80", "hosts": 2, "devices_per_host": 8}]},
    "runtime": "megatron-core",
}

SCRIPTS = (
    *(scripts.ARRAYS, scripts.STRINGS, scripts.ASCEND),
    'set -- 1 "2 3"; shift; for i in 1 2; do echo "$i"; done; ARGS=(--bf16); export ARGS\nf() { local TP=$1; }\n'
    'if [ -z "$TP" ]; then TP=2; elif [[ $A == b ]]; then TP=1; fi\n'
    'eval "torchrun --nnodes=2 --nproc-per-node=$((4*2)) pretrain_gpt.py --num-layers ${L:-12} '
    '--hidden-size 512 --num-attention-heads 8 --vocab-size 32000 "\\\n'
    "  --seq-length 4096 --micro-batch-size 1 ${ARGS[@]} <<EOF\nx\nEOF\ncase $1 in a) x=1;; esac\n"
    "bash -c 'python a.py --seq-length 128'\n",
)

TORCHTITAN = (scripts.TORCHTITAN, scripts.TORCHTITAN_FLAGS, scripts.TORCHTITAN_SCRIPT)

LOGS = (
    "[rank0]:Building 2-D device mesh with ['dp_shard', 'tp'], [8, 4]\nBuilding llama3 8B with ModelArgs(dim=4096, "
    "n_layers=32)\nApplied full activation checkpointing to the model\nTraining starts at step 1, with local "
    "batch size 2, global batch size 16, sequence length 8192, total steps 9\n"
    "step:  1  loss: 12.2  memory: 4.0GiB(3%)  tps: 1,478\n",
    "Config(general=GeneralArgs(run='a'),\n parallelism=ParallelismArgs(dp=2, pp=1, tp=8, "
    "tp_mode=<TensorParallelLinearMode.REDUCE_SCATTER: 2>),\n model=ModelArgs(model_config=LlamaConfig("
    "hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, "
    "vocab_size=128256), dtype=torch.bfloat16),\n tokens=TokensArgs(sequence_length=4096, micro_batch_size=2))\n",
)


def _load(made: NewStudy, folder: Path) -> None:
    """Write a study and its model, and load them."""
    if made.model_file:
        (folder / made.model_file).write_text(made.model_text, encoding="utf-8")
    (folder / "study.yaml").write_text(made.text, encoding="utf-8")
    load_study(folder / "study.yaml")


RECORDS = (
    {
        "words": [
            *("torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--num-layers", "12", "--hidden-size", "512"),
            *("--num-attention-heads", "8", "--vocab-size", "32000", "--seq-length", "4096", "--micro-batch-size", "1"),
            *("--global-batch-size", "64", "--tensor-model-parallel-size", "2", "--bf16"),
        ],
        "directory": "/home/me/run",
        "environment": {"PATH": "/usr/bin", "OMP_NUM_THREADS": "4", "HF_TOKEN": "hf_" + "x" * 30},
        "through": [["srun", "-N", "2", "--export=ALL,A=b"]],
        "files": {"ds.json": '{"train_batch_size": 64, "zero_optimization": {"stage": 1}}'},
        "allocation": {"hosts": 2, "tasks_per_host": 1, "devices_per_host": 8},
        "held_back": False,
    },
)


def _read_records(data: bytes, folder: Path) -> None:
    """Read a record that a captured script has left, and write the study of its command."""
    path = folder / "000001-record.json"
    path.write_bytes(data)
    records, unread = read_records([path])
    assert len(records) + len(unread) > 0, "what is no record is told"
    captured = Capture(
        records=tuple(records),
        status=0,
        output="",
        environment={"PATH": "/usr/bin"},
        header=("--nodes=2", "--account=me"),
        unread=tuple(unread),
    )
    script = folder / "train.sh"
    made = new_study(import_captured(captured), ADDED["megatron"], file=script, out=folder / "study.yaml")
    _load(made, folder)


def _target(framework: str, name: str, mutation: Mutation, *seeds: str) -> Target:
    def read(data: bytes, folder: Path) -> None:
        file = folder / name
        file.write_bytes(data)
        if framework == "log":
            imported = read_log(file)
        else:
            imported = read_import(framework, file, read_text(file, most_bytes=MOST_BYTES))
        _load(new_study(imported, ADDED[framework], file=file, out=folder / "study.yaml"), folder)

    return Target(name=f"init: {framework}", read=read, mutation=mutation, seeds=lambda: tuple(map(str.encode, seeds)))


SETTLED = {
    "recompute": "none",
    "sequence_length": 8192,
    "global_batch_size": 128,
    "hosts": 4,
    "sequence_parallel": False,
    **dict.fromkeys(("pp", "tp", "cp", "vpp", "ep", "mbs"), 1),
}
"""Answers to what settings over a recipe leave open."""


def _settings(program: str, script: str, *seeds: str) -> Target:
    """Return the target of a program's scripts, or of the files beside this script."""

    def read(data: bytes, folder: Path) -> None:
        files = [folder / "run.sh", folder / "beside.py"] if script else [folder / "run.sh"]
        files[0].write_text(script, encoding="utf-8")
        files[-1].write_bytes(data)
        imported = read_several(program, files)
        added = Added(cluster="dgx-h100", model="llama3-8b", answers=SETTLED)
        _load(new_study(imported, added, file=files[0], out=folder / "study.yaml"), folder)

    name = f"init: {program}{', with a file' if script else ''}"
    return Target(name=name, read=read, mutation=of_lines, seeds=lambda: tuple(map(str.encode, seeds)))


TARGETS = (
    _settings("bridge", "", recipes.BRIDGE, recipes.BRIDGE_YAML),
    _settings("bridge", recipes.BRIDGE.replace("8b", "70b"), recipes.BRIDGE_PYTHON),
    _settings("swift", "", recipes.SWIFT, recipes.SWIFT_YAML),
    _settings("maxtext", "", recipes.MAXTEXT),
    _settings("maxtext", recipes.MAXTEXT, recipes.MAXTEXT_YAML),
    _settings("nemo", "", recipes.NEMO),
    _target("megatron", "train.sh", of_lines, *SCRIPTS),
    _target("torchtitan", "train.toml", of_lines, *TORCHTITAN),
    _target("deepspeed", "ds.json", of_json, scripts.DEEPSPEED),
    _target("nanotron", "config.yaml", of_yaml, scripts.NANOTRON),
    _target("gpt-neox", "20B.yml", of_yaml, scripts.GPT_NEOX),
    _target(
        *("flagscale", "train.yaml", of_yaml, scripts.FLAGSCALE_TRAIN),
        join_files(scripts.FLAGSCALE_EXPERIMENT, scripts.FLAGSCALE_TRAIN),
    ),
    _target("verl", "run.sh", of_lines, recipes.VERL),
    _target("hugging-face", "config.json", of_json, scripts.CONFIG_JSON),
    _target("log", "train.log", of_lines, LOG, *LOGS),
    _target("json", "best.json", of_json, json.dumps(EXPORTED)),
    Target(
        name="captured record",
        read=_read_records,
        mutation=of_json,
        seeds=lambda: tuple(json.dumps(record).encode() for record in RECORDS),
    ),
)
