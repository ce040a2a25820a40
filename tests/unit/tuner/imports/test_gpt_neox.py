"""What a configuration of GPT-NeoX means."""

from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import GPT_NEOX
from tuner.imports import IMPORTERS
from tuner.imports.gpt_neox import merge_gpt_neox


def read(text=GPT_NEOX, **keys):
    """What the file means with further keys at its end."""
    added = "".join(f'  "{name}": {value},\n' for name, value in keys.items())
    return IMPORTERS["gpt-neox"](text.rstrip().removesuffix("}") + added + "}\n")


def without(name):
    """The file without the lines of a key."""
    return "\n".join(line for line in GPT_NEOX.splitlines() if name not in line) + "\n"


def test_a_file():
    """Keys with dashes and underscores come together to model, job, degrees and devices."""
    imported = read()

    assert imported.runtime == "gpt-neox"
    assert {name: size for name, size in imported.degrees.items() if size > 1} == {"pp": 4, "tp": 2, "mbs": 4}
    expected = {"sequence_length": 2048, "precision": "fp16", "optimizer": "adam", "recompute": "full", "zero_stage": 1}
    assert imported.job == expected
    assert (imported.micro_batches, imported.hosts, imported.devices_per_host) == (32, 12, 8)
    assert (imported.missing, imported.open, imported.unread) == ({}, {}, ())
    sizes = {name: imported.model[name] for name in ("vocab_size", "ffn_size", "gated_ffn", "learned_positions")}
    assert sizes == {"vocab_size": 50304, "ffn_size": 4 * 6144, "gated_ffn": False, "learned_positions": 0}


def test_a_pipeline_of_no_stages_is_none():
    """pipe-parallel-size 0 is how GPT-NeoX runs without its pipeline module."""
    assert IMPORTERS["gpt-neox"](GPT_NEOX.replace('size": 4', 'size": 0')).degrees["pp"] == 1


@pytest.mark.parametrize(
    ("keys", "size", "gated"),
    [
        ({"mlp_type": "llama"}, 16384, True),
        ({"mlp_type": "llama", "intermediate_size": 11008}, 11008, True),
        ({"activation": "swiglu", "intermediate_size": 43008}, 14336, True),
        ({"activation": "silu"}, 24576, False),
        ({"intermediate_size": 20000}, 20000, False),
        ({"activation": "geglu", "expansion_factor": 6, "mlp_multiple_of": 64}, 12288, True),
    ],
)
def test_inner_sizes(keys, size, gated):
    """intermediate_size is both halves of a gated MLP times 3/2, except in versions with mlp_type."""
    model = read(**keys).model

    assert (model["ffn_size"], model["gated_ffn"]) == (size, gated)


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({"precision": "bfloat16"}, "bf16"),
        ({"bf16": "{enabled: true}"}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
        ({}, "fp32"),
        ({"te_fp8_format": "hybrid", "te_mha": "true", "precision": "bfloat16"}, "fp8"),
        ({"te_fp8_format": "hybrid", "te_mha": "false", "precision": "bfloat16"}, "bf16"),
    ],
)
def test_precisions(keys, precision):
    """The number format is that of the sections fp16 and bf16, else of `precision`, and fp8 with Transformer Engine."""
    assert read(without("fp16"), **keys).job["precision"] == precision


def test_experts():
    """DeepSpeed's experts stand in every second layer, Megablocks' in every layer."""
    imported = read(num_experts=8, moe_expert_parallel_size=4)

    assert imported.degrees["ep"] == 4
    assert (imported.model["num_experts"], imported.model["moe_layer_period"]) == (8, 2)
    assert read(moe_num_experts=8, moe_top_k=2).model["moe_layer_period"] == 1
    assert "num_experts" not in read(num_experts=1).model


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"model_arch": "t5"}, "T5"),
        ({"attention_config": "[[[mamba], 44]]"}, "state-space"),
        ({"attention_config": "[[[global, rwkv], 22]]"}, "state-space"),
        ({"attention_config": "[[[gmlp], 44]]"}, "gMLP"),
        ({"adapter_config": "{attention: {adapter_type: scaled_parallel}}"}, "adapters"),
        ({"soft_prompt_tuning": "{enabled: true}"}, "adapters"),
        ({"train_impl": "dpo"}, "preferences"),
    ],
)
def test_other_models_are_refused(keys, why):
    """What is no training of a whole decoder is refused with its kind."""
    with pytest.raises(ConfigError, match=why):
        read(**keys)


def test_what_is_not_modelled_is_told():
    """Sparse attention and parallel residuals are told by their keys, and offloaded weights are asked for."""
    keys = {
        "zero_optimization": "{stage: 3, cpu_offload: true, cpu_offload_params: true}",
        "attention_config": "[[[global, local], 22]]",
        "gpt_j_residual": "true",
        "partition_activations": "true",
        "soft_prompt_tuning": "{enabled: false}",
    }
    imported = read(without("zero_optimization"), **keys)

    told = {one.what for one in imported.unread}
    assert told == {"attention_config", "gpt_j_residual", "partition_activations"}
    assert [one.flag for one in imported.doubts] == ["zero_optimization.cpu_offload_params"]
    assert imported.job["zero_stage"] == 3


@pytest.mark.parametrize("zero", ["{stage: 2, cpu_offload: true}", "{stage: 1, offload_optimizer: {device: cpu}}"])
def test_offloaded_states_are_those_of_the_job(zero):
    """Optimizer states on the host are read by both names; without sharding, which offloading needs, they are told."""
    assert read(without("zero_optimization"), zero_optimization=zero).job["offload"] == "optimizer"

    alone = read(without("zero_optimization"), zero_optimization="{stage: 0, cpu_offload: true}")
    assert "offload" not in alone.job
    assert any(one.what == "zero_optimization.offload_optimizer" for one in alone.unread)


@pytest.mark.parametrize(("key", "value"), [("context_parallel_size", 2), ("sequence_parallel", "true")])
def test_what_the_profile_lacks_makes_the_runtime_unknown(key, value):
    """A layout that the profile gpt-neox has no rules for is no study about that profile."""
    assert read(**{key: value}).runtime == "unknown"


def test_a_file_of_a_model_alone_leaves_training_open():
    """Where batch and ZeRO are in another file nothing is assumed: they are asked for."""
    text = GPT_NEOX
    for name in ("train_micro", "gradient_accumulation", "zero_opt", "checkpoint-act", "vocab-file"):
        text = "\n".join(line for line in text.splitlines() if name not in line) + "\n"
    imported = read(text)

    assert set(imported.open) == {"mbs", "zero_stage", "recompute"}
    assert imported.missing == {"vocab_size": "padded_vocab_size"}
    assert imported.micro_batches is None


# Several files


def merged(**texts):
    """Several files as one, by their names without the suffix."""
    return merge_gpt_neox([(Path(f"{name}.yml"), text) for name, text in texts.items()])


def test_several_files_are_one_configuration():
    """A model in one file and its training in another mean what one file with both means."""
    lines = GPT_NEOX.strip().removeprefix("{").removesuffix("}").splitlines()
    model = [line for line in lines if any(name in line for name in ("num-layers", "hidden-size", "attention-heads"))]
    rest = [line for line in lines if line not in model]

    found = IMPORTERS["gpt-neox"](merged(model="{" + "\n".join(model) + "}", training="{" + "\n".join(rest) + "}"))

    assert len(model) == 3
    assert found == IMPORTERS["gpt-neox"](GPT_NEOX)


def test_a_key_of_two_files_is_refused():
    """GPT-NeoX refuses a key that an earlier file has, in the form that it keeps."""
    with pytest.raises(ConfigError, match=r"b\.yml: num_layers.*is in an earlier file too"):
        merged(a="num-layers: 2", b="num_layers: 4")


def test_a_key_with_dashes_overrides_that_of_an_earlier_file():
    """GPT-NeoX compares keys before it replaces their dashes, so that the last value counts."""
    assert merged(a="num_layers: 2", b="num-layers: 4") == '{"num_layers": 4}'


def test_files_of_one_name_are_refused():
    """GPT-NeoX keeps the files by their names."""
    with pytest.raises(ConfigError, match="has the name of another file"):
        merge_gpt_neox([(Path("a/x.yml"), "a: 1"), (Path("b/x.yml"), "b: 1")])


def test_a_file_that_is_no_mapping_is_named():
    """The message says which of the files it is."""
    with pytest.raises(ConfigError, match=r"b\.yml.*mapping at its top level"):
        merged(a="a: 1", b="[]")
