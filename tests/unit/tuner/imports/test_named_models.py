"""Models that torchtitan and MaxText know by names of their own."""

import pytest

from costmodels.job.model_catalog import model_names
from tuner.imports import IMPORTERS
from tuner.imports.model_names import catalog_model
from tuner.imports.named_models import named_model, named_models

TOML = """\
[model]
name = "{name}"
flavor = "{flavor}"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
"""
# torchtitan 0.3.0, parameters of the models that it builds
OF_TORCHTITAN = {
    "llama3.1B": 1_235_814_400,
    "llama3.3B": 3_212_749_824,
    "deepseek_v3.16B": 15_706_484_224,
    "deepseek_v3.236B": 235_741_434_880,
    "gpt_oss.20b": 20_914_757_184,
    "gpt_oss.120b": 116_829_156_672,
    "qwen3.0.6B": 596_049_920,
    "qwen3.30B-A3B": 30_532_122_624,
    "qwen3.235B-A22B": 235_093_634_560,
}
# the models' cards: 17 billion active of 109 and 400, 1 trillion with 32 active, 80 with 3 active; sizes without the
# encoder of images
OF_MAXTEXT = {
    "llama4-17b-16e": (107.8e9, 17.2e9),
    "llama4-17b-128e": (400.7e9, 17.2e9),
    "kimi-k2-1t": (1.03e12, 32.9e9),
    "qwen3-next-80b-a3b": (79.7e9, 3.9e9),
    "gemma3-4b": (3.88e9, 3.88e9),
    "gemma3-12b": (11.8e9, 11.8e9),
    "gemma3-27b": (27.0e9, 27.0e9),
    "gpt-oss-120b": (116.8e9, 5.7e9),
}


@pytest.mark.parametrize(("name", "parameters"), OF_TORCHTITAN.items())
def test_flavors_of_torchtitan(name, parameters):
    """A file's flavor is the model that torchtitan builds, and so is the recipe of that name."""
    module, _, flavor = name.partition(".")
    found = IMPORTERS["torchtitan"](TOML.format(name=module, flavor=flavor))
    recipe = f"{module}_{flavor.lower().replace('.', '_').replace('-', '_')}"
    command = f"torchrun -m torchtitan.train --module {module} --config {recipe} --training.seq_len 4096"

    assert found.named.num_parameters == parameters
    assert IMPORTERS["torchtitan"](command).named == found.named
    assert not any("--model" in note for note in found.notes)


def test_recipes_of_the_same_model():
    """Kernels and number formats in a recipe's name change no size; modules of prediction do, and are not guessed."""
    for recipe in ("deepseek_v3_16b_hybridep", "deepseek_v3_16b_minimal_async_ep"):
        assert named_model("torchtitan", recipe).name == "deepseek-v2-lite"
    assert named_model("torchtitan", "deepseek_v3_16b_mtp") is None


@pytest.mark.parametrize(("name", "sizes"), OF_MAXTEXT.items())
def test_models_of_maxtext(name, sizes):
    """A model_name is the model of that card; settings of its sizes make it another one."""
    command = "python3 -m MaxText.train configs/base.yml per_device_batch_size=1 max_target_length=4096 model_name="
    found = IMPORTERS["maxtext"](command + name).named

    assert (found.num_parameters, found.num_active_parameters) == (
        pytest.approx(sizes[0], rel=0.01),
        pytest.approx(sizes[1], rel=0.01),
    )
    assert IMPORTERS["maxtext"](f"{command}{name} base_emb_dim=1024").named is None


def test_windows_and_chunks_are_read():
    """Five of six layers of Gemma 3 see 1,024 keys; three of four layers of Llama 4 see their chunk of 8,192."""
    gemma, llama = (named_model("maxtext", name) for name in ("gemma3-12b", "llama4-17b-16e"))

    assert [mask.window for mask in gemma.masks[:6]] == [1024] * 5 + [0]
    assert [layer[0].mask.chunk for layer in llama.layers[:4]] == [8192] * 3 + [0]


@pytest.mark.parametrize("framework", ["torchtitan", "maxtext"])
def test_every_name_is_one_model(framework):
    """Each listed name finds its own model, which the catalog has not under that name."""
    for name, listed in named_models(framework).items():
        assert named_model(framework, name).name == listed
        assert catalog_model(name) not in model_names()
