"""Flags of Megatron-LM about layers that are no plain decoder's become blocks, and the file of a model lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from costmodels.blocks.attention import Attention
from costmodels.blocks.experts import Experts
from costmodels.blocks.gated_delta_net import GatedDeltaNet
from costmodels.blocks.mask import Mask
from costmodels.blocks.sparse_latent_attention import SparseLatentAttention
from costmodels.job.listed_model import listed_keys, listed_model
from costmodels.job.model_spec import ModelSpec, plain_model
from tests.unit.tuner.imports.test_megatron_models import read
from tuner.study_file.text import model_text

SIZES = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 2048 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --vocab-size 32000 "
)
GROUPED = "--group-query-attention --num-query-groups 4 --kv-channels 64 "
LATENT = "--multi-latent-attention --q-lora-rank 512 --kv-lora-rank 256 "
EXPERTS = "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 512 "


def model_of(flags: str) -> ModelSpec:
    """Return the model that flags describe."""
    found = read(SIZES + flags)
    assert not found.doubts
    assert found.blocks is not None
    return found.blocks.apply(plain_model(name="m", source="flags", **found.model))


def masks_of(model: ModelSpec) -> list[int]:
    """Return the window of every layer, 0 for none."""
    return [block.mask.window for layer in model.layers for block in layer if isinstance(block, Attention)]


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ("--window-size 127,0 --window-attn-skip-freq 2", [128, 0] * 4),
        ("--window-size 127 0 --window-attn-skip-freq 4", [128, 128, 128, 0] * 2),
        ("--window-size '(1023,0)'", [1024] * 8),
        ("--window-size 127,0 --window-attn-skip-freq '([1]*6+[0]*2)'", [128] * 6 + [0, 0]),
        ("--window-size -1,0", [0] * 8),
        ("", [0] * 8),
    ],
)
def test_windows(flags: str, windows: list[int]) -> None:
    """A query sees as many keys as the first number says, and its own; every so manieth layer sees all."""
    assert masks_of(model_of(GROUPED + flags)) == windows


def test_sinks_gates_and_latent_experts() -> None:
    """Each changes its own block, and none of the others."""
    model = model_of(f"{GROUPED}{EXPERTS}--softmax-type learnable --attention-output-gate --moe-latent-size 256")
    plain = model_of(GROUPED + EXPERTS)

    mixer, routed = model.layers[0]
    assert isinstance(mixer, Attention)
    assert (mixer.sinks, mixer.gate_size) == (True, 16 * 64)
    assert isinstance(routed, Experts)
    assert routed.latent_size == 256
    assert plain.is_plain
    assert not model.is_plain


def test_gated_delta_nets_and_sparse_attention() -> None:
    """Three layers of four are gated delta nets; latent attention gets the indexer's sizes."""
    nets = model_of(f"{GROUPED}--experimental-attention-variant gated_delta_net --linear-attention-freq 4")
    sparse = model_of(f"{LATENT}--experimental-attention-variant dsa --dsa-indexer-topk 512 --dsa-indexer-n-heads 8")

    assert [isinstance(layer[0], GatedDeltaNet) for layer in nets.layers] == [True, True, True, False] * 2
    mixer = sparse.layers[0][0]
    assert isinstance(mixer, SparseLatentAttention)
    assert (mixer.mask, mixer.index_heads, mixer.index_head_dim) == (Mask(window=512), 8, 128)


def test_what_cannot_be_read_is_asked() -> None:
    """A window or a pattern that is none of the known forms is a doubt, never dropped."""
    assert [one.flag for one in read(f"{SIZES}--window-size wide").doubts] == ["--window-size"]
    found = read(f"{SIZES}--window-size 127,0 --window-attn-skip-freq often")
    assert [one.flag for one in found.doubts] == ["--window-attn-skip-freq"]


@pytest.mark.parametrize(
    "flags",
    [
        f"{GROUPED}--window-size 127,0 --window-attn-skip-freq 2",
        f"{GROUPED}{EXPERTS}--experimental-attention-variant gated_delta_net --linear-attention-freq 4",
        f"{LATENT}{EXPERTS}--experimental-attention-variant dsa --mtp-num-layers 1",
    ],
)
def test_a_file_of_listed_blocks_is_the_same_model(flags: str) -> None:
    """What `init` writes is read as the model that the flags describe, in the fewest layers."""
    model = model_of(flags)
    text = model_text(model, Path("own.sh"))

    read_back = listed_model(yaml.safe_load(text), name=model.name, file="m.yaml")
    assert (read_back.layers, read_back.head, read_back.embedding) == (model.layers, model.head, model.embedding)
    assert read_back.num_mtp_layers == model.num_mtp_layers
    assert len(listed_keys(model)["layers"]) < 8
