import pytest

from costmodels.calibration.measured_model import ASSUMED_GPT_VOCABULARY, model_of
from hardware.io.errors import ConfigError

SIZES = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "vocab": 32000}
SIZES |= dict.fromkeys(("experts", "topk", "moe_ffn"))
EXPERTS = {"experts": 16, "topk": 4, "moe_ffn": 256}


def model(name="llama-tiny", notes="", **sizes):
    """The model of a row with these sizes and remarks."""
    return model_of(name, "test", SIZES | sizes, notes, 4096, is_tied=False)


@pytest.mark.parametrize(
    ("notes", "sizes"),
    [
        ("MLA q_lora1536 kv_lora512 rope64 nope128 v128", (1536, 512, 128, 64, 128)),
        ("MLA q_lora1536 kv_lora512 qk96+32 v64", (1536, 512, 96, 32, 64)),
        ("q-lora-rank=2048; kv-lora-rank=512", (2048, 512, 128, 64, 128)),
        ("MLA kv_lora512 rope64", (0, 512, 128, 64, 128)),
        ("swiglu; multi-latent-attention=True; kv-channels=128", (512, 512, 128, 64, 128)),
    ],
)
def test_latent_attention_is_read_from_the_remarks(notes, sizes):
    """Ranks and head sizes are those that are named, else Megatron-Core's defaults; keys have all heads.

    Remarks about other things leave plain attention, with the row's key heads.
    """
    spec = model(notes=notes, kv_heads=1)

    named = (
        spec.plain.q_lora_rank,
        spec.plain.kv_lora_rank,
        spec.plain.qk_nope_head_dim,
        spec.plain.qk_rope_head_dim,
        spec.plain.v_head_dim,
    )
    assert named == sizes
    assert (spec.plain.head_dim, spec.plain.num_kv_heads) == (sizes[2] + sizes[3], 8)
    plain = model(notes="swiglu; rope; nope of these; kv-channels=64", kv_heads=2).plain
    assert (plain.uses_mla, plain.num_kv_heads, plain.head_dim) == (False, 2, 64)


@pytest.mark.parametrize(
    ("notes", "count", "width"),
    [
        ("1 shared expert", 1, 256),
        ("2 shared experts", 2, 512),
        ("n-shared-experts=2", 2, 512),
        ("shared experts 0", 0, 0),
        ("shared expert", 1, 256),
        ("shared expert ffn 5632", 1, 5632),
        ("shared_expert_ffn=3072", 1, 3072),
        ("moe-shared-expert-intermediate-size=1024", 1, 1024),
        ("swiglu", 0, 0),
    ],
)
def test_shared_experts_are_read_from_the_remarks(notes, count, width):
    """Their number or their inner size is told; the other follows from the experts' size, or is one."""
    spec = model(notes=notes, **EXPERTS)

    assert (spec.plain.num_shared_experts, spec.plain.shared_expert_ffn_size) == (count, width)


@pytest.mark.parametrize(
    ("notes", "dense"),
    [
        ("first 3 layers dense", 3),
        ("first layer dense", 1),
        ("1 dense layer", 1),
        ("2 dense layers; swiglu", 2),
        ("first-k-dense-replace=1", 1),
        ("moe-layer-freq=([0]*3+[1]*5)", 3),
        ("moe-layer-freq=([1]*8)", 0),
        ("", 0),
    ],
)
def test_dense_first_layers_are_read_from_the_remarks(notes, dense):
    """The layers before the first with experts, in every spelling that sources use."""
    assert model(notes=notes, **EXPERTS).plain.num_dense_layers == dense


@pytest.mark.parametrize(
    ("notes", "modules"),
    [
        ("untied; mtp-num-layers=1; mtp-loss-scaling-factor=0.1", 1),
        ("num-nextn-predict-layers=2", 2),
        ("MTP depth 1 (w/o loss)", 1),
        ("DeepSeekV3 (w/o MTP); MTP presence not stated", 0),
    ],
)
def test_prediction_modules_are_read_from_the_remarks(notes, modules):
    """Megatron-LM and MindSpeed-LLM name their number; a model of which none is named has none."""
    assert model(notes=notes).num_mtp_layers == modules


@pytest.mark.parametrize(
    ("name", "norm", "positions", "gated"),
    [
        ("llama-tiny", "rms", 0, True),
        ("gpt-tiny", "layer", 4096, False),
        ("gpt-neox-tiny", "layer", 0, False),
        ("gpt-oss-tiny", "rms", 0, True),
        ("bloom-tiny", "layer", 0, False),
    ],
)
def test_what_the_remarks_leave_out_follows_from_the_family(name, norm, positions, gated):
    """GPT and its kin have layer norms and two MLP matrices, most of them learned positions; others are like LLaMA.

    Of gating the remarks tell; a denial counts before the word that it denies.
    """
    spec = model(name)

    assert (spec.norm, spec.learned_positions, spec.plain.gated_ffn) == (norm, positions, gated)
    for notes in ("squared-relu", "gelu non-gated"):
        assert not model(name, notes=notes).gated_ffn
    for notes in ("swiglu", "GeGLU, gated"):
        assert model(name, notes=notes).gated_ffn


def test_vocabularies_that_are_left_out_are_the_familys():
    """GPT's padded one, the public ones of LLaMA and Qwen, else none: then there is no model."""
    names = ("gpt-tiny", "llama3-tiny", "qwen2-tiny")

    assert [model(name, vocab=None).vocab_size for name in names] == [ASSUMED_GPT_VOCABULARY, 128256, 151936]
    assert "vocab_size" in model("gpt-tiny", vocab=None).assumed
    assert model("mystery", vocab=None) is None


def test_sizes_that_contradict_each_other_are_refused():
    """Key heads that do not divide the heads make no model."""
    with pytest.raises(ConfigError, match="num_kv_heads"):
        model(kv_heads=3)
