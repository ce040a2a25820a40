"""Logs of GPT-NeoX and Megatron-Bridge; what each prints follows its own print code."""

import pytest
import yaml

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import GPT_NEOX
from trials.command.log_pattern import StepSize
from tuner.imports import IMPORTERS
from tuner.imports.log import import_log


def read(text):
    """What a log of that text says."""
    return import_log(text.splitlines(keepends=True), source="train.log")


def seconds(imported, *, samples):
    """The step time that a log states for a job of that global batch."""
    return imported.steps.read(StepSize(samples=samples, tokens=samples * 2048, devices=96)).measured.step_time_s


def same(found, wanted, *names):
    """Whether two imports agree in some fields."""
    return {name: getattr(found, name) for name in names} == {name: getattr(wanted, name) for name in names}


# GPT-NeoX

DEVICES = 96


def neox_lines(arguments, *, end="---------------- end of arguments ----------------"):
    """What `NeoXArgs.print` writes: dots before the value and up to column 64, then what is no default."""
    lines = ["NeoXArgs.from_ymls() ['configs/20B.yml']", "-------------------- arguments --------------------"]
    for name, value in arguments.items():
        text = f"  {name} {'.' * (32 - len(name))} {value}"
        lines.append(f"{text}{'.' * (64 - len(text))}{'default' if value is None else 'updated'}")
    return "\n".join([*lines, end]) + "\n"


def neox_arguments():
    """The file as `calculate_derived` leaves it: the batch resolved, with the texts of all files beside it."""
    file = {name.replace("-", "_"): value for name, value in yaml.safe_load(GPT_NEOX).items()}
    stages = max(1, file["pipe_parallel_size"])
    replicas = DEVICES // (stages * file["model_parallel_size"])
    batch = file["train_micro_batch_size_per_gpu"] * file.get("gradient_accumulation_steps", 1) * replicas
    return file | {
        "attention_config": ["flash"] * file["num_layers"],
        "config_files": {"20B.yml": GPT_NEOX},
        "global_num_gpus": DEVICES,
        "hostfile": None,
        "is_pipe_parallel": True,
        "train_batch_size": batch,
        "zero_stage": file["zero_optimization"]["stage"],
    }


def test_gpt_neox_s_arguments_mean_what_its_file_means():
    """The merged arguments lead to the study of the file, with the devices and the batch that follow from them."""
    arguments = neox_arguments()
    found, wanted = read(neox_lines(arguments)), IMPORTERS["gpt-neox"](GPT_NEOX)
    stages = max(1, arguments["pipe_parallel_size"])

    assert same(found, wanted, "model", "runtime", "missing", "open", "unread")
    assert found.degrees == {**wanted.degrees, "dp": DEVICES // (stages * arguments["model_parallel_size"])}
    assert found.job == {**wanted.job, "global_batch_size": arguments["train_batch_size"]}


def test_gpt_neox_s_tokenizer_states_the_padded_vocabulary():
    """The line after the padding has the rows of the embedding table, whatever the file says."""
    line = " > padded vocab (size: 50277) with 155 dummy tokens (new size: 50432)\n"

    assert read(neox_lines(neox_arguments()) + line).model["vocab_size"] == 50432


def test_gpt_neox_s_steps_are_read_beside_its_engine_s():
    """Its own lines count; the engine's configuration below the arguments changes nothing."""
    head = "[2024-05-07 13:26:13,552] [INFO] [config.py:997:print]"
    engine = f'{head} DeepSpeedEngine configuration:\n{head}   json = {{\n    "train_micro_batch_size_per_gpu": 7\n}}\n'
    step = (
        " samples/sec: 51.171 | iteration {:8d}/  150000 | elapsed time per iteration (ms): {:.1f} | lm_loss: 1.1 |\n"
    )
    text = neox_lines(neox_arguments()) + engine + "".join(step.format(at, 30000 + at) for at in (10, 20, 30, 40, 50))

    assert seconds(read(text), samples=neox_arguments()["train_batch_size"]) == 30.04


@pytest.mark.parametrize(
    ("left_out", "end"), [("global_num_gpus", "---------------- end of arguments ----------------"), ("", "Killed")]
)
def test_gpt_neox_s_arguments_without_an_end_or_devices_are_refused(left_out, end):
    """A part of the block is no configuration."""
    arguments = {name: value for name, value in neox_arguments().items() if name != left_out}

    with pytest.raises(ConfigError, match="GPT-NeoX's arguments are cut off"):
        read(neox_lines(arguments, end=end))


# Megatron-Bridge

LAYERS = {
    "_target_": "megatron.core.transformer.transformer_config.TransformerConfig",
    "add_bias_linear": False,
    "attention_backend": {"_args_": [5], "_call_": True, "_target_": "megatron.core.transformer.enums.AttnBackend"},
    "bf16": True,
    "context_parallel_size": 2,
    "cp_comm_type": None,
    "expert_model_parallel_size": 4,
    "ffn_hidden_size": 14336,
    "gated_linear_unit": True,
    "hidden_size": 4096,
    "kv_channels": 128,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "normalization": "RMSNorm",
    "num_attention_heads": 32,
    "num_layers": 32,
    "num_moe_experts": 8,
    "num_query_groups": 8,
    "pipeline_model_parallel_layout": None,
    "pipeline_model_parallel_size": 2,
    "q_lora_rank": 512,
    "qk_layernorm": False,
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn"],
    "sequence_parallel": True,
    "tensor_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 4,
}
OF_MODEL = {
    "make_vocab_size_divisible_by": 128,
    "position_embedding_type": "rope",
    "seq_length": 4096,
    "share_embeddings_and_output_weights": False,
    "vocab_size": 32000,
}
BRIDGE = {
    "_target_": "megatron.bridge.training.config.ConfigContainer",
    "ddp": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 1},
    "mixed_precision": "bf16_with_fp8_current_scaling_mixed",
    "model": {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **OF_MODEL, **LAYERS},
    "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True},
    "peft": None,
    "train": {"global_batch_size": 256, "micro_batch_size": 1},
}
FLAGS = (
    "pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --vocab-size 32000 "
    "--seq-length 4096 --num-experts 8 --moe-router-topk 2 --micro-batch-size 1 --global-batch-size 256 --bf16 "
    "--fp8-format hybrid --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 4 --context-parallel-size 2 --expert-model-parallel-size 4 "
    "--sequence-parallel --recompute-granularity selective --recompute-modules core_attn --use-distributed-optimizer"
)


def bridge_lines(config):
    """What `print_yaml` writes: sorted YAML, with an empty line below it."""
    return yaml.safe_dump(config, default_flow_style=False) + "\n"


@pytest.mark.parametrize("nested", [False, True], ids=["0.6", "GPTModelConfig"])
def test_bridges_configuration_means_what_megatrons_flags_mean(nested):
    """Its YAML leads to the study of the same flags, whether layers have a configuration of their own or not."""
    model = {"_target_": "megatron.training.models.gpt.GPTModelConfig", **OF_MODEL, "transformer": LAYERS}
    config = BRIDGE | {"model": model} if nested else BRIDGE
    found, wanted = read("INFO:__main__:Loaded\n" + bridge_lines(config)), IMPORTERS["megatron"](FLAGS)

    assert same(found, wanted, "job", "degrees", "model", "missing", "open", "hosts", "devices_per_host", "unread")


def test_bridges_configuration_says_facts():
    """Fields of all its sections, with types and members of enumerations as mappings, say what the run does."""
    bf16 = {"_target_": "torch.bfloat16", "_call_": False}
    model = BRIDGE["model"] | {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": [
            {"_target_": "megatron.core.CudaGraphModule", "_call_": True, "_args_": [at], "_name_": name}
            for at, name in enumerate(("attn", "moe_router", "moe_preprocess"))
        ],
        "gradient_accumulation_fusion": False,
    }
    changed = {
        "model": model,
        "ddp": BRIDGE["ddp"] | {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True},
        "optimizer": BRIDGE["optimizer"] | {"exp_avg_dtype": bf16, "optimizer_offload_fraction": 0.5},
        "comm_overlap": {"overlap_moe_expert_parallel_comm": True},
        "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False},
    }
    facts = read(bridge_lines(BRIDGE | changed)).facts

    expected = {
        "dispatcher": "hybridep",
        "overlaps_experts": True,
        "captured_graph": "attention+router",
        "fused_accumulation": False,
        "overlaps_gradients": True,
        "overlaps_weight_gather": False,
        "gradient_bytes": 2,
        "first_moment_bytes": 2,
        "second_moment_bytes": 4,
        "offload_share": 0.5,
    }
    assert {name: facts.get(name) for name in expected} == expected


def test_bridges_last_configuration_counts():
    """A script prints its recipe, and again what the command line made of it."""
    changed = BRIDGE | {"train": {"global_batch_size": 512, "micro_batch_size": 2}}
    found = read(bridge_lines(BRIDGE) + bridge_lines(changed))

    assert (found.job["global_batch_size"], found.degrees["mbs"]) == (512, 2)


@pytest.mark.parametrize(
    ("stated", "precision"),
    [
        ("bf16_mixed", "bf16"),
        ("fp16_mixed", "fp16"),
        ({"bf16": True, "fp8": None}, "bf16"),
        ({"bf16": True, "fp8": "e4m3"}, "fp8"),
        ("bf16_with_nvfp4_mixed", "nvfp4"),
        (None, "bf16"),
    ],
)
def test_bridges_precision_is_a_name_or_fields_or_the_models(stated, precision):
    """Mixed precision goes before the model's own number format."""
    assert read(bridge_lines(BRIDGE | {"mixed_precision": stated})).job["precision"] == precision


def test_bridges_steps_are_those_of_megatron():
    """Its lines have the time of a step, and the global batch that the configuration states."""
    line = " [2026-10-01 10:00:00] iteration {:8d}/      50 | consumed samples:          256 | elapsed time per "
    line += (
        "iteration (ms): {:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | global batch size:   256 | lm loss: 1 |\n"
    )
    text = bridge_lines(BRIDGE) + "".join(line.format(step, 2000 + step) for step in range(1, 6))

    assert seconds(read(text), samples=256) == 2.004


def test_finetuning_of_few_weights_is_refused():
    """LoRA trains few of the weights, which Meshtune has no model for."""
    with pytest.raises(ConfigError, match="few of the weights"):
        read(bridge_lines(BRIDGE | {"peft": {"_target_": "megatron.bridge.peft.lora.LoRA"}}))


def test_a_configuration_of_bridge_that_is_cut_off_is_refused():
    """Without the empty line below it, the end may be missing."""
    with pytest.raises(ConfigError, match="Megatron-Bridge's configuration is cut off"):
        read(bridge_lines(BRIDGE).rstrip("\n") + "\n")
