import shutil

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import ARRAYS, ASCEND, TORCHTITAN_FLAGS, TORCHTITAN_SCRIPT
from tuner.capture.run_script import capture
from tuner.imports import IMPORTERS
from tuner.imports.captured import import_captured, without_known_secrets

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


TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
"""


def test_torchtitans_file_and_flags(imported, tmp_path):
    """Flags of the command replace values of the file that it names, and nothing is asked for."""
    (tmp_path / "llama3.toml").write_text(TOML, encoding="utf-8")
    found = imported(
        "torchrun --nproc_per_node=8 --nnodes 2 train.py --job.config_file ./llama3.toml --training.seq_len 4096\n"
    )

    assert (found.model_name, found.open) == ("llama3-8b", {})
    assert (found.degrees["tp"], found.degrees["pp"], found.job["sequence_length"]) == (4, 2, 4096)
    assert (found.hosts, found.devices_per_host) == (2, 8)


def test_files_of_gpt_neox(imported, tmp_path):
    """The files that one command of GPT-NeoX names are read together."""
    (tmp_path / "configs").mkdir()
    sizes = "num_layers: 12, hidden_size: 768, num_attention_heads: 12, seq_length: 2048"
    texts = {"model": sizes, "local": "train_micro_batch_size_per_gpu: 4, pipe_parallel_size: 2, num_gpus: 8"}
    for name, text in texts.items():
        (tmp_path / "configs" / f"{name}.yml").write_text(f"{{{text}}}", encoding="utf-8")
    found = imported("python ./deepy.py train.py -d configs model.yml local.yml\n")

    assert (found.framework, found.degrees["pp"], found.degrees["mbs"]) == ("gpt-neox", 2, 4)
    assert (found.model["num_layers"], found.devices_per_host) == (12, 8)


TRAINER = "--model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --max_seq_len 512"


def test_flags_of_a_trainer_fill_in_deepspeeds_file(imported, tmp_path):
    """Values of `auto` in DeepSpeed's configuration are those of the Hugging Face trainer's flags."""
    (tmp_path / "ds.json").write_text(
        '{"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto", '
        '"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}',
        encoding="utf-8",
    )
    found = imported(
        f"torchrun --nproc_per_node 8 run_clm.py {TRAINER} --bf16 True --gradient_accumulation_steps 2 "
        "--gradient_checkpointing --deepspeed ds.json\n"
    )

    assert (found.framework, found.degrees["mbs"], found.micro_batches, found.open) == ("deepspeed", 4, 2, {})
    assert found.job == {
        "precision": "bf16",
        "optimizer": "adam",
        "zero_stage": 3,
        "recompute": "full",
        "sequence_length": 512,
    }
    assert (found.hosts, found.devices_per_host) == (1, 8)
    assert any("Llama-2-7b-hf" in note for note in found.notes)


@pytest.mark.parametrize(
    ("flags", "why"), [("--lora_dim 128", "adapters"), ("--actor_zero_stage 3 --critic_zero_stage 3", "preferences")]
)
def test_a_trainer_of_something_else_is_refused(imported, flags, why):
    """Adapters and preferences are no training of all weights of one model."""
    with pytest.raises(ConfigError, match=why):
        imported(f"deepspeed main.py {TRAINER} {flags} --deepspeed\n")


def test_flags_of_another_trainer_are_not_torchtitans(imported):
    """MindSpeed-LLM's trainer on FSDP2 has a section `training` too, and is not read as torchtitan."""
    with pytest.raises(ConfigError, match="no training command"):
        imported("torchrun train_fsdp2.py --parallel.fsdp_size 16 --training.per_device_train_batch_size 1\n")


def test_an_evaluation_before_the_training_is_passed_over(imported):
    """The first command that can be read counts, so that a script may generate text first."""
    found = imported(
        f"python tools/run_text_generation_server.py {SIZES} {BATCH}\n"
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} {BATCH} --tensor-model-parallel-size 2\n"
    )

    assert found.degrees["tp"] == 2


def test_a_secret_of_the_command_is_hidden_in_all_that_is_told(tmp_path, monkeypatch):
    """A value that one word tells to be a secret is hidden in outputs, names of files and other words as well."""
    monkeypatch.chdir(tmp_path)
    text = "P=hunter2secret\necho connecting with $P\necho x > log-$P\npython serve.py --api-key $P --pw $P\n"
    (tmp_path / "serve.sh").write_text(text, encoding="utf-8")
    captured = capture(["bash", "serve.sh"])
    told = without_known_secrets(captured)

    with pytest.raises(ConfigError) as refused:
        import_captured(captured)

    assert [name.rpartition("/")[2] for name in told.written] == ["log-***"]
    assert told.output.strip() == "connecting with ***"
    assert "hunter2secret" not in str(refused.value)


def test_commands_that_are_held_back_are_shown_where_there_is_no_other(imported):
    """A loop over hosts ends in a message that shows the command which would have reached them."""
    with pytest.raises(ConfigError, match=r"held back 1: ssh host-1 'torchrun pretrain.py'"):
        imported("ssh host-1 'torchrun pretrain.py'\n")


@pytest.mark.parametrize(
    ("tool", "words"),
    [("print('/data/a /data/b')", ("/data/a", "/data/b")), ("raise SystemExit(1)", ("$(python3 tool.py --list)",))],
    ids=["it runs", "it fails"],
)
def test_a_command_keeps_its_wrappers_and_the_output_of_tools(imported, tmp_path, tool, words):
    """Containers and numactl stay before the launcher. A tool's output is never empty: without one, its words stay."""
    (tmp_path / "tool.py").write_text(tool, encoding="utf-8")
    wrappers = "singularity exec --nv /img.sif numactl --membind=0 taskset -c 0-3"
    text = f"#!/bin/bash\nD=$(python3 tool.py --list)\nsrun -l {wrappers} torchrun --nproc_per_node 8 pretrain_gpt.py"

    command = imported(f"{text} {SIZES} {BATCH} --vocab-size 128 --data-path $D | tee log").command

    at = command.arguments.index("--data-path")
    assert command.arguments[: len(wrappers.split()) + 1] == (*wrappers.split(), "torchrun")
    assert command.arguments[at + 1 : at + 1 + len(words)] == words
    assert bool(command.unknown) == (words[0][0] == "$")


@pytest.mark.parametrize(
    ("header", "launch", "tasks"),
    [
        ("#SBATCH --ntasks-per-node=8 --cpus-per-task=7", "srun ./in.sh singularity exec /i.sif python", "per_device"),
        ("#SBATCH --gpus-per-node=8", "mpirun -np 16 --npernode 8 bash -c 'exec \"$@\"' - python", "once"),
        ("#SBATCH --gpus-per-node=8", "srun torchrun --nproc_per_node 8 --nnodes 2", "per_host"),
    ],
)
def test_the_job_of_a_trial_starts_as_many_processes_as_the_script(imported, tmp_path, header, launch, tasks):
    """`srun` starts python once for each device, mpirun reaches the hosts by itself, torchrun runs once on each."""
    (tmp_path / "in.sh").write_text('#!/bin/bash\nexec "$@"\n', encoding="utf-8")
    (tmp_path / "in.sh").chmod(0o755)
    flags = f"{SIZES} {BATCH} --vocab-size 128"

    command = imported(f"#!/bin/bash\n#SBATCH --nodes=2\n{header}\n{launch} pretrain_gpt.py {flags}\n").command

    assert (command.tasks, command.launch) == (tasks, "per_host")
    assert ("--cpus-per-task=7" in command.slurm.sbatch) == (tasks == "per_device")


@pytest.mark.parametrize("words", ["--nproc_per_node $(true) --nnodes 1", "--nnodes 1 --nproc_per_node $(true)"])
def test_a_count_of_devices_that_is_empty_here_is_that_of_the_trial(imported, words):
    """`$(python -c 'import torch; print(torch.cuda.device_count())')` prints nothing on a machine without torch."""
    found = imported(f"torchrun {words} pretrain_gpt.py {SIZES} {BATCH} --tensor-model-parallel-size 1\n")

    given = " ".join(found.command.arguments)
    assert "--nproc_per_node {devices_per_host} " in given
    assert "--nnodes {num_hosts} " in given


def test_no_line_of_the_text_made_here_is_told(imported):
    """The captured command stands in no file of the user, so that a line would be another one."""
    flags = f"{SIZES} {BATCH} --tensor-model-parallel-size 1 --tokenizer-type HuggingFaceTokenizer --optimizer muon"

    found = imported(f"export A=1 B=2\ntorchrun pretrain_gpt.py {flags} --tokenizer-model a/b --my-flag 1\n")

    told = [*found.missing.values(), *found.open.values(), *found.notes, *map(str, (*found.doubts, *found.unread))]
    assert any("--tokenizer-type" in text for text in found.missing.values())
    assert not [text for text in told if "line" in text]


def test_a_word_longer_than_any_file_name_is_captured(imported):
    """Phi 3.5 has a list of 48 factors as the value of a flag."""
    factors = ",".join(f"1.{number:016}" for number in range(48))

    found = imported(
        f"torchrun pretrain_gpt.py {SIZES} {BATCH} --tensor-model-parallel-size 1 --long-factor {factors}\n"
    )

    assert factors in found.command.arguments
