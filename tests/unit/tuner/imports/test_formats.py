import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import (
    ARRAYS,
    ASCEND,
    CONFIG_JSON,
    DEEPSPEED,
    NANOTRON,
    STRINGS,
    TORCHTITAN,
    TORCHTITAN_FLAGS,
    TORCHTITAN_SCRIPT,
)
from tuner.imports import IMPORTERS
from tuner.imports.without_secrets import without_secrets


def read(framework, text):
    """What a file of that framework says."""
    return IMPORTERS[framework](text)


def whole(imported):
    """The degrees with those of 1 left out."""
    return {name: size for name, size in imported.degrees.items() if size > 1}


def test_a_script_of_arrays():
    """Arrays, defaults, arithmetic and a condition come together to model, job, degrees and devices."""
    imported = read("megatron", ARRAYS)

    assert whole(imported) == {"pp": 2, "tp": 4, "cp": 2, "vpp": 4}
    sizes = {"sequence_length": 8192, "global_batch_size": 256, "precision": "bf16", "optimizer": "adam"}
    assert imported.job == sizes | {"recompute": "none", "zero_stage": 1, "sequence_parallel": True}
    assert (imported.hosts, imported.devices_per_host) == (4, 8)
    assert (imported.open, imported.missing, imported.unread) == ({}, {}, ())
    assert imported.model["vocab_size"] == 128256  # 128256 and the end of a document of the null tokenizer, padded


def test_its_command_is_that_of_a_trial():
    """Hosts become placeholders, the script's flags stay; checkpoints, reports and secrets stay out."""
    command = without_secrets(read("megatron", ARRAYS)).command

    assert command.unknown == ()
    assert command.arguments[0] == "torchrun"
    words = " ".join(command.arguments)
    for kept in ("--tensor-model-parallel-size 4", "--sequence-parallel", "--bf16", "--lr 3e-4", "--log-interval 1"):
        assert kept in words
    for placed in ("--nnodes {num_hosts}", "--nproc_per_node {devices_per_host}", "{master_address}"):
        assert placed in words
    own = {"NCCL_DEBUG": "WARN", "WANDB_API_KEY": "{env:WANDB_API_KEY}"}
    assert own.items() <= dict(command.environment).items()
    assert command.variables == ("WANDB_API_KEY",)
    assert command.not_copied == ()
    assert command.arguments.count("--log-interval") == 1
    reporting = ("--tensorboard-dir", "--wandb-project", "--wandb-exp-name")
    assert command.left_out == ("--save", "--save-interval", *reporting)


@pytest.mark.parametrize(
    ("move", "directory", "moves"),
    [("cd /opt/Megatron-LM", "/opt/Megatron-LM", ""), ("cd ../Megatron-LM", ".", "cd ../Megatron-LM"), ("", ".", "")],
    ids=["absolute", "relative", "none"],
)
def test_a_trial_begins_where_the_script_does(move, directory, moves):
    """The script's last absolute `cd` is the command's directory; another one is told."""
    command = read("megatron", f"cd /tmp\n{move}\n{ARRAYS}" if move else ARRAYS).command

    assert (command.directory, command.moves) == (directory, moves)


def test_a_script_of_strings():
    """Flags in a string, behind `bash -c`, on the hosts that Slurm is asked for."""
    imported = read("megatron", STRINGS)

    assert whole(imported) == {"pp": 4, "tp": 8, "mbs": 2}
    assert (imported.hosts, imported.devices_per_host) == (16, 8)
    assert imported.job["recompute"] == "selective"
    assert imported.job["precision"] == "fp16"
    assert imported.model["ffn_size"] == 4 * 8192
    assert imported.model["learned_positions"] == 4096
    assert imported.model["mlp_bias"] is True
    assert any("$1 on line 16 is given when the script is started" in why for why in imported.command.unknown)


def test_a_script_of_mindspeed():
    """Ulysses, no-op layers, shared experts and leading dense layers are read under MindSpeed's names."""
    imported = read("megatron", ASCEND)

    assert imported.runtime == "mindspeed"
    assert whole(imported) == {"tp": 2, "up": 4, "ep": 8}
    assert {name: imported.model[name] for name in ("num_layers", "num_experts", "num_shared_experts")} == {
        "num_layers": 27,
        "num_experts": 64,
        "num_shared_experts": 2,
    }
    assert imported.model["shared_expert_ffn_size"] == 2 * 1408
    assert imported.model["num_dense_layers"] == 1
    assert [one.line for one in imported.unread] == [1]


def test_the_command_of_mindspeed_is_that_of_a_trial():
    """Its own flags stay too, with the number of layers that no-op layers have changed."""
    command = read("megatron", ASCEND).command

    assert (command.unknown, command.framework) == ((), "mindspeed")
    words = " ".join(command.arguments)
    for kept in ("--num-layers 28", "--noop-layers 27", "--context-parallel-algo", "--use-fused-rmsnorm"):
        assert kept in words


@pytest.mark.parametrize(
    ("flags", "degrees"),
    [
        ("--cp-comm-type p2p", {"cp": 4}),
        ("--cp-comm-type a2a", {"up": 4}),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", {"cp": 2, "up": 2}),
        ("--context-parallel-algo megatron_cp_algo", {"cp": 4}),
        ("--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2", {"cp": 2, "up": 2}),
    ],
)
def test_context_parallelism(flags, degrees):
    """One size is ring attention, Ulysses or both, by the flags beside it."""
    imported = read(
        "megatron", f"--tensor-model-parallel-size 1 --micro-batch-size 1 --context-parallel-size 4 {flags}"
    )

    assert whole(imported) == degrees


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("Et*3|t*5|t*5|t*3L", (3, 5, 5, 3)),
        ("Ettt|(tt|)*5,t|L", (3, 2, 2, 2, 2, 2, 1, 0)),
        ("E|t*8|t*8|L", (0, 8, 8, 0)),
    ],
)
def test_layouts(layout, layers):
    """A layout tells the layers of each virtual stage, and with them vpp."""
    imported = read("megatron", f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout '{layout}'")

    assert imported.layers == layers
    assert imported.degrees["vpp"] == len(layers) // 4


def test_a_degree_that_only_a_run_could_tell_is_open():
    """A degree whose value the script gets from elsewhere is asked for, and never taken as 1."""
    imported = read("megatron", "TP=$1\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 1")

    assert "tp" not in imported.degrees
    assert imported.open["tp"] == (
        "--tensor-model-parallel-size (line 2): $1 on line 1 is given when the script is started"
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--rampup-batch-size 16 16 100", "--rampup-batch-size"),
        (
            "--num-layers 8 --num-experts 4 --hidden-size 64 --num-attention-heads 2 --moe-layer-freq 3",
            "--moe-layer-freq",
        ),
        ("$MORE_ARGS", "$MORE_ARGS"),
    ],
    ids=lambda value: value.split()[0],
)
def test_what_is_not_modelled_is_told(flags, named):
    """Flags that change a step in a way that no key of a study says are told or asked for, with their line."""
    imported = read("megatron", f"torchrun pretrain_gpt.py --tensor-model-parallel-size 2 \\\n {flags}")

    told = [(one.what, one.line) for one in imported.unread]
    assert told + [(one.flag, one.line) for one in imported.doubts] == [(named, 2)]


def test_flags_under_an_unknown_condition_are_asked_for():
    """Flags that a script adds only where a run decides so are open, each with its line, and no others are."""
    imported = read(
        "megatron",
        """\
LAYOUT=(--tensor-model-parallel-size 2 --micro-batch-size 1)
if [ -f /etc/fast ]; then LAYOUT+=(--sequence-parallel); fi
torchrun pretrain_gpt.py ${LAYOUT[@]} --use-distributed-optimizer
""",
    )

    assert "sequence_parallel" not in imported.job
    assert imported.open.keys() == {"sequence_parallel"}
    assert imported.open["sequence_parallel"] == (
        "stands in $LAYOUT, which is set on line 2 under a condition, in a loop or in a function"
    )
    assert [(one.what, one.line) for one in imported.unread] == [("$LAYOUT", 2)]
    assert "flags in it were not read" in imported.unread[0].why


SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 128 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("script", "open_keys"),
    [
        (
            f"torchrun a.py {SIZES} --bf16 $MORE",
            "cp offload pp precision recompute sequence_parallel tp vpp zero_stage",
        ),
        (f'if [ "$1" ]; then MORE="--fp8-format hybrid"; fi\ntorchrun a.py {SIZES} --bf16 $MORE', "precision"),
        (f'MORE=""\n[ "$1" ] && MORE="--zero-stage $Z"\ntorchrun a.py {SIZES} --bf16 $MORE', "zero_stage"),
        (f"if [ $1 ]; then TP=2; else TP=4; fi\ntorchrun a.py {SIZES} --tensor-model-parallel-size $TP", "tp"),
        (f"TP=2\nsource train.env\ntorchrun a.py {SIZES} --tensor-model-parallel-size $TP", "tp"),
        (f"source train.env\ntorchrun a.py {SIZES} --tensor-model-parallel-size ${{TP:-2}}", "tp"),
        (f"TP=2\nread TP\ntorchrun a.py {SIZES} --tensor-model-parallel-size $TP", "tp"),
        (f"TP=2\n((TP *= 2))\ntorchrun a.py {SIZES} --tensor-model-parallel-size $TP", "tp"),
        (f"torchrun a.py {SIZES} --tensor-model-parallel-size $TP", "tp"),
        (
            f"if [ $1 ]; then torchrun a.py {SIZES} --tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer\n"
            f"else torchrun a.py {SIZES} --tensor-model-parallel-size 4 --bf16; fi",
            "tp zero_stage",
        ),
    ],
    ids=[
        *("unknown", "format", "stage", "branches", "source", "default behind source", "read", "arithmetic"),
        *("environment", "two commands"),
    ],
)
def test_what_cannot_be_followed_is_asked_for(script, open_keys):
    """A key is open as soon as its value may depend on what was not read, and then it has no value."""
    imported = read("megatron", script)

    assert " ".join(sorted({*imported.open} - {"global_batch_size"})) == open_keys
    assert not {*imported.open} & {*imported.degrees, *imported.job}


def test_setting_up_a_machine_changes_no_variable():
    """Scripts of environments, such as CANN's set_env.sh, leave what a script has set before them."""
    imported = read(
        "megatron", f"TP=2\nsource /opt/cann/set_env.sh\ntorchrun a.py {SIZES} --tensor-model-parallel-size $TP"
    )

    assert (imported.degrees["tp"], imported.open) == (2, {})


def test_torchtitan_files():
    """Degrees, batch, recomputation and ZeRO stage of a TOML file; what FSDP copies is HSDP."""
    imported = read("torchtitan", TORCHTITAN)

    assert imported.model_name == "llama3-8b"
    assert whole(imported) == {"tp": 4, "mbs": 2}
    assert imported.copies == 2
    assert imported.job["zero_stage"] == 3
    assert imported.job["recompute"] == "full"
    assert imported.micro_batches == 1


def test_torchtitan_flags():
    """The same keys as flags; with a pipeline the micro-batch is one sequence, and weights stay gathered."""
    imported = read("torchtitan", TORCHTITAN_FLAGS)

    assert imported.model_name == "llama3-8b"
    assert whole(imported) == {"pp": 2, "tp": 2}
    assert (imported.hosts, imported.devices_per_host) == (1, 8)
    assert imported.job["zero_stage"] == 2
    assert imported.job["global_batch_size"] == 64


def test_the_command_of_torchtitan_is_that_of_a_trial():
    """Its words stay, the subcommand last; checkpoints and reports are left out, and each step is logged."""
    command = read("torchtitan", TORCHTITAN_SCRIPT).command

    assert (command.unknown, command.framework) == ((), "torchtitan")
    words = command.arguments
    assert words[:2] == ("torchrun", "--nnodes={num_hosts}")
    assert words[words.index("-m") :] == (
        *("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_8b", "--training.steps", "200"),
        *("--compile.enable", "--parallelism.tensor-parallel-degree=4", "--parallelism.no-enable-sequence-parallel"),
        *("--training.seq_len", "4096", "--training.local_batch_size", "2", "--training.global_batch_size", "64"),
        *("--metrics.log_freq", "1", "activation-checkpoint:full"),
    )
    assert command.environment == (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)
    assert command.left_out == ("--checkpoint.enable", "--checkpoint.interval", "--metrics.enable_wandb")


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("--compile.enable", '"$@"', "$@ on line 3 is given when the script is started"),
        ("--compile.enable", "--experimental.pipeline_parallel_degree 1", "flags of torchtitan 0.1 or later"),
        ("--training.seq_len 4096", "--training.num-tokens-per-train-step=262144", "counts batches in tokens"),
        ("torchrun", "srun", "is not torchrun, and neither srun nor mpirun starts it"),
    ],
    ids=["arguments", "an older version", "a later version", "another launcher"],
)
def test_a_command_of_torchtitan_that_is_not_whole(before, after, why):
    """What only a run could tell, or a version whose flags are others, is told."""
    command = read("torchtitan", TORCHTITAN_SCRIPT.replace(before, after)).command

    assert any(why in told for told in command.unknown)


def test_nanotron_files():
    """Model, degrees, batch and precision of a YAML file; it tells dp."""
    imported = read("nanotron", NANOTRON)

    assert whole(imported) == {"pp": 2, "tp": 2, "dp": 4, "mbs": 2}
    assert imported.micro_batches == 8
    assert imported.job["recompute"] == "full"
    assert imported.job["sequence_parallel"] is True
    assert imported.model["num_kv_heads"] == 8
    assert imported.model["tied_embeddings"] is True


def test_deepspeed_files():
    """ZeRO stage, batch and precision of a JSON file, and that the optimizer is offloaded."""
    imported = read("deepspeed", DEEPSPEED)

    assert whole(imported) == {"mbs": 4}
    assert imported.job == {"precision": "bf16", "optimizer": "adam", "zero_stage": 3, "offload": "optimizer"}
    assert imported.micro_batches == 2
    assert imported.unread == ()


@pytest.mark.parametrize(
    ("zero", "offload", "unread"),
    [
        ('"stage": 1, "offload_optimizer": {"device": "none"}', None, []),
        ('"stage": 0, "offload_optimizer": {"device": "cpu"}', None, []),
        ('"stage": 3, "offload_optimizer": {"device": "nvme"}', None, ["zero_optimization.offload_optimizer"]),
        ('"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}', "optimizer", []),
        ('"stage": 3, "offload_param": {"device": "cpu"}', None, ["zero_optimization.offload_param.device"]),
        ('"stage": 3, "zero_hpz_partition_size": 8', None, ["zero_optimization.zero_hpz_partition_size"]),
        ('"stage": 3, "zero_hpz_partition_size": 1, "offload_param": {"device": "none"}', None, []),
    ],
)
def test_what_deepspeed_offloads(zero, offload, unread):
    """States on the host are read; ZeRO 0 offloads nothing, and NVMe and weights are not modelled."""
    imported = read("deepspeed", f'{{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {{{zero}}}}}')

    assert imported.job.get("offload") == offload
    assert [one.what for one in imported.unread] + [one.flag for one in imported.doubts] == unread


@pytest.mark.parametrize(
    ("flags", "offload", "unread"),
    [
        ("--optimizer-cpu-offload", "optimizer", []),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 1.0", "optimizer", []),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "optimizer", []),
        ("--optimizer-offload-fraction 0.5", None, []),
        ("--optimizer-cpu-offload --use-fused-rmsnorm", None, ["--optimizer-cpu-offload"]),
        ("--cpu-offloading", None, ["--cpu-offloading"]),
    ],
)
def test_what_megatron_offloads(flags, offload, unread):
    """States of the optimizer on the host are read; MindSpeed's and activations are not modelled."""
    imported = read("megatron", f"--tensor-model-parallel-size 1 --micro-batch-size 1 {flags}")

    assert imported.job.get("offload") == offload
    assert [one.what for one in imported.unread] + [one.flag for one in imported.doubts] == unread


def test_hugging_face_files():
    """A config.json tells a model and no configuration."""
    imported = read("hugging-face", CONFIG_JSON)

    assert not imported.degrees
    assert imported.model["num_layers"] == 32


@pytest.mark.parametrize("framework", IMPORTERS)
@pytest.mark.parametrize("text", ["", "hello", "{}", "[1]", "{", "a: b", '{"a": 1}', "--x"], ids=repr)
def test_files_of_something_else(framework, text):
    """A file that is none of the framework's is told as a mistake."""
    with pytest.raises(ConfigError):
        read(framework, text)


@pytest.mark.parametrize(("flag", "layout"), [("--sft", "packed"), ("--variable-seq-lengths", "padded")])
def test_flags_of_packed_data_stay_and_are_told(flag, layout):
    """A script of packed or padded sequences keeps its flag, and a note names the key that takes their lengths."""
    imported = read("megatron", ARRAYS.replace("--seq-length", f"{flag} --seq-length"))

    assert flag in imported.command.arguments
    (note,) = [one for one in imported.unread if one.what == flag]
    assert f"job.sequences with layout {layout}" in note.why
