"""Rehearsals of Hugging Face's transformers, whose models are built without their weights."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.rehearsal.plain_study import rehearsed, sent

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="`make frameworks` installs accelerate"
)

HIDDEN, LAYERS, VOCABULARY, FFN = 256, 2, 1024, 704
SPLIT = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
"""Parameters of a model of 8 heads that tensor parallelism splits, by hand."""
NORMS = (2 * LAYERS + 1) * HIDDEN
TABLES = 2 * VOCABULARY * HIDDEN


def configured(folder):
    """A folder with the configuration of a model, and no weights."""
    model = folder / "small"
    model.mkdir()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "intermediate_size": FFN,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    (model / "config.json").write_text(json.dumps(fields))
    return str(model)


def test_a_model_is_built_without_its_weights(tmp_path):
    """From a folder that has its configuration alone; that no weights were read is told."""
    found = rehearsed(tmp_path, "hugging_face.py", "--model", configured(tmp_path))

    assert found["verdict"] == "accepted", found["error"]
    assert found["parameters"] == SPLIT + NORMS + TABLES
    assert found["parts_bytes"]["optimizer"] == pytest.approx(4 * found["parameters"], rel=0.01)
    assert any("weights of a checkpoint" in place for place in found["invented"])


@needs_accelerate
def test_a_plan_of_tensor_parallelism_splits_it(tmp_path):
    """`tp_plan="auto"` over 8 ranks: projections and both tables in eighths, norms as they are."""
    found = rehearsed(tmp_path, "hugging_face.py", "--model", configured(tmp_path), "--plan", "auto")

    assert found["verdict"] == "accepted", found["error"]
    assert found["parameters"] == SPLIT // 8 + NORMS + TABLES // 8
    assert sent(found, "all_reduce") >= 4 * LAYERS * 128 * HIDDEN * 2


@needs_accelerate
def test_a_trainer_shards_its_model(tmp_path):
    """FSDP2 by accelerate: an eighth of fp32 weights and moments, and every weight gathered in bf16."""
    found = rehearsed(tmp_path, "hugging_face.py", "--model", configured(tmp_path), "--trainer")

    whole = SPLIT + NORMS + TABLES
    assert found["verdict"] == "accepted", found["error"]
    assert found["parameters"] == pytest.approx(whole / 8, rel=0.01)
    assert found["parts_bytes"]["weights"] == pytest.approx(4 * whole / 8, rel=0.02)
    assert found["parts_bytes"]["optimizer"] == pytest.approx(8 * whole / 8, rel=0.02)
    assert sent(found, "_allgather_base_") >= 2 * 2 * SPLIT


def test_a_model_that_is_not_here_is_unknown_by_name(tmp_path):
    """A name of the hub whose configuration is not on this machine."""
    found = rehearsed(tmp_path, "hugging_face.py", "--model", "some-lab/some-model", status=1)

    assert found["verdict"] == "unknown"
    assert "some-lab/some-model" in found["error"]
