import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.hugging_face.reader import READERS, model_from_hugging_face
from costmodels.job.model_catalog import find_model, load_model
from hardware.io.errors import ConfigError
from tests.support.settings.model_parts import num_moe_layers

MODELS_DIR = Path(__file__).parents[4] / "configs" / "models"

# Sources: configs/models/README.md.
PARAMETERS = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the balancing biases of 58 layers are no parameters
    "gemma-2-9b": 9_241_705_984,
    "gemma-7b": 8_537_680_896,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-7b": 6_738_415_616,
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}

# The names' own claims: A2.7B, A3B (3.3 billion on its model card), 21 billion (DeepSeek-V2, arXiv 2405.04434).
ACTIVE_BILLIONS = {"qwen1.5-moe-a2.7b": 2.7, "qwen3-30b-a3b": 3.3, "deepseek-v2": 21.4, "mixtral-8x7b": 12.9}

SAME_AS_CATALOG = {
    "deepseek-v3": "deepseek-v3",
    "llama-2-13b": "llama2-13b",
    "llama-3-8b": "llama3-8b",
    "llama-3.1-405b": "llama3-405b",
    "llama-3.1-70b": "llama3-70b",
    "llama-7b": "llama-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "qwen2.5-72b": "qwen2.5-72b",
    "qwen2.5-7b": "qwen2.5-7b",
}

ALL = {path.stem: json.loads(path.read_text()) for path in sorted(MODELS_DIR.glob("*.json"))}
LLAMA = ALL["llama-3-8b"]


def read(mapping):
    """The model of a config.json that holds `mapping`."""
    return model_from_hugging_face(mapping, name="some-model", file="some-model.json")


def without(config, key):
    """A configuration that lacks a key."""
    return {name: value for name, value in config.items() if name != key}


def refusal(mapping):
    """The text of the ConfigError that `mapping` ends in."""
    with pytest.raises(ConfigError) as caught:
        read(mapping)
    return str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_published_configurations_give_exactly_the_published_parameters(name):
    """The sizes read from a published config.json add up to the published checkpoint, to the last parameter."""
    assert load_model(f"{name}.json", MODELS_DIR).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize(("name", "billions"), ACTIVE_BILLIONS.items())
def test_published_configurations_give_the_published_active_parameters(name, billions):
    """A MoE model's active parameters are those of its model card, to its last digit."""
    assert read(ALL[name]).num_active_parameters / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(("file", "name"), SAME_AS_CATALOG.items())
def test_configuration_and_catalog_agree(file, name):
    """A model that stands in the catalog and in configs/models is the same model, field by field."""
    catalog = find_model(name)

    assert read(ALL[file]).changed(name=name, source=catalog.source) == catalog


def test_a_directory_with_a_config_json_is_a_model(tmp_path):
    """A directory as `save_pretrained` writes it is read, and names the model."""
    directory = tmp_path / "my-llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))

    assert load_model("my-llama", tmp_path).name == "my-llama"
    assert load_model("my-llama/config.json", tmp_path) == load_model("my-llama", tmp_path)


def test_missing_kv_heads_are_as_many_as_heads_or_refused():
    """LlamaConfig turns a missing or null number into that of heads; Qwen2Config guesses 32, and that is refused."""
    llama, qwen = (without(ALL[name], "num_key_value_heads") for name in ("llama-3-8b", "qwen2.5-7b"))

    assert [read(each).plain.num_kv_heads for each in (llama, llama | {"num_key_value_heads": None})] == [32, 32]
    assert "num_key_value_heads: is required and missing" in refusal(qwen)


@pytest.mark.parametrize(
    ("name", "tied"), [("gemma-7b", True), ("gpt2", True), ("llama-3-8b", False), ("mixtral-8x7b", False)]
)
def test_tied_embeddings_default_by_model_type(name, tied):
    """A missing tie_word_embeddings means what the configuration class of the model type says."""
    config = without(ALL[name], "tie_word_embeddings")

    assert read(config).tied_embeddings is tied
    assert read({**config, "tie_word_embeddings": not tied}).tied_embeddings is not tied


def test_a_given_head_dim_needs_no_divisible_hidden_size():
    """Where head_dim is given, hidden_size may be anything (Qwen3, Mistral-Nemo); elsewhere it must divide."""
    odd = {**LLAMA, "hidden_size": 4100}

    assert read({**odd, "head_dim": 128}).plain.context_size == 4096
    assert "hidden_size = 4100: must be divisible by the 32 attention heads" in refusal(odd)


def test_gemma_3_reads_the_text_model_with_its_defaults():
    """A gemma3 file nests the text model and leaves out Gemma3TextConfig's defaults; gemma-3-4b has 3.88 billion."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    model = read({"model_type": "gemma3", "text_config": text})

    assert (model.plain.num_heads, model.plain.num_kv_heads, model.plain.head_dim, model.plain.norms_per_layer) == (
        8,
        4,
        256,
        4,
    )
    assert model.num_parameters == pytest.approx(3.88e9, rel=0.001)
    assert read(text) == model
    for key, value in (("hidden_size", "big"), ("num_key_value_heads", 3)):
        broken = {"model_type": "gemma3", "text_config": {**text, key: value}}
        assert f"text_config.{key} = {value!r}" in refusal(broken)


def test_phi_3_mini_has_its_published_parameters():
    """Phi-3-mini-4k has 3,821,079,552 parameters (microsoft/Phi-3-mini-4k-instruct)."""
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "vocab_size": 32064}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    config = {"model_type": "phi3", "tie_word_embeddings": False} | sizes | heads

    assert read(config).num_parameters == 3_821_079_552


def test_mlp_only_layers_must_come_first():
    """Dense layers at the front of a Qwen MoE are read; anywhere else they are refused."""
    moe = ALL["qwen3-30b-a3b"]

    assert num_moe_layers(read({**moe, "mlp_only_layers": [0, 1]})) == 46
    assert "mlp_only_layers = [3]: must be a list of the first layers" in refusal({**moe, "mlp_only_layers": [3]})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-3-8b", {"model_type": "lama"}, "model_type = 'lama': unknown model type; did you mean 'llama'?"),
        ("llama-3-8b", {"model_type": None}, "model_type: must not be null"),
        ("llama-3-8b", {"model_type": ["llama"]}, "model_type = ['llama']: unknown model type"),
        ("llama-3-8b", {"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a whole number from 1"),
        ("llama-3-8b", {"num_hidden_layers": True}, "num_hidden_layers = True: must be a whole number"),
        ("llama-3-8b", {"vocab_size": None}, "vocab_size: must not be null"),
        ("llama-3-8b", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
        ("llama-3-8b", {"num_key_value_heads": 5}, "num_key_value_heads = 5: must divide the model's 32 attention"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must not exceed the number of experts"),
        ("deepseek-v2", {"first_k_dense_replace": 60}, "first_k_dense_replace = 60: must leave at least one"),
        ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 49}, "decoder_sparse_step = 49: must not exceed the 48 layers"),
        ("gpt2", {"n_head": 7}, "n_embd = 768: must be divisible by the 7 attention heads"),
    ],
)
def test_broken_configurations_are_refused_in_their_own_words(name, changes, message):
    """A value that cannot work is told with the file, the key as it stands there, the value and the rule."""
    text = refusal({**ALL[name], **changes})

    assert text.startswith("some-model.json: ")
    assert message in text


@pytest.mark.parametrize("key", ["model_type", "num_hidden_layers", "hidden_size", "vocab_size", "intermediate_size"])
def test_a_missing_size_is_never_guessed(key):
    """A size that is missing from a config.json is an error, although transformers has a default for it."""
    assert refusal(without(LLAMA, key)) == f"some-model.json: {key}: is required and missing"


def test_a_missing_q_lora_rank_is_no_null():
    """DeepSeek turns the query projection's rank off with null (V2-Lite); leaving the key out is an error."""
    config = ALL["deepseek-v2"]

    assert read({**config, "q_lora_rank": None}).plain.q_lora_rank == 0
    assert "q_lora_rank: is required" in refusal(without(config, "q_lora_rank"))


LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 64,
    "vocab_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention"],
    "block_ff_dim": 100,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.5,
}
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 64,
    "vocab_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_sizes_that_a_configuration_does_not_use_are_no_unknown_keys():
    """LFM2's multiple of an unadjusted inner size, and Nemotron-H's heads without attention, are known."""
    unadjusted = read(LFM2 | {"block_auto_adjust_ff_dim": False})
    alone = read(NEMOTRON_H | {"layers_block_type": ["mamba", "moe"]})

    assert {block.ffn_size for layer in unadjusted.layers for block in layer if block.kind == "dense_mlp"} == {100}
    assert [block.kind for layer in alone.layers for block in layer] == ["mamba2", "experts"]


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        (NEMOTRON_H | {"layers_block_type": ["mamba", "moe"], "mlp_bias": True}, "mlp_bias = True"),
        (LLAMA | {"some_new_size": 17}, "some_new_size = 17"),
        (LLAMA | {"model_type": "no_such"}, "model_type = 'no_such'"),
    ],
)
def test_what_is_not_read_names_the_way_out(mapping, key):
    """A refusal of something that transformers may know names the key and says how transformers builds the model."""
    text = refusal(mapping)

    assert key in text
    assert "model: {transformers: FILE}" in text


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "not valid JSON"), ("[1, 2]", "must hold a mapping"), ("{", "not valid JSON"), ("{}", "model_type")],
)
def test_a_file_that_holds_no_configuration_is_named(tmp_path, text, rule):
    """An empty file, a list, cut-off JSON and an empty mapping are each one ConfigError that names the file."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_model("config.json", tmp_path)

    assert "config.json" in str(caught.value)
    assert rule in str(caught.value)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=1, max_value=300),
    st.sampled_from([2**31, 10**40]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(sorted(READERS)),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(data=st.data())
def test_any_damage_to_a_configuration_ends_in_a_model_or_a_config_error(data):
    """Deleting keys of a published configuration, or filling them with junk, never raises anything else."""
    config = dict(ALL[data.draw(st.sampled_from(sorted(ALL)))])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3, unique=True)):
        if data.draw(st.booleans()):
            del config[key]
        else:
            config[key] = data.draw(JUNK)

    outcome = read_or_refuse(config)

    if isinstance(outcome, ConfigError):
        assert outcome.file == "some-model.json"
    else:
        assert outcome.num_parameters >= outcome.num_active_parameters > 0
        assert outcome.model_flops_per_token(4096) > 0


def read_or_refuse(mapping):
    """The model, or the ConfigError: anything else that is raised fails the test."""
    try:
        return read(mapping)
    except ConfigError as error:
        return error
