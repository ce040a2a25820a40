"""Rehearsals of torchtitan itself: its Trainer, as one rank, without a device, a data set or a tokenizer."""

from __future__ import annotations

import pytest

from tests.support.rehearsal.titan_study import FFN, HIDDEN, LAYERS, LENGTH, VOCABULARY, needs_torchtitan, write_study
from tests.support.studies.command_line import in_process

pytestmark = [pytest.mark.slow, needs_torchtitan()]

LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
"""Parameters of a layer, by hand: attention, the gated MLP, two norms."""
TABLE = VOCABULARY * HIDDEN


def rehearsed(study, *words, status=0):
    """The answers of a rehearsal."""
    done = in_process("rehearse", study, "--yes", "--json", *words, cwd=study.parent, timeout_s=600)
    assert done.status == status, done.err
    return done.json


def test_a_rank_holds_fp32_shards(tmp_path):
    """Of dp=8: 4 bytes a weight and 8 of the optimizer."""
    found = rehearsed(write_study(tmp_path), "--config", "dp=8,mbs=1,recompute=none,zero_stage=3")

    (answer,) = found["ranks"]
    parts, parameters = answer["parts_bytes"], answer["parameters"]
    assert parameters == (LAYERS * LAYER + 2 * TABLE + HIDDEN) / 8
    assert parts["weights"] == pytest.approx(4 * parameters, rel=0.01)
    assert parts["optimizer"] == pytest.approx(8 * parameters, rel=0.02)
    assert answer["micro_batches"] == [2, 2]
    assert sum(parts.values()) == answer["peak_bytes"]


def test_tensors_split_over_tp_are_counted(tmp_path):
    """Each layer keeps four inner values of the MLP, which tp=2 halves, and the inputs that its products gathered."""
    study = write_study(tmp_path)
    (answer,) = rehearsed(study, "--config", "tp=2,dp=4,mbs=1,recompute=none,zero_stage=3")["ranks"]

    inner, gathered = 4 * 2 * LENGTH * FFN // 2, 2 * 2 * LENGTH * HIDDEN
    assert answer["parts_bytes"]["activations"] > LAYERS * (inner + gathered)
    assert any(one["name"] == "all_gather_into_tensor" and len(one["ranks"]) == 2 for one in answer["collectives"])


def test_stages_exchange_shapes_and_messages(tmp_path):
    """Each micro-batch of 2,048 tokens crosses once each way; that PyTorch is older than it should be is told."""
    study = write_study(tmp_path)
    found = rehearsed(study, "--config", "pp=2,dp=4,mbs=1,recompute=full,zero_stage=2")

    assert [one["verdict"] for one in found["ranks"]] == ["accepted"] * 2
    size = 2 * LENGTH * HIDDEN
    for answer, peer in zip(found["ranks"], (4, 0), strict=True):
        sent = {(one["name"], one["peer"], one["size_bytes"]): one["count"] for one in answer["collectives"]}
        assert sent["send", peer, size] == sent["recv_", peer, size] == 4
    assert any("pipelining of a newer PyTorch" in place for place in found["ranks"][0]["invented"])


def test_replicas_reduce_their_shards(tmp_path):
    """Shards over four ranks, twice: the sums of each layer go over the two replicas."""
    study = write_study(tmp_path, "--parallelism.data_parallel_replicate_degree", "2")
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=2,recompute=full,zero_stage=3,dp_shard=4")["ranks"]

    assert answer["verdict"] == "accepted"
    assert answer["parameters"] == (LAYERS * LAYER + 2 * TABLE + HIDDEN) / 4
    assert any("allreduce" in one["name"] and len(one["ranks"]) == 2 for one in answer["collectives"])


def test_experts_get_equal_tokens(tmp_path):
    """Experts over two ranks: the counts of tokens are told as invented."""
    flags = ("--parallelism.expert_parallel_degree", "2", "--training.disable_cuda_graphs")
    study = write_study(tmp_path, *flags, module="qwen3", recipe="qwen3_moe_debug")
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=1,recompute=full,zero_stage=3")["ranks"]

    assert answer["verdict"] == "accepted"
    assert any("tokens of each expert" in place for place in answer["invented"])


def test_what_torchtitan_refuses_is_refused_in_its_words(tmp_path):
    """Attention of variable lengths over context parallel ranks: torchtitan's own error, with its file and line."""
    study = write_study(tmp_path, recipe="llama3_debugmodel_varlen_attn")
    words = ("--config", "cp=2,dp=4,mbs=1,recompute=full,zero_stage=3")
    (answer,) = rehearsed(study, *words, status=1)["ranks"]

    assert answer["verdict"] == "refused"
    assert "Varlen attention is not supported with CP" in answer["error"]
    assert any(line.startswith("torchtitan/") for line in answer["where"])


def test_a_memory_budget_is_unknown(tmp_path):
    """What a compiler would keep is not known without it."""
    study = write_study(tmp_path, "--compile.enable", "activation-checkpoint:memory-budget")
    # the exporter's flags end with a mode of their own
    study.write_text(study.read_text().replace(', "{flags}"', "").replace("  flags: torchtitan\n", ""))
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=1,zero_stage=3", status=1)["ranks"]

    assert answer["verdict"] == "unknown"
    assert "memory budget" in answer["error"]
