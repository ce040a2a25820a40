"""Models of a trace and of a reader are the same model: parameters equal, FLOPs within a percent, steps near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.job.model_catalog import load_model, trace_model_file
from hardware.io.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, **HEADS},
    "gemma3_text": {"model_type": "gemma3_text", **SMALL, **HEADS, "sliding_window": 64},
    "gpt_oss": {"model_type": "gpt_oss", **SMALL, **HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma4_text": {
        "model_type": "gemma4_text",
        **SMALL,
        **HEADS,
        "num_hidden_layers": 12,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 64,
    },
    "olmo3": {"model_type": "olmo3", **SMALL, **HEADS, "sliding_window": 64},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SMALL,
        **HEADS,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}


def _file(folder: Path, name: str) -> str:
    (folder / f"{name}.json").write_text(json.dumps(CONFIGS[name]))
    return f"{name}.json"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_and_a_reader_agree(tmp_path: Path, name: str) -> None:
    """Parameters are equal, those that a token uses too, and FLOPs are within a percent at two lengths."""
    file = _file(tmp_path, name)
    read, traced = load_model(file, tmp_path), trace_model_file(file, tmp_path)

    assert traced.num_parameters == read.num_parameters
    assert traced.num_active_parameters == read.num_active_parameters
    assert (traced.is_moe, traced.num_experts, traced.top_k) == (read.is_moe, read.num_experts, read.top_k)
    for length in (512, 4096):
        assert traced.model_flops_per_token(length) == pytest.approx(read.model_flops_per_token(length), rel=0.01)


def test_a_model_that_no_reader_knows_is_traced(tmp_path: Path) -> None:
    """The reader refuses it by name and tells of the trace, which has all parameters."""
    config = {"model_type": "starcoder2", **SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "own.json").write_text(
        json.dumps(config | {"sliding_window": None, "bos_token_id": 0, "eos_token_id": 0})
    )

    with pytest.raises(ConfigError, match="transformers"):
        load_model("own.json", tmp_path)
    found = trace_model_file("own.json", tmp_path)

    layer = 256 * (8 + 2 * 4) * 32 + 256 * 256 + 2 * 256 * 512
    assert found.num_parameters > found.embedding.parameters + 4 * layer
    assert found.num_layers == 4


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The key and the file stand in the message."""
    with pytest.raises(ConfigError, match="no such file"):
        trace_model_file("none.json", tmp_path)
