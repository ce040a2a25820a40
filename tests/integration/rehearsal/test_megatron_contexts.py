"""Rehearsals of Megatron-LM with context parallelism: what Transformer Engine's own code sends, by hand."""

from __future__ import annotations

import pytest

from tests.support.rehearsal.megatron_study import needs_megatron, write_study
from tests.support.rehearsal.rehearsed import rehearsed

pytestmark = [pytest.mark.slow, needs_megatron()]

HIDDEN, LAYERS, KEYS, LENGTH, CP = 512, 8, 256, 1024, 2
MICRO_BATCHES = 2
"""Of 8 sequences on 4 replicas."""
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


def answer_of(folder, *flags):
    """Answer of the first rank of cp=2, dp=4."""
    (answer,) = rehearsed(write_study(folder, *NO_DROPOUT, *flags), "--config", "cp=2,dp=4,mbs=1")["ranks"]
    assert answer["verdict"] == "accepted", answer["error"]
    return answer


def test_a_ring_passes_keys_and_values_on(tmp_path):
    """Of two ranks with half of the sequence each sends keys and values once forward; backward them and gradients."""
    answer = answer_of(tmp_path)

    sent = {one["size_bytes"]: one["count"] for one in answer["collectives"] if one["name"] == "send"}
    both = 2 * LENGTH // CP * KEYS * 2
    assert sent == {both: 3 * LAYERS * MICRO_BATCHES * (CP - 1)}
