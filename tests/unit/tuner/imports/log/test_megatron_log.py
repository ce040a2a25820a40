"""Logs of Megatron-LM, MindSpeed-LLM and Megatron-DeepSpeed."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.model_spec import plain_model
from costmodels.job.runtime import find_runtime
from hardware.io.errors import ConfigError
from tests.oracles.frameworks.printed_arguments import print_arguments, resolve_arguments
from trials.command.log_pattern import StepSize
from tuner.imports import IMPORTERS, present_of
from tuner.imports.log import import_log

WORLD = 256
DENSE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 128256 "
MODELS = {
    "llama": DENSE + "--ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope",
    "gpt": DENSE + "--max-position-embeddings 2048",
    "old rotary": DENSE + "--use-rotary-position-embeddings --swiglu --disable-bias-linear --add-qkv-bias",
    "moe": DENSE + "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 2048 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --moe-shared-expert-intermediate-size 4096",
    "latent": DENSE + "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --num-experts 64 "
    "--moe-layer-freq ([0]*3+[1]*29) --normalization RMSNorm --swiglu --position-embedding-type rope "
    "--disable-bias-linear --qk-layernorm",
}
"""Flags of a model."""
PIPELINES = (
    "--pipeline-model-parallel-size 1",
    "--pipeline-model-parallel-size 4",
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6",
    "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*6|t*9|t*9|t*8L",
)
CONTEXTS = (
    "",
    "--context-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type a2a",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
)
RECOMPUTES = (
    "",
    "--recompute-activations",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity selective --recompute-modules core_attn mlp",
)
OPTIMIZERS = ("", "--use-distributed-optimizer", "--use-distributed-optimizer --num-distributed-optimizer-instances 2")
PRECISIONS = ("", "--bf16", "--fp16", "--bf16 --fp8-format hybrid")


@st.composite
def launches(draw):
    """Flags of a training on WORLD devices."""
    name = draw(st.sampled_from(sorted(MODELS)))
    tp = draw(st.sampled_from([1, 2, 4]))
    experts = ""
    if "--num-experts" in MODELS[name]:
        experts = draw(st.sampled_from(["", "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 1"]))
    batch = draw(st.sampled_from(["", "--global-batch-size 256"]))
    parts = [MODELS[name], *(draw(st.sampled_from(kinds)) for kinds in (PIPELINES, CONTEXTS, RECOMPUTES, OPTIMIZERS))]
    parts += [draw(st.sampled_from(PRECISIONS)), experts, batch, f"--tensor-model-parallel-size {tp}"]
    parts += ["--sequence-parallel"] if draw(st.booleans()) else []
    return " ".join([*parts, "--seq-length 4096", f"--micro-batch-size {draw(st.sampled_from([1, 2]))}"])


def study_of(imported):
    """Job and current configuration on WORLD devices, the model, and what was left open."""
    model = plain_model(name="model", source="test", **imported.model)
    runtime = find_runtime(imported.runtime)
    present = present_of(imported, devices=WORLD, model=model, runtime=runtime)
    return present.job, present.current, imported.model, imported.runtime, imported.missing


def read(text):
    """What a log of that text says."""
    return import_log(text.splitlines(keepends=True), source="train.log")


@given(launches())
def test_a_log_means_what_its_script_means(flags):
    """The arguments that Megatron-LM prints lead to the model, the job and the configuration of the script's flags."""
    script = f"torchrun --nnodes 32 --nproc_per_node 8 pretrain_gpt.py {shlex.join(flags.split())}"
    log = print_arguments(resolve_arguments(flags.split(), WORLD))

    assert study_of(read(log)) == study_of(IMPORTERS["megatron"](script))


LLAMA = MODELS["llama"] + " --tensor-model-parallel-size 8 --seq-length 4096 --micro-batch-size 1 --bf16"


def printed(**more):
    """The arguments of an 8B model on WORLD devices, with some more."""
    return print_arguments(resolve_arguments(LLAMA.split(), WORLD) | more)


def step_line(iteration, seconds, batch=8):
    """A line of Megatron-LM's training log."""
    return (
        f" [2025-01-01 00:00:00] iteration {iteration:8d}/     100 | consumed samples: {iteration * batch:12d} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | global batch size: {batch:5d} | lm loss: 1.1E+01 |\n"
    )


@pytest.mark.parametrize("prefix", ["", "0: ", " 3: ", "[default7]:", "2025-01-01T00:00:00.123456Z "])
def test_prefixes_of_launchers_do_not_matter(prefix):
    """Ranks and dates before each line change nothing."""
    text = "".join(prefix + line for line in printed().splitlines(keepends=True))

    assert study_of(read(text)) == study_of(read(printed()))


def test_the_world_size_gives_the_replicas():
    """No number of hosts is needed: dp follows from the printed world size."""
    imported = read(printed())

    assert imported.degrees["dp"] == 32
    assert (imported.hosts, imported.open, imported.unread) == (None, {}, ())


@pytest.mark.parametrize(("gathers_again", "stage"), [(True, 3), (False, 2)])
def test_a_log_tells_what_fsdp2_keeps(gathers_again, stage):
    """It is printed whether it shards weights again after the forward pass; FSDP2 settles what else is printed."""
    fsdp2 = {"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": gathers_again}
    imported = read(printed(**fsdp2, use_distributed_optimizer=False, overlap_grad_reduce=False))

    assert imported.job["zero_stage"] == stage
    assert imported.facts["sharding"] == "fsdp2"
    assert not {"overlaps_gradients", "overlaps_weight_gather", "gradient_bytes"} & imported.facts.keys()


def test_the_vocabulary_is_that_of_the_tokenizer():
    """The padded vocabulary's line gives the size if no flag does."""
    text = printed(vocab_size=None) + " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)\n"

    assert read(text).model["vocab_size"] == 50304


def test_steps_are_the_median_without_the_first():
    """Warm-up, repeated steps of other ranks and steps of another batch do not count; memory is the peak."""
    times = [30.0, 5.0, 2.0, 2.2, 2.4]
    text = printed() + "".join(step_line(number, seconds) * 2 for number, seconds in enumerate(times, 1))
    text += step_line(6, 9.0, batch=16)
    text += "[Rank 0] (after 6 iterations) memory (MB) | allocated: 1.0 | reserved: 2.0 | max reserved: 20480.0\n"
    measured = read(text).steps.read(StepSize(samples=8, tokens=8 * 4096, devices=WORLD)).measured

    assert measured.step_time_s == pytest.approx(2.2)
    assert (measured.readings, measured.peak_memory_bytes, measured.source) == (3, 20 * 2**30, "train.log")


def test_the_first_start_with_steps_counts():
    """A start that died before its first step is replaced, and one after the steps is not read."""
    died, ran, later = (printed(micro_batch_size=size) for size in (4, 2, 1))
    imported = read(died + ran + step_line(1, 1.0) + later + step_line(1, 7.0))

    assert imported.degrees["mbs"] == 2
    assert len(imported.steps.lines) == 1


def test_a_log_that_begins_too_late_is_refused():
    """The message names the first step's line and what is needed."""
    with pytest.raises(ConfigError, match=r"line 2 is already that of a step.*from the start of the training"):
        read("\n" + step_line(100, 1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "has no configuration among its first 1 lines"),
        (printed()[:2000], "the printed arguments have no end"),
        (printed(world_size=None), "have no world_size"),
        (printed(tensor_model_parallel_size=3), "must be a multiple of pp"),
        (printed() + "building BERT model ...\n", "builds a BERT model"),
        (printed(lora_target_modules=["linear_qkv"]), "lora_target_modules"),
    ],
    ids=["empty", "foreign", "cut off", "another program", "world size", "bert", "lora"],
)
def test_what_cannot_be_read_is_refused(text, message):
    """Each refusal says what was seen, with its line where there is one."""
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_log_of_a_hybrid_model_has_its_pattern():
    """Sizes and ratios of state spaces that every log prints say nothing; a pattern, or the program's line, does."""
    always = {"mamba_state_dim": 128, "mamba_num_heads": None, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0}
    pattern = "M-*-" * 8

    assert read(printed(**always)).blocks.hybrid is None
    hybrid = read(printed(**always, hybrid_layer_pattern=pattern, hybrid_override_pattern=None)).blocks.hybrid
    assert (hybrid.pattern, hybrid.num_heads) == (pattern, 0)
    assert set(read(printed(**always) + "building Mamba model ...\n").blocks.hybrid.pattern) == {"M"}


def test_a_value_that_is_not_modelled_is_told_with_its_line():
    """A note names the line of the log."""
    text = "head\n" * 10 + printed(rampup_batch_size="['16', '16', '1000']")
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "rampup_batch_size" in each)

    assert [(one.what, one.line) for one in read(text).unread] == [("--rampup-batch-size", line)]


def test_mindspeed_is_recognised_by_its_arguments():
    """MindSpeed's own arguments select its runtime; no-op layers are printed as a set."""
    imported = read(printed(context_parallel_algo="ulysses_cp_algo", noop_layers={30, 31}, first_k_dense_replace=-1))

    assert imported.runtime == "mindspeed"
    assert imported.model["num_layers"] == 30
    assert imported.steps.framework == "mindspeed"


@pytest.mark.parametrize(
    ("more", "recompute"),
    [
        ({"checkpoint_activations": True}, "full"),
        ({"activations_checkpoint_method": "uniform"}, "full"),
        ({"activations_checkpoint_method": None, "activations_checkpoint_granularity": "selective"}, "selective"),
        ({"checkpoint_activations": False}, "none"),
    ],
)
def test_old_names_of_recomputation(more, recompute):
    """Releases from 2020 on print recomputation under other names."""
    text = "".join(line for line in printed(**more).splitlines(keepends=True) if " recompute_" not in line)

    assert read(text).job["recompute"] == recompute


ENGINE = """\
[2024-09-15 00:13:21,398] [INFO] [config.py:999:print] DeepSpeedEngine configuration:
[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print]   gradient_accumulation_steps .. 4
[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print]   train_batch_size ............. 128
[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print]   train_micro_batch_size_per_gpu  4
[2024-09-15 00:13:21,398] [INFO] [config.py:1003:print]   world_size ................... 8
[2024-09-15 00:13:21,398] [INFO] [config.py:989:print_user_config]   json = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 2
    },
    "bf16": {
        "enabled": true
    }
}
"""


def test_megatron_deepspeed_has_zero_from_its_engine():
    """Its arguments give model and degrees, the engine ZeRO; one expert is none; key heads are renamed."""
    more = {
        "deepspeed": True,
        "zero_stage": 1.0,
        "num_experts": [1],
        "num_key_value_heads": 8,
        "global_batch_size": 128,
    }
    text = printed(**more, use_distributed_optimizer=False, ds_sequence_parallel_size=2, normalization="rmsnorm")
    alone, both = read(text), read(text + ENGINE)

    assert (alone.job["zero_stage"], both.job["zero_stage"]) == (1, 2)
    assert (both.runtime, both.degrees["up"], both.degrees["dp"]) == (
        "unknown",
        2,
        16,
    )  # as for a script: its profile has no Ulysses
    assert "num_experts" not in both.model
    assert (both.model["num_kv_heads"], both.model["norm"], both.unread) == (8, "rms", ())


def test_a_long_log_is_read_as_far_as_its_first_thousand_steps():
    """Reading ends with them, whatever follows."""

    def lines():
        yield from printed().splitlines(keepends=True)
        number = 0
        while True:
            number += 1
            assert number < 2000, "reading goes on"
            yield step_line(number, 2.0)

    assert len(import_log(lines(), source="train.log").steps.lines) == 1000


@pytest.mark.parametrize(
    ("more", "attention"),
    [
        ({}, "unfused"),
        ({"transformer_impl": "local", "use_flash_attn": "False"}, "unfused"),
        ({"transformer_impl": "local", "use_flash_attn": "True"}, "flash"),
        ({"transformer_impl": "transformer_engine", "use_flash_attn": "False"}, None),
        ({"transformer_impl": "transformer_engine", "attention_backend": "AttnBackend.unfused"}, "unfused"),
        ({"transformer_impl": "transformer_engine", "attention_backend": "AttnBackend.auto"}, "flash"),
        ({"transformer_impl": "local", "attention_backend": "AttnBackend.auto"}, "unfused"),
    ],
)
def test_its_layers_have_a_flash_kernel_only_where_asked_for(more, attention):
    """Megatron-LM's own attention passes its scores through memory; Transformer Engine chooses for itself."""
    assert read(printed(**more)).facts.get("attention") == attention


@pytest.mark.parametrize(
    ("argument", "default", "other"),
    [
        ("img_h", "224", "448"),
        ("mask_prob", "0.15", "0.2"),
        ("bert_embedder_type", "megatron", "huggingface"),
        ("vision_pretraining_type", "classify", "dino"),
    ],
)
def test_defaults_of_other_models_refuse_nothing(argument, default, other):
    """Every program prints the arguments of models of images and of BERT; only other values are those of one."""
    assert read(printed(**{argument: default})).degrees == read(printed()).degrees
    with pytest.raises(ConfigError, match="Meshtune does not model this"):
        read(printed(**{argument: other}))


def test_the_name_of_a_loss_is_no_step():
    """Megatron-DeepSpeed lists its stages, and `loss: CrossEntropy`, before its engine prints its configuration."""
    imported = read(printed() + "  loss: CrossEntropy\n" + step_line(1, 1.0))

    assert len(imported.steps.lines) == 1
