"""Rehearsals of Megatron-LM's experts by the dispatchers `allgather` and `flex`."""

from __future__ import annotations

import pytest

from tests.support.rehearsal.megatron_study import needs_megatron, write_study
from tests.support.rehearsal.rehearsed import calls, rehearsed

pytestmark = [pytest.mark.slow, needs_megatron()]

HIDDEN, LAYERS, LENGTH = 512, 8, 1024
EXPERTS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-grouped-gemm", "--moe-router-dtype", "fp32"),
    *("--expert-model-parallel-size", "4"),
)


def answer_of(folder, *flags):
    """Answer of rank 5 of eight replicas."""
    study = write_study(folder, *flags)
    (answer,) = rehearsed(study, "--config", "dp=8,mbs=1", "--ranks", "5")["ranks"]
    assert answer["verdict"] == "accepted", answer["error"]
    return answer


def test_gathered_tokens_are_those_of_all_ranks_of_experts(tmp_path):
    """The tokens of four ranks are gathered in every layer, 1,024 of each; gradients come back in fp32."""
    answer = answer_of(tmp_path, *EXPERTS, "--moe-token-dispatcher-type", "allgather")

    size = 4 * LENGTH * HIDDEN * 2
    gathers = [one for one in answer["collectives"] if one["size_bytes"] == size and "allgather" in one["name"]]
    assert sum(one["count"] for one in gathers) == LAYERS
    assert all(len(one["ranks"]) == 4 for one in gathers)
    assert any("tokens of each expert" in place for place in answer["invented"])


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_deep_ep_stands_for_the_exchange(tmp_path, backend):
    """The experts' parameters are those of `alltoall`, nothing of PyTorch exchanges tokens, and that is told."""
    flags = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend)
    answer = answer_of(tmp_path, *EXPERTS, *flags)

    assert calls(answer, "alltoall") == 0
    assert any("deep_ep, which is not installed here" in place for place in answer["invented"])


def test_a_fused_router_is_fewer_operators(tmp_path):
    """Kernels take the place of the router's operators, and its weights stay."""
    usual = answer_of(tmp_path, *EXPERTS)
    fused = answer_of(tmp_path, *EXPERTS, "--moe-router-fusion")

    assert fused["parameters"] == usual["parameters"]
    assert fused["operators"] < usual["operators"]


def test_shards_of_megatron_fsdp_are_trusted(tmp_path):
    """A rank that holds whole tensors passes the check that other ranks hold the rest, and shards its weights."""
    flags = ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
    answer = answer_of(tmp_path, *EXPERTS, *flags, "--ckpt-format", "fsdp_dtensor", "--calculate-per-token-loss")

    assert calls(answer, "allgather") > 0
