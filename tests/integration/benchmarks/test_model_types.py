"""The judge of model types in a small form: our readers against the parameters of transformers' own models."""

import pytest

pytest.importorskip("torch", reason="the judge needs torch: pip install 'meshtune[torch]'")
pytest.importorskip("transformers", reason="the judge needs transformers")

from benchmarks.judges.model_types import all_types, failed, main, measure
from costmodels.job.hugging_face.reader import READERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model_type", sorted(READERS))
def test_every_reader_gives_the_parameters_of_transformers(model_type):
    """A reader that takes the default and its changes agrees to the last parameter, idle experts and towers apart."""
    row = measure(model_type, with_operators=False)

    assert row["traced"] in ("parameters", "refused")
    assert not failed(row)


def test_the_judge_asks_about_decoders_vision_language_models_and_encoders():
    """All three families are among the types, each once."""
    types = all_types()

    assert {"llama", "qwen3_vl", "bert", "t5", "vit"} <= set(types)
    assert len(types) == len(set(types)) > 200


def test_a_type_without_a_reader_is_traced_and_one_that_needs_a_library_is_refused(capsys):
    """The table says of each type who reads it, and its exit status is 0 where no reader is wrong."""
    assert main(["--type", "starcoder2,gemma3n", "--parameters-only"]) == 0

    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert first[:4] == ["starcoder2", "3.030", "-", "parameters"]
    assert second[0] == "gemma3n"
    assert "timm" in second


@pytest.mark.parametrize(
    ("model_type", "model"),
    [
        ("gpt2", "equal"),
        ("modernbert-decoder", "equal"),
        ("zamba2", "equal"),
        ("longcat_flash", "equal without idle experts"),
    ],
)
def test_the_model_of_a_trace_has_its_parameters(model_type, model):
    """Tables of positions and layers that share their weights are in the model, as are all experts that compute."""
    row = measure(model_type)

    assert row["model"] == model
    assert not failed(row)
