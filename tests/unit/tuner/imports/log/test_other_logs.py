"""Logs of DeepSpeed, nanotron, torchtitan and NeMo; what each prints follows its own print code."""

import json
from dataclasses import dataclass, field
from enum import Enum
from pprint import pformat

import pytest
import yaml

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import DEEPSPEED, NANOTRON, TORCHTITAN
from trials.command.log_pattern import StepSize
from tuner.imports import IMPORTERS
from tuner.imports.log import import_log


def read(text):
    """What a log of that text says."""
    return import_log(text.splitlines(keepends=True), source="train.log")


def seconds(imported, *, samples, sequence_length, devices):
    """The step time that a log states for a job of that size."""
    return imported.steps.read(StepSize(samples=samples, tokens=samples * sequence_length, devices=devices)).measured


def same(found, wanted, *names):
    """Whether two imports agree in some fields."""
    return {name: getattr(found, name) for name in names} == {name: getattr(wanted, name) for name in names}


# DeepSpeed


def engine_lines(config, world_size, batches):
    """What DeepSpeed's engine prints: attributes up to column 29, then the user's configuration."""
    attributes = {
        "activation_checkpointing_config": '{\n    "partition_activations": false, \n    "profile": false\n}',
        "bfloat16_enabled": "True",
        "world_size": world_size,
        **batches,
    }
    place = "[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print] "
    lines = [f"{place}DeepSpeedEngine configuration:"]
    lines += [f"{place}  {name} {'.' * (29 - len(name))} {value}" for name, value in sorted(attributes.items())]
    text = json.dumps(config, sort_keys=True, indent=4, separators=(", ", ": "))
    return "\n".join([*lines, f"{place}  json = {text}", ""])


BATCHES = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
SPEED = (
    "[2024-09-15 00:14:0{0},398] [INFO] [timer.py:197:stop] epoch=0/micro_step={0}/global_step={0}, "
    "RunningAvgSamplesPerSec=31.2, CurrSamplesPerSec=32.0, MemAllocated=10.0GB, MaxMemAllocated=40.0GB\n"
)


def test_deepspeeds_engine_means_what_its_file_means():
    """The engine's configuration is that of the file, with dp from the world size and the batches resolved."""
    config = json.loads(DEEPSPEED)
    found, wanted = read(engine_lines(config, 8, BATCHES)), IMPORTERS["deepspeed"](json.dumps(config | BATCHES))

    assert same(found, wanted, "job", "micro_batches", "unread", "runtime")
    assert found.degrees == {**wanted.degrees, "dp": 8}
    assert (found.model, found.steps.framework) == ({}, "deepspeed")


def test_its_steps_are_read_from_samples_per_second():
    """256 samples at 32 per second take 8 seconds; GB are those of the device."""
    text = engine_lines(json.loads(DEEPSPEED), 8, BATCHES) + "".join(SPEED.format(step) for step in range(1, 6))
    measured = seconds(read(text), samples=256, sequence_length=4096, devices=8)

    assert (measured.step_time_s, measured.readings, measured.peak_memory_bytes) == (8.0, 3, 40 * 2**30)


def test_a_pipeline_that_the_program_builds_is_asked_for():
    """DeepSpeed's configuration does not say the number of stages, so that a pipeline leaves pp open."""
    stage = "[2024-09-15 00:13:20,398] [INFO] [engine.py:158:__init__] RANK=0 STAGE=0 LAYERS=9 [0, 9) STAGE_PARAMS=9\n"

    assert set(read(stage + engine_lines(json.loads(DEEPSPEED), 8, BATCHES)).open) == {"pp"}


def test_two_engines_are_refused():
    """A program with several engines, as RLHF has, is not one job."""
    text = "".join(engine_lines(json.loads(DEEPSPEED), 8, BATCHES | {"train_batch_size": size}) for size in (64, 128))

    with pytest.raises(ConfigError, match="2 different DeepSpeed configurations"):
        read(text)


# nanotron


class TensorParallelLinearMode(Enum):
    """As nanotron's."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2


class OneForwardOneBackwardPipelineEngine:
    """As nanotron's, which has no text of its own."""


def dataclass_of(name, values):
    """An object that `pprint` writes as nanotron's dataclass of that name."""
    fields = {key: _object_of(key, value) for key, value in values.items()}
    annotations = dict.fromkeys(fields, object)
    made = type(name, (), {"__annotations__": annotations, **{key: field(default=None) for key in fields}})
    return dataclass(made)(**fields)


CLASSES = {
    "general": "GeneralArgs",
    "parallelism": "ParallelismArgs",
    "model": "ModelArgs",
    "model_config": "LlamaConfig",
    "tokens": "TokensArgs",
    "optimizer": "OptimizerArgs",
    "optimizer_factory": "AdamWOptimizerArgs",
}


class _Raw:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def _object_of(key, value):
    if isinstance(value, dict):
        return dataclass_of(CLASSES[key], value)
    if key == "pp_engine":
        return OneForwardOneBackwardPipelineEngine()
    if key == "tp_mode":
        return TensorParallelLinearMode[value]
    return _Raw(f"torch.{value}") if key == "dtype" else value


def nanotron_lines(config, prefix="08/31/2024 14:37:22 [INFO|DP=0|PP=0|TP=0|node-1]: "):
    """What nanotron logs when it starts."""
    general = {"project": 'it\'s (a "debug"', "run": "tiny <run> " * 20, "step": None}
    text = "Config:\n" + pformat(dataclass_of("Config", {"general": general, **config}))
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("prefix", ["", "[default0]:", "08/31/2024 14:37:22 [INFO|DP=0|PP=0|TP=0]: "])
def test_nanotrons_config_means_what_its_file_means(prefix):
    """The printed dataclasses are the YAML file, whatever stands before each line."""
    config = yaml.safe_load(NANOTRON)
    config["parallelism"]["tp_mode"] = config["parallelism"].get("tp_mode", "ALL_REDUCE").upper()
    found, wanted = read(nanotron_lines(config, prefix)), IMPORTERS["nanotron"](yaml.safe_dump(config))

    assert same(found, wanted, "job", "model", "degrees", "open", "micro_batches", "unread", "runtime")


def test_its_steps_have_abbreviated_numbers():
    """11.5K milliseconds are 11.5 seconds, and 520M bytes 520 million."""
    line = "iteration: {} / 15 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 109 | "
    line += "global_batch_size: 64 | lm_loss: 5.32 | cuda_max_memory_reserved: 520M | hd_total_memory_tb: 2.13T\n"
    text = nanotron_lines(yaml.safe_load(NANOTRON)) + "".join(line.format(step) for step in range(1, 5))
    measured = seconds(read(text), samples=64, sequence_length=4096, devices=8)

    assert (measured.step_time_s, measured.peak_memory_bytes) == (11.5, 520_000_000)


def test_later_releases_of_nanotron_count_the_batch_in_tokens():
    """After 0.4 a line has `time_per_iteration_ms`, and tokens as its batch, which is that of the job's sequences."""
    line = "iteration: {} / 15 | consumed_tokens: 1K | time_per_iteration_ms: 20.3 | tokens_per_sec: 12.6K | "
    line += "global_batch_size: 256 | grad_norm: 1.64 | lm_loss: 8.35 | lr: 1e-05\n"
    text = nanotron_lines(yaml.safe_load(NANOTRON)) + "".join(line.format(step) for step in range(1, 6))
    measured = seconds(read(text), samples=2, sequence_length=128, devices=8)

    assert (measured.step_time_s, measured.readings) == (pytest.approx(0.0203), 3)


def test_a_config_that_is_cut_off_is_refused():
    """The message names the line on which it begins."""
    with pytest.raises(ConfigError, match=r"line 2: nanotron's configuration is cut off|line 2.*cut off"):
        read(nanotron_lines(yaml.safe_load(NANOTRON))[:1500] + "\n")


# torchtitan

PLACE = "[rank{0}]:[titan] 2025-06-04 08:51:48,074 - root - INFO - "
MESHES = {
    "today": "Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=4, cp=1, tp=4, ep=1",
    "2025": "Building 3-D device mesh with ['dp_replicate', 'dp_shard', 'tp'], [2, 4, 4]",
}
STARTS = {
    "today": "Trainer is initialized with local batch size 2, global batch size 16, gradient accumulation steps 1, "
    "sequence length 8192, total steps 1000 (warmup 200)",
    "2025": "Training starts at step 1, with local batch size 2, global batch size 16, sequence length 8192, total "
    "steps 1000 (warmup 200)",
}
ARGUMENTS = "dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, multiple_of=1024, "
ARGUMENTS += "ffn_dim_multiplier=1.3, norm_eps=1e-05, rope_theta=500000, max_seq_len=8192"


def torchtitan_lines(version, *more, flavor="8B", recompute="full", printed=""):
    """What torchtitan logs on two ranks when it starts."""
    applied = {"today": f"{recompute.title()}AC", "2025": recompute}[version]
    lines = [
        *([printed] if printed else []),
        MESHES[version],
        f"Building llama3 {flavor}" + ("" if version == "today" else f" with TransformerModelArgs({ARGUMENTS})"),
        f"Model llama3 {flavor} size: 8,030,261,248 total parameters",
        *([f"Applied {applied} activation checkpointing to the model"] if recompute else []),
        *more,
        STARTS[version],
    ]
    return "".join(f"{PLACE.format(rank)}{line}\n" for line in lines for rank in (0, 1))


@pytest.mark.parametrize("version", ["today", "2025"])
def test_torchtitans_lines_mean_what_its_file_means(version):
    """Mesh, model, recomputation and batch sizes are those of the TOML file; what is not logged is told."""
    found, wanted = read(torchtitan_lines(version)), IMPORTERS["torchtitan"](TORCHTITAN)

    assert found.job == wanted.job | {"global_batch_size": 16}
    assert found.degrees == {**wanted.degrees, "dp": 8}
    assert same(found, wanted, "copies", "model_name", "runtime", "open")
    assert [one.what for one in found.unread] == ["print_config"]


@pytest.mark.parametrize("version", ["today", "2025"])
def test_with_its_configuration_nothing_is_assumed(version):
    """A printed configuration, JSON or a Python dictionary on one line, says the rest."""
    config = {
        "training": {"local_batch_size": 2, "global_batch_size": -1, "mixed_precision_param": "float32"},
        "parallelism": {"enable_sequence_parallel": False, "data_parallel_shard_degree": -1, "layers": None},
        "metrics": {"log_freq": 10},
    }
    text = {"today": f"Running with configs: {json.dumps(config, indent=2)}", "2025": f"Running with args: {config}"}[
        version
    ]
    imported = read(torchtitan_lines(version, printed=text.replace("\n", "\n[rank0]:") if version == "today" else text))

    assert (imported.job["precision"], imported.job["sequence_parallel"]) == ("fp32", False)
    assert imported.unread == ()


@pytest.mark.parametrize(
    ("more", "recompute", "wanted"),
    [
        ((), "", ("none", "bf16", 1, 2)),
        (("Float8 training active with recipe rowwise",), "selective", ("selective", "fp8", 1, 2)),
    ],
)
def test_what_is_applied_to_the_model_is_read(more, recompute, wanted):
    """Recomputation that is not applied is none, and float8 is logged."""
    imported = read(torchtitan_lines("2025", *more, recompute=recompute))
    found = (imported.job["recompute"], imported.job["precision"], imported.degrees["pp"], imported.degrees["mbs"])

    assert found == wanted


@pytest.mark.parametrize(
    ("more", "compiled"),
    [
        ((), "none"),
        (("Compiling each TransformerBlock with torch.compile",), "layers"),
        (("Compiling the loss function with torch.compile", "Compiling each block with torch.compile"), "layers+loss"),
    ],
)
def test_its_compiler_is_read_off_its_lines(more, compiled):
    """Every version logs what it compiles, so that silence means no compiler."""
    assert read(torchtitan_lines("2025", *more)).facts == {"compiled": compiled}


def test_its_pipeline_schedule_gives_the_micro_batches():
    """8 micro-batches of 16 local sequences have 2 each, and 8 stages on 4 ranks are 2 per rank."""
    text = torchtitan_lines("2025", "Using pipeline schedule Interleaved1F1B with 8 microbatches and 8 stages.")
    text = text.replace("['dp_replicate', 'dp_shard', 'tp'], [2, 4, 4]", "['pp', 'dp_shard'], [4, 8]")
    degrees = read(text.replace("local batch size 2,", "local batch size 16,")).degrees

    assert {name: degrees[name] for name in ("pp", "vpp", "mbs", "dp")} == {"pp": 4, "vpp": 2, "mbs": 2, "dp": 8}


def test_a_llama_outside_the_catalog_is_read_from_its_arguments():
    """Logged sizes of another flavor are a model of its own; the inner size follows torchtitan's formula."""
    model = read(torchtitan_lines("2025", flavor="8B_mine")).model

    assert (model["num_layers"], model["num_kv_heads"], model["ffn_size"]) == (32, 8, 14336)


def test_a_mesh_for_experts_leaves_ep_open():
    """The mesh of 2025 splits dp_shard in two, from which ep does not follow."""
    text = torchtitan_lines("2025").replace(
        "['dp_replicate', 'dp_shard', 'tp']", "['dp_shard_mod_ep', 'dp_shard_in_ep', 'tp']"
    )
    imported = read(text)

    assert set(imported.open) == {"ep"}
    assert (imported.degrees["dp"], "ep" in imported.degrees) == (8, False)


def test_its_steps_are_read_from_tokens_per_second():
    """16 sequences of 8,192 tokens on 32 devices at 2,048 tokens per second and device take 2 seconds."""
    line = (
        "step: {:2}  loss:  8.38540  grad_norm: 2.6  memory: 49.59GiB(35.46%)  tps: 2,048  tflops: 1.0  mfu: 41.46%\n"
    )
    text = torchtitan_lines("2025") + "".join(
        PLACE.format(rank) + line.format(step) for step in range(1, 6) for rank in (0, 1)
    )
    measured = seconds(read(text), samples=16, sequence_length=8192, devices=32)

    assert (measured.step_time_s, measured.readings) == (2.0, 3)
    assert measured.peak_memory_bytes == pytest.approx(49.59 * 2**30)


def test_a_log_without_batch_sizes_is_refused():
    """A log that ends with the mesh has too little."""
    with pytest.raises(ConfigError, match="no line with its batch sizes"):
        read(f"{PLACE.format(0)}{MESHES['today']}\n")


# NeMo

NEMO = {
    "name": "megatron_gpt",
    "trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16"},
    "model": {
        "mcore_gpt": True,
        "micro_batch_size": 1,
        "global_batch_size": 128,
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "encoder_seq_length": 4096,
        "max_position_embeddings": "${.encoder_seq_length}",
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "num_attention_heads": 32,
        "normalization": "rmsnorm",
        "activation": "fast-swiglu",
        "bias": False,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "activations_checkpoint_granularity": "full",
        "activations_checkpoint_method": "uniform",
        "optim": {"name": "distributed_fused_adam", "lr": 1e-4},
    },
}


def nemo_lines(config):
    """What NeMo 1 logs when it starts, on the first rank of an srun."""
    text = yaml.safe_dump(config, sort_keys=False)
    place = "[NeMo I 2024-05-07 13:26:13 megatron_gpt_pretraining:{}] "
    lines = [
        place.format(34),
        "    ",
        "    ************** Experiment configuration ***********",
        place.format(35),
        "    ",
    ]
    lines += [f"    {line}" for line in text.splitlines()]
    lines += ["    ", "[NeMo W 2024-05-07 13:26:14 exp_manager:616] Experiments will be logged at: /results"]
    return "".join(f"0: {line}\n" for line in lines)


def test_nemos_configuration_means_what_megatrons_flags_mean():
    """Its YAML leads to the study of the same flags; the vocabulary of its tokenizer is asked for."""
    flags = (
        "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--ffn-hidden-size 11008 --num-attention-heads 32 --normalization RMSNorm --swiglu --disable-bias-linear "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 4096 --micro-batch-size 1 "
        "--global-batch-size 128 "
        "--bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--recompute-granularity full --recompute-method uniform --use-distributed-optimizer"
    )
    found, wanted = read(nemo_lines(NEMO)), IMPORTERS["megatron"](flags)

    assert same(found, wanted, "job", "degrees", "model", "missing", "open", "hosts", "devices_per_host", "unread")
    assert set(found.missing) == {"vocab_size"}


def test_its_tokenizer_states_the_vocabulary():
    """A line of NeMo's has the tokenizer's size."""
    text = nemo_lines(NEMO) + "Padded vocab_size: 50688, original vocab_size: 50257, dummy tokens: 431.\n"

    assert read(text).model["vocab_size"] == 50304


def test_its_progress_bar_has_the_step_times():
    """Every state of the bar is a line of its own, behind a carriage return."""
    bar = "Epoch 0: :   0%|          | {0}/300 [00:17<237:34, v_num=1, reduced_train_loss=11.00, global_step={0}.000, "
    bar += "consumed_samples=768.0, train_step_timing in s=2.590]\r"
    text = nemo_lines(NEMO) + "".join(bar.format(step) for step in range(5))
    imported = import_log(text.replace("\r", "\n").splitlines(keepends=True), source="train.log")

    assert seconds(imported, samples=128, sequence_length=4096, devices=16).step_time_s == 2.59


def test_finetuning_with_few_weights_is_refused():
    """LoRA is not a training that Meshtune has a model for."""
    config = NEMO | {"model": NEMO["model"] | {"peft": {"peft_scheme": "lora"}}}

    with pytest.raises(ConfigError, match="few of the weights"):
        read(nemo_lines(config))
