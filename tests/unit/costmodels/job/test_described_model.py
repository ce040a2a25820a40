"""Models as JSON, and back."""

import json

import pytest

from costmodels.blocks.mask import Mask
from costmodels.job.described_model import describe_model, described_model
from costmodels.job.model_catalog import find_model, model_names
from hardware.io.errors import ConfigError
from tests.support.settings.mixed_models import MIXED


def through_json(model):
    """The description of a model as a storage returns it."""
    return json.loads(json.dumps(describe_model(model)))


WINDOWED = find_model("llama3-8b").with_masks([Mask(window=1024 * (layer % 2)) for layer in range(32)])


@pytest.mark.parametrize("model", [*map(find_model, model_names()), WINDOWED, MIXED], ids=lambda model: model.name)
def test_a_described_model_is_the_model(model):
    """Every model of the catalog, one with windows and one of many kinds of blocks come back from JSON as they were."""
    assert described_model(through_json(model)) == model


def test_a_decoder_that_an_earlier_version_described_is_read():
    """Its keys are those of a plain decoder, and what has a default may be missing."""
    described = through_json(find_model("llama3-8b"))
    for key in ("num_mtp_layers", "norms_per_layer", "assumed"):
        del described[key]

    assert described_model(described) == find_model("llama3-8b")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window": 8}, "window"),
        ({"blocks": {"attention": {"kind": "atention"}}}, "did you mean 'attention'?"),
        ({"blocks": {"dense_mlp": {"kind": "dense_mlp", "ffn": 8}}}, "did you mean 'ffn_size'?"),
        ({"blocks": {"head": {"kind": "embedding", "hidden_size": 8, "vocab_size": 8}}}, "embedding and a head"),
    ],
)
def test_what_this_version_does_not_know_is_told(change, named):
    """A key, a kind or a size of another version makes no model."""
    described = through_json(MIXED)
    blocks = described["blocks"] | change.pop("blocks", {})

    with pytest.raises(ConfigError) as caught:
        described_model(described | change | {"blocks": blocks})

    assert named in str(caught.value)
    with pytest.raises(ConfigError, match="window"):
        described_model(through_json(find_model("llama3-8b")) | {"window": 8})
