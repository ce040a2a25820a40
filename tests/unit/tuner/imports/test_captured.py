import shutil

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import ARRAYS, ASCEND, TORCHTITAN_FLAGS, TORCHTITAN_SCRIPT
from tuner.capture.run_script import capture
from tuner.imports import IMPORTERS
from tuner.imports.captured import import_captured

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to run scripts with")

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --max-position-embeddings 128"
BATCH = "--micro-batch-size 1 --global-batch-size 64"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Captures a script of that text and imports it."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        (tmp_path / "train.sh").write_text(text, encoding="utf-8")
        return import_captured(capture(["bash", "train.sh", *arguments]))

    return run


@pytest.mark.parametrize(
    ("framework", "text"),
    [("megatron", ARRAYS), ("megatron", ASCEND), ("torchtitan", TORCHTITAN_FLAGS), ("torchtitan", TORCHTITAN_SCRIPT)],
    ids=["arrays", "ascend", "torchtitan flags", "torchtitan script"],
)
def test_a_capture_agrees_with_the_reader(imported, framework, text):
    """Of a script that can be read, the captured command means the same model, job, degrees and devices."""
    by_capture, by_reader = imported(text), IMPORTERS[framework](text)

    for name in ("model", "model_name", "job", "degrees", "open", "micro_batches", "devices_per_host", "runtime"):
        assert getattr(by_capture, name) == getattr(by_reader, name), name
    assert by_capture.hosts == (by_reader.hosts or 1)
    assert [one.what for one in by_capture.unread] == [
        one.what for one in by_reader.unread if not one.what.startswith("source ")
    ]


# the form of two thirds of bigscience's scripts
BATCH_SCRIPT = f"""\
#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1          # one task for each host
#SBATCH --gres=gpu:4
set -x -e
source $WORK/start-env
cd $WORK/Megatron-DeepSpeed
TP_SIZE=4
PP_SIZE=8
ZERO_STAGE=1
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{{"train_micro_batch_size_per_gpu": 1, "train_batch_size": 64,
  "zero_optimization": {{"stage": $ZERO_STAGE, "offload_optimizer": {{"device": "cpu"}}}}, "bf16": {{"enabled": true}}}}
EOT
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes $SLURM_NNODES \\
    --master_addr $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
export CMD="`pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size $PP_SIZE \\
    {SIZES} {BATCH} --checkpoint-activations --deepspeed --deepspeed_config $config_json --zero-stage $ZERO_STAGE \\
    --deepspeed-activation-checkpointing"
srun --jobid $SLURM_JOBID bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee main_log.txt
"""


def test_a_batch_script_is_captured_whole(imported):
    """The command in the single quotes of `bash -c` is read with all its degrees, and so are Slurm's header and the
    configuration of DeepSpeed that the script writes.
    """
    found = imported(BATCH_SCRIPT)

    assert (found.degrees["tp"], found.degrees["pp"], found.hosts, found.devices_per_host) == (4, 8, 16, 4)
    assert {name: found.job[name] for name in ("precision", "zero_stage", "recompute", "global_batch_size")} == {
        "precision": "bf16",
        "zero_stage": 1,
        "recompute": "full",
        "global_batch_size": 64,
    }
    assert (found.runtime, found.open) == ("megatron-deepspeed", {})
    assert found.job["offload"] == "optimizer"


def test_the_reader_sees_the_same_degrees():
    """Reading that script gives its degrees too, and the ZeRO stage that it writes for DeepSpeed."""
    found = IMPORTERS["megatron"](BATCH_SCRIPT)

    assert (found.degrees["tp"], found.degrees["pp"], found.job["recompute"]) == (4, 8, "full")
    assert (found.job["zero_stage"], found.open) == (1, {})


@pytest.mark.parametrize(
    ("launch", "hosts", "devices"),
    [
        ("mpirun -np 16 -N 8 python", 2, 8),
        ("srun -N 4 --ntasks-per-node 8 python", 4, 8),
        ("srun -N 4 --ntasks-per-node 1 --gpus-per-node 8 torchrun --nnodes 4 --nproc-per-node 8", 4, 8),
        ("deepspeed --num_nodes 2 --num_gpus 4", 2, 4),
        ("torchrun --nproc-per-node 8", 1, 8),
        ("python", None, None),
    ],
    ids=lambda value: str(value).split()[0],
)
def test_launchers_give_hosts_and_devices(imported, launch, hosts, devices):
    """The launcher's own options tell the hosts and the devices of each; where none does, nothing is assumed."""
    found = imported(f"{launch} pretrain_gpt.py {SIZES} {BATCH} --bf16\n")

    assert (found.hosts, found.devices_per_host) == (hosts, devices)


def test_the_first_of_several_commands_is_read(imported):
    """Of several trainings the first one counts, and a note says so."""
    found = imported(
        f"for tp in 2 4; do torchrun pretrain_gpt.py {SIZES} {BATCH} --tensor-model-parallel-size $tp; done"
    )

    assert found.degrees["tp"] == 2
    assert any("2 training commands were captured" in note for note in found.notes)


def test_arguments_are_those_of_the_script(imported):
    """Words behind the script are its arguments, so that nothing is left to ask."""
    found = imported(
        f'torchrun pretrain_gpt.py {SIZES} {BATCH} --tensor-model-parallel-size $1 "${{@:2}}"\n', "8", "--fp16"
    )

    assert (found.degrees["tp"], found.job["precision"], found.open) == (8, "fp16", {})


def test_a_script_without_a_training_is_refused(imported):
    """The message says what was captured, how the script ended and what it printed last."""
    with pytest.raises(ConfigError) as refused:
        imported("python tools/preprocess.py --input x\necho 'Please set WORKSPACE'\nexit 3\n")

    for words in ("status 3", "python tools/preprocess.py --input x", "Please set WORKSPACE", "--from-log"):
        assert words in str(refused.value)


def test_a_wrong_value_is_named_without_a_line(imported):
    """A captured flag has no line in the user's script, so that a question names only the flag and its value."""
    found = imported(f"torchrun pretrain_gpt.py {SIZES} --micro-batch-size two\n")

    assert found.open["mbs"].startswith("--micro-batch-size: 'two' must be a whole number")
