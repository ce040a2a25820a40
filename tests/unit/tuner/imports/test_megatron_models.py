"""Which models, runtimes and training states the flags of Megatron's relatives describe."""

import pytest

from hardware.io.errors import ConfigError
from tuner.imports import IMPORTERS

LAUNCH = (
    "torchrun --nproc-per-node 8 {program} --tensor-model-parallel-size 2 --micro-batch-size 4 --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50257 {flags}"
)


def read(flags, program="pretrain_gpt.py"):
    """What a launch with these flags says."""
    return IMPORTERS["megatron"](LAUNCH.format(program=program, flags=flags))


@pytest.mark.parametrize(
    ("flags", "gated"),
    [
        ("--swiglu", True),
        ("--geglu", True),
        ("--quick-geglu", True),
        ("--gelu-tanh", True),
        ("--glu-activation geglu", True),
        ("--squared-relu", False),
        ("--openai-gelu", False),
        ("", False),
    ],
)
def test_gates(flags, gated):
    """An MLP has three matrices exactly with the activations that multiply by a gate."""
    assert read(flags).model["gated_ffn"] is gated


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--swiglu", 5440),
        ("--swiglu --multiple-of 256", 5632),
        ("--swiglu --multiple-of 4096 --hidden-dim-multiplier 1.3", 8192),
        ("--quick-geglu", 8192),
        ("--swiglu --multiple-of 256 --ffn-hidden-size 6000", 6000),
    ],
)
def test_inner_sizes(flags, size):
    """Without --ffn-hidden-size the inner size is that of the framework's formula."""
    assert read(flags).model["ffn_size"] == size


@pytest.mark.parametrize(
    ("flags", "program", "why"),
    [
        ("--lora-r 16 --lora-alpha 32", "posttrain_gpt.py", "adapters"),
        ("--peft lora", "pretrain_gpt.py", "adapters"),
        ("", "pretrain_t5.py", "T5"),
        ("--decoder-num-layers 12", "main.py", "T5"),
        ("", "pretrain_bert.py", "BERT"),
        ("--bert-no-binary-head", "main.py", "BERT"),
        ("", "pretrain_vision_classify.py", "images"),
        ("", "pretrain_vlm.py", "images and text"),
        ("--img-h 448 --img-w 448", "train.py", "images and text"),
        ("", "train_rwkv.py", "state-space"),
        ("", "run_text_generation_server.py", "generates text"),
        ("--task MSDP-EVAL-F1", "main.py", "evaluates"),
        ("--retro-add-retriever", "main.py", "RETRO"),
        ("--ssm-state-size 128", "train.py", "state-space"),
        ("--experimental-attention-variant kimi_delta_attention", "pretrain_gpt.py", "linear attention"),
        ("--stage dpo", "posttrain_gpt.py", "preferences"),
        ("--num-experts 64 32", "pretrain_gpt.py", "unlike numbers"),
        ("", "pretrain_vlm.py", "multimodal"),
        ("--language-model-type=mistral_7b --decoder-seq-length 1024", "train.py", "multimodal"),
        ("--model-provider mock --dataset-provider mock", "train.py", "multimodal"),
        ("", "run_text_generation_server.py", "trains nothing"),
        ("--task MSDP-EVAL-F1", "main.py", "trains nothing"),
    ],
)
def test_other_models_are_refused(flags, program, why):
    """A program that trains something else than a whole decoder is refused with its kind, and never read as a GPT."""
    with pytest.raises(ConfigError, match=why):
        read(flags, program)


def test_other_variants_of_attention_and_stages_of_training_are_read():
    """Latent attention and supervised fine-tuning of all weights are decoders' training."""
    assert read("--stage sft --experimental-attention-variant dsa").model["num_layers"] == 24


def test_a_decoders_sequence_is_that_of_the_model():
    """--decoder-seq-length counts before --seq-length."""
    assert read("--decoder-seq-length 1024").job["sequence_length"] == 1024


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ("--num-experts $N", {"--num-experts"}),
        ("--ffn-hidden-size $F", {"--ffn-hidden-size"}),
        ("--vocab-size $V", {"vocab_size"}),
    ],
)
def test_a_size_that_cannot_be_read_is_asked_for(script, asked):
    """A size with an unknown value is no default: the model is asked for."""
    missing = read(script).missing

    assert asked <= {*missing}


def test_an_unknown_number_of_experts_is_no_dense_model():
    """The expert parallel degree is read as it stands, or asked for."""
    assert read("--num-experts $N --expert-model-parallel-size 4").degrees["ep"] == 4
    assert "ep" in read("--num-experts $N --expert-model-parallel-size $EP").open


def test_sizes_under_a_condition_are_asked_for():
    """Flags of the model that a script adds only sometimes leave the model open."""
    head = 'if [ "$1" ]; then GQA="--group-query-attention --num-query-groups 2"; fi\n'

    missing = IMPORTERS["megatron"](head + LAUNCH.format(program="pretrain_gpt.py", flags="$GQA")).missing

    assert missing["--group-query-attention"] == (
        "--group-query-attention stands in $GQA, which is set on line 1 under a condition, in a loop or in a function"
    )


def test_no_op_layers_make_chunks_shorter():
    """Chunks are counted with the no-op layers of MindSpeed, and each has so many layers less as lie in it."""
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3"
    imported = read(f"--use-fused-rmsnorm --noop-layers 11 {flags}")

    assert (imported.degrees["vpp"], imported.layers) == (4, (3, 3, 3, 2, 3, 3, 3, 3))
    assert imported.model["num_layers"] == 23


def test_names_of_the_first_version():
    """DeepSpeed's fork of Megatron-LM 1 has a pipeline by another name, and states micro-batches instead of a batch."""
    imported = read("--pipe-parallel-size 2 --gas 16")

    assert (imported.degrees["pp"], imported.micro_batches) == (2, 16)


@pytest.mark.parametrize(
    "flags", ["--use-torch-fsdp2", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads"]
)
def test_sharded_gradients_have_a_profile_that_knows_them(flags):
    """FSDP in Megatron-LM runs its kernels, so that the profile is its own; a note says what it was not fitted to."""
    imported = read(flags)

    assert imported.runtime == "megatron-core"
    assert any("without FSDP" in note for note in imported.notes)


def test_one_expert_is_a_dense_model():
    """--num-experts 1, Megatron-DeepSpeed's default, has no experts and no ep."""
    imported = read("--num-experts 1 --expert-model-parallel-size 1")

    assert "num_experts" not in imported.model
    assert imported.degrees["ep"] == 1


def test_no_dense_layer_is_minus_one():
    """MindSpeed's -1 means that every layer has experts."""
    imported = read("--num-experts 8 --first-k-dense-replace -1 --moe-layer-freq -1")

    assert (imported.model["num_dense_layers"], imported.model["moe_layer_period"]) == (0, 1)
    assert imported.unread == ()


def test_experts_of_deepspeed():
    """DeepSpeed's experts stand in every second layer, take one token each, and are whole on each tensor rank."""
    flags = "--deepspeed --zero-stage 1 --num-experts 64 --moe-expert-parallel-size 8"
    imported = read(flags)

    assert imported.degrees["ep"] == 8
    sizes = {name: imported.model[name] for name in ("num_experts", "top_k", "moe_layer_period", "num_shared_experts")}
    assert sizes == {"num_experts": 64, "top_k": 1, "moe_layer_period": 2, "num_shared_experts": 0}
    assert imported.job["expert_tp"] == 1
    assert read(f"{flags} --topk 2 --expert-interval 1 --mlp-type residual").model["num_shared_experts"] == 1


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ("--recompute-activations", "selective"),
        ("--recompute-granularity full --recompute-method uniform", "full"),
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --deepspeed-activation-checkpointing", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--activations-checkpoint-granularity selective", "selective"),
        ("", "none"),
    ],
)
def test_recomputation_of_all_versions(flags, recompute):
    """What Megatron-LM recomputes is read under the names of all its versions."""
    imported = read(flags)

    assert imported.job["recompute"] == recompute
    assert imported.unread == ()


def test_deepspeeds_own_flag_recomputes_nothing():
    """--deepspeed-activation-checkpointing alone is told as a flag that recomputes nothing."""
    imported = read("--deepspeed-activation-checkpointing --deepspeed --zero-stage 1")

    assert imported.job["recompute"] == "none"
    assert [one.what for one in imported.unread] == ["--deepspeed-activation-checkpointing"]


@pytest.mark.parametrize(
    ("flags", "runtime"),
    [
        ("", "megatron-core"),
        ("--use-distributed-optimizer", "megatron-core"),
        ("--deepspeed --zero-stage 1", "megatron-deepspeed"),
        ("--no-pipeline-parallel --zero-stage 0", "megatron-deepspeed"),
        ("--deepspeed --zero-stage 3", "gpt-neox"),
        ("--deepspeed --zero-stage 1 --ds-sequence-parallel-size 2", "unknown"),
        ("--deepspeed --zero-stage 1 --sequence-parallel", "unknown"),
        ("--use-fused-rmsnorm", "mindspeed"),
        ("--use-ascend-mc2", "mindspeed"),
        ("--checkpoint-activations --DDP-impl local", "megatron-lm-2021"),
        ("--activations-checkpoint-granularity selective --activations-checkpoint-method uniform", "megatron-lm-2022"),
        ("--DDP-impl local --use-distributed-optimizer", "unknown"),
    ],
)
def test_runtimes(flags, runtime):
    """The runtime is that of the script's own framework, or one that offers what the script uses, or unknown."""
    assert read(flags).runtime == runtime


def test_zero_stages():
    """The stage is --zero-stage, or stands in the configuration that the script writes, or is asked for."""
    assert read("--deepspeed --zero-stage 2").job["zero_stage"] == 2
    written = '\ncat <<EOT > ds.json\n{"zero_optimization": {"stage": 3}}\nEOT'
    assert (
        IMPORTERS["megatron"](LAUNCH.format(program="pretrain_gpt.py", flags="--deepspeed") + written).job["zero_stage"]
        == 3
    )
    asked = read("--deepspeed --deepspeed_config ds.json")
    assert "zero_stage" not in asked.job
    assert "configuration file" in asked.open["zero_stage"]


def test_ulysses_of_deepspeed():
    """--ds-sequence-parallel-size is the degree of Ulysses."""
    degrees = read("--deepspeed --zero-stage 1 --ds-sequence-parallel-size 4").degrees

    assert (degrees["cp"], degrees["up"]) == (1, 4)


def test_names_with_underscores():
    """Flags are read with underscores in place of dashes too, and stay as they are spelled."""
    imported = IMPORTERS["megatron"](
        "torchrun pretrain_gpt.py --tensor_model_parallel_size 2 --num_layers=24 --micro_batch_size 4 --hidden_size 64"
    )

    assert (imported.degrees["tp"], imported.degrees["mbs"], imported.model["num_layers"]) == (2, 4, 24)
    assert "--tensor_model_parallel_size" in imported.command.arguments


def test_the_command_of_other_versions_is_not_whole():
    """A program of DeepSpeed or of an old Megatron-LM does not take the flags of a trial, and a reason tells so."""
    command = read("--deepspeed --zero-stage 1").command

    assert any("today's Megatron-LM" in why for why in command.unknown)
    assert read("--use-torch-fsdp2").command.unknown == ()
    assert any("today's Megatron-LM" in why for why in read("--use-torch-fsdp2 --gelu-tanh").command.unknown)


def test_hosts_of_deepspeeds_launcher():
    """--num_nodes and --num_gpus of DeepSpeed's launcher are hosts and devices."""
    imported = IMPORTERS["megatron"]("deepspeed --num_nodes 4 --num_gpus 8 train.py --num-layers 2 --zero-stage 1")

    assert (imported.hosts, imported.devices_per_host) == (4, 8)


def test_learned_positions_of_other_forks():
    """BigScience's fork has another name for the rows of the position table, and for its kind."""
    flags = "--position-embedding-type absolute --max-absolute-position-embeddings 2048"

    assert read(flags).model["learned_positions"] == 2048
    assert read("--position-embedding-type alibi").model["learned_positions"] == 0


def test_key_value_heads_of_other_forks():
    """Megatron-DeepSpeed and BigCode's fork name key-value heads in ways of their own."""
    assert read("--num-key-value-heads 4").model["num_kv_heads"] == 4
    assert read("--attention-head-type multiquery").model["num_kv_heads"] == 1
    assert read("--normalization rmsnorm").model["norm"] == "rms"


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--vocab-file data/gpt2-vocab.json", 50304),
        ("--vocab-file data/gpt2-vocab.json --extra-vocab-size 3", None),
        ("--vocab-file data/vocab.json", None),
        ("--vocab-size 131072 --tokenizer-type NullTokenizer", 131200),
    ],
)
def test_sizes_of_vocabularies(flags, size):
    """GPT-2's own file states its vocabulary, and the tokenizer of mock data adds one entry before the padding."""
    text = f"pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --micro-batch-size 4 {flags}"

    assert IMPORTERS["megatron"](text).model.get("vocab_size") == size


def test_flags_of_further_forks():
    """Names that only forks have are read, asked about, or refused, and never passed over."""
    assert read("--RMSNorm").model["norm"] == "rms"
    assert read("--rope-style llama").model["learned_positions"] == 0
    assert "Megatron-LLaMA" in read("--overlapped-distributed-optimizer").open["zero_stage"]
    for flags, why in (("--bridge-hf-model org/model", "Hugging Face"), ("--vision-tower clip", "multimodal")):
        with pytest.raises(ConfigError, match=why):
            read(flags)


@pytest.mark.parametrize(("layers", "vpp"), [(12, 2), (5, None), (3, None)])
def test_chunks_that_are_no_whole_number_are_asked_for(layers, vpp):
    """Virtual stages are read where the layers make a whole number of chunks, and asked for elsewhere."""
    imported = read(f"--num-layers {layers} --pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2")

    assert imported.degrees.get("vpp") == vpp
    assert ("vpp" in imported.open) == (vpp is None)
