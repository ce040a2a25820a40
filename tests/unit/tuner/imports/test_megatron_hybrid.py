"""Hybrid models of Megatron-LM: patterns become the same rows of blocks as a config.json of the same model."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.listed_model import listed_model
from costmodels.job.model_spec import plain_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.settings.random_settings import grid_of
from tuner.export.hybrid_pattern import has_pattern, pattern_of
from tuner.imports import IMPORTERS
from tuner.imports.bash.texts import Argument
from tuner.imports.flags import flags_among
from tuner.imports.megatron import import_flags
from tuner.imports.settings.bridge_container import import_container
from tuner.study_file.text import model_text

PUBLISHED = Path(__file__).parents[4] / "configs" / "measured" / "kinds" / "models"
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
COMMON = (
    "--squared-relu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type none --group-query-attention --tensor-model-parallel-size 2 --sequence-parallel "
    "--micro-batch-size 1 --global-batch-size 64 --seq-length 8192 --vocab-size 131072 --bf16 "
    "--use-distributed-optimizer --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
)

# Megatron-Bridge, src/megatron/bridge/models/nemotronh (sizes of Nemotron-H 8B and the Nemotron 3 models)
EIGHT = (
    "--hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --kv-channels 128 --ffn-hidden-size 21504 "
    "--mamba-num-heads 128 --mamba-state-dim 128 --hybrid-layer-pattern "
    "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- "
)
THIRTY = (
    "--hidden-size 2688 --num-attention-heads 32 --num-query-groups 2 --kv-channels 128 --ffn-hidden-size 1856 "
    "--mamba-num-heads 64 --num-experts 128 --moe-router-topk 6 --moe-ffn-hidden-size 1856 "
    "--moe-shared-expert-intermediate-size 3712 --moe-router-enable-expert-bias --expert-tensor-parallel-size 1 "
    f"--hybrid-layer-pattern {NANO} "
)
HUNDRED = (
    "--hidden-size 4096 --num-attention-heads 32 --num-query-groups 2 --kv-channels 128 --ffn-hidden-size 2688 "
    "--mamba-num-heads 128 --num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688 "
    "--moe-shared-expert-intermediate-size 5376 --moe-latent-size 1024 --moe-router-enable-expert-bias "
    "--expert-tensor-parallel-size 1 --hybrid-layer-pattern MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME/*E/*E "
)
# nvidia/Nemotron-H-8B-Base-8K, config.json
EIGHT_JSON = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}


def script(flags, program="pretrain_hybrid.py"):
    """What a launch with these flags says."""
    return IMPORTERS["megatron"](f"torchrun --nproc-per-node 8 {program} {COMMON}{flags}")


def model_of(flags, **given):
    """The model of a launch with these flags."""
    found = script(flags, **given)
    assert found.doubts == ()
    assert found.missing == {}
    return found.blocks.apply(plain_model(name="m", source="flags", **found.model))


def published(name):
    """The model of a config.json among those of measured runs."""
    return model_from_hugging_face(json.loads((PUBLISHED / f"{name}.json").read_text()), name=name, file=f"{name}.json")


def setting_with(model):
    """A job of a model on 32 H100."""
    job = TrainingJob(model=model, sequence_length=8192, global_batch_size=64)
    return Setting(job=job, cluster=find_cluster("dgx-h100", 4), runtime=find_runtime("megatron-core"))


@pytest.mark.parametrize(
    ("flags", "config_json"),
    [
        (EIGHT, model_from_hugging_face(EIGHT_JSON, name="nemotron-h-8b", file="c.json")),
        (THIRTY, published("nemotron-3-nano-30b-a3b")),
        (HUNDRED, published("nemotron-3-super-120b-a12b-2-mtp")),
    ],
    ids=["8B", "30B", "120B with two modules of prediction"],
)
def test_flags_are_the_model_of_the_config_json(flags, config_json):
    """Parameters, those that a token uses, model FLOPs, and the predicted time and memory of a step are equal."""
    model = model_of(flags)

    assert len(model.layers) == len(config_json.layers)
    assert model.num_mtp_layers == config_json.num_mtp_layers
    for name in ("num_parameters", "num_active_parameters", "vocab_size"):
        assert getattr(model, name) == getattr(config_json, name), name
    assert model.model_flops_per_token(8192) == config_json.model_flops_per_token(8192)
    ep = 8 if model.is_moe else 1
    grid = grid_of(
        ParallelConfig(pp=2, tp=2, dp=8, ep=ep, sequence_parallel=True, zero_stage=1, expert_tp=int(ep > 1)),
        ParallelConfig(pp=4, tp=4, dp=2, vpp=2, ep=ep, sequence_parallel=True, zero_stage=1, expert_tp=int(ep > 1)),
    )
    own, theirs = (setting_with(one) for one in (model, config_json))
    assert (estimate_step(own, grid).step_time_s == estimate_step(theirs, grid).step_time_s).all()
    assert (estimate_memory(own, grid).peak_bytes == estimate_memory(theirs, grid).peak_bytes).all()


def test_the_sizes_are_those_that_the_names_claim():
    """Nemotron-H 8B has 8.1 billion parameters; Nemotron 3 Nano 31.6, of which a token uses 3.6 (their cards)."""
    assert model_of(EIGHT).num_parameters == pytest.approx(8.1e9, rel=0.01)
    assert model_of(THIRTY).num_parameters == pytest.approx(31.6e9, rel=0.01)
    assert model_of(THIRTY).num_active_parameters == pytest.approx(3.6e9, rel=0.03)


KINDS = {"M": "mamba2", "*": "attention", "-": "dense_mlp", "E": "experts"}
SMALL = "--hidden-size 512 --num-attention-heads 8 --num-query-groups 4 --ffn-hidden-size 1024 "
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 "


def kinds(model):
    """Kind of the block of every layer."""
    return [block.kind for layer in model.layers for block in layer]


def test_every_symbol_is_its_block():
    """Each of Megatron-LM's symbols is one layer of one block; + and D are latent attention without norms of ranks."""
    assert kinds(model_of(f"{SMALL}{EXPERTS}--hybrid-layer-pattern M*-EG")) == [
        *("mamba2", "attention", "dense_mlp", "experts", "gated_delta_net")
    ]
    latent = model_of(f"{SMALL}--q-lora-rank 64 --kv-lora-rank 32 --hybrid-layer-pattern M+-D")
    assert kinds(latent) == ["mamba2", "latent_attention", "dense_mlp", "sparse_latent_attention"]
    assert not any(layer[0].rank_norms for layer in (latent.layers[1], latent.layers[3]))


def test_sizes_of_state_spaces_have_their_defaults():
    """Without --mamba-num-heads there are as many heads as twice the hidden size holds; groups are 8, states 128."""
    (state,) = model_of(f"{SMALL}--hybrid-layer-pattern MM*-").layers[0]
    assert (state.num_heads, state.head_dim, state.num_groups, state.state_size) == (16, 64, 8, 128)


@pytest.mark.parametrize(
    ("flags", "pp", "vpp", "layers"),
    [
        ("M-M-M*M- --pipeline-model-parallel-size 2", 2, 1, ()),
        ("'M-M-|M*M-' --pipeline-model-parallel-size 2", 2, 1, (4, 4)),
        ("'M-|M-|M*|M-' --pipeline-model-parallel-size 2", 2, 2, (2, 2, 2, 2)),
        ("'M-M|-M*M-' --pipeline-model-parallel-size 2", 2, 1, (3, 5)),
        ("M-M-M*M- --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", 2, 1, (3, 5)),
        ("'M-M-|M*M-'", 1, 2, (4, 4)),
    ],
)
def test_bars_are_virtual_stages(flags, pp, vpp, layers):
    """The number of parts over pp is vpp; without bars the stages are equal, or as the flags of their ends say."""
    found = script(f"{SMALL}--hybrid-layer-pattern {flags}")
    assert (found.degrees["pp"], found.degrees["vpp"], found.layers) == (pp, vpp, layers)
    assert found.model["num_layers"] == 8


def test_parts_that_pp_does_not_divide_leave_vpp_open():
    """Three parts on two stages are no layout."""
    found = script(f"{SMALL}--hybrid-layer-pattern 'M|-|M' --pipeline-model-parallel-size 2")
    assert "multiple of 2 parts" in found.open["vpp"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--hybrid-layer-pattern M-Mx", "x"),
        ("--hybrid-layer-pattern M*M*/MM/M*", "behind each"),
        ("--hybrid-layer-pattern 'M*M*/M|M'", "behind each"),
        ("--hybrid-layer-pattern /MM", "before the first slash"),
        ("--hybrid-layer-pattern M*+", "beside"),
        ("--hybrid-layer-pattern MEME", "--num-experts"),
        ("--num-layers 8 --hybrid-attention-ratio 0.8 --hybrid-mlp-ratio 0.5", "more layers"),
        ("--num-layers 8 --hybrid-attention-ratio half", "from 0 to 1"),
    ],
)
def test_what_megatron_refuses_is_refused(flags, why):
    """The message names the flag and what is wrong with it."""
    with pytest.raises(ConfigError, match=why) as caught:
        script(SMALL + flags)
    assert "--hybrid" in caught.value.key


def test_flags_before_core_0_17():
    """The old pattern, its modules of prediction and ratios are read, and told to be old."""
    new = model_of(f"{SMALL}--hybrid-layer-pattern M*-M/*-/*-")
    old = script(
        f"{SMALL}--num-layers 4 --hybrid-override-pattern M*-M --mtp-hybrid-override-pattern *- --mtp-num-layers 2"
    )
    assert old.blocks.apply(plain_model(name="m", source="flags", **old.model)) == new
    assert any("before core 0.17" in note for note in old.notes)
    ratios = script(f"{SMALL}--num-layers 10 --hybrid-attention-ratio 0.1 --hybrid-mlp-ratio 0.5", "pretrain_mamba.py")
    assert ratios.blocks.hybrid.pattern == "M-M--*M-M-"


def test_programs_of_state_spaces_have_them_where_nothing_else_is_said():
    """pretrain_mamba.py without a pattern trains Mamba 2; pretrain_gpt.py never does."""
    assert kinds(model_of(f"{SMALL}--num-layers 3", program="pretrain_mamba.py")) == ["mamba2"] * 3
    assert script(f"{SMALL}--num-layers 3", "pretrain_gpt.py").blocks.hybrid is None


def test_a_pattern_that_is_not_known_leaves_the_model_open():
    """The model is asked for, and sizes of Mamba in another program without a pattern are asked about."""
    assert script(f"{SMALL}--hybrid-layer-pattern $PATTERN").missing.keys() == {"num_layers", "--hybrid-layer-pattern"}
    (doubt,) = script(f"{SMALL}--num-layers 3 --mamba-state-dim 64", "train.py").doubts
    assert "which layers" in doubt.why


def test_a_file_of_listed_blocks_is_the_same_model():
    """What `init` writes has the layer of a module of prediction too."""
    model = model_of(f"{SMALL}{EXPERTS}--hybrid-layer-pattern MEM*/*E")
    text = model_text(model, Path("own.sh"))

    read_back = listed_model(yaml.safe_load(text), name=model.name, file="m.yaml")
    assert (read_back.layers, read_back.mtp_layer) == (model.layers, model.mtp_layer)
    assert read_back.num_parameters == model.num_parameters


PARTS = st.lists(st.text("M*-E", max_size=4), min_size=1, max_size=6).filter(
    lambda parts: any(parts) and not "".join(parts).startswith("-")
)


@given(parts=PARTS, modules=st.integers(0, 2))
def test_a_written_pattern_is_read_as_it_was_meant(parts, modules):
    """Whatever the layers and their division, the flag says both, and the modules of prediction."""
    pattern = "|".join(parts) + "/*E" * modules
    words = f"{COMMON}{SMALL}{EXPERTS}--hybrid-layer-pattern".split()
    found = import_flags(flags_among([Argument(text=word, line=0) for word in (*words, pattern)], dashed=True))
    model = found.blocks.apply(plain_model(name="m", source="flags", **found.model))

    assert kinds(model) == [KINDS[symbol] for symbol in "".join(parts)]
    assert found.blocks.hybrid.segments == (tuple(map(len, parts)) if len(parts) > 1 else ())
    assert has_pattern(model)
    assert pattern_of(model, list(map(len, parts))) == pattern


def test_a_configuration_of_megatron_bridge_has_the_same_fields():
    """Its fields have the flags' names, and so do the sizes of state spaces, which are not taken from defaults."""
    model = {
        "hidden_size": 2688,
        "num_attention_heads": 32,
        "num_query_groups": 2,
        "kv_channels": 128,
        "ffn_hidden_size": 1856,
        "mamba_num_heads": 64,
        "mamba_state_dim": 128,
        "num_moe_experts": 128,
        "moe_router_topk": 6,
        "moe_ffn_hidden_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "hybrid_layer_pattern": NANO,
        "num_layers": 52,
        "vocab_size": 131072,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "position_embedding_type": "none",
        "seq_length": 8192,
        "share_embeddings_and_output_weights": False,
        "pipeline_model_parallel_size": 1,
    }
    found = import_container({"model": model, "train": {"micro_batch_size": 1, "global_batch_size": 64}})

    assert found.blocks.apply(plain_model(name="m", source="flags", **found.model)) == model_of(THIRTY)
