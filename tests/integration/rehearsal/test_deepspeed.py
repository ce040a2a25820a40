"""Rehearsals of DeepSpeed's own engine, against the formulas of ZeRO (Rajbhandari et al. 2020, sections 3 and 7)."""

from __future__ import annotations

import pytest

from tests.support.rehearsal.plain_study import rehearsed, sent

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

RANKS, HIDDEN = 8, 512
PARAMETERS = 8 * HIDDEN * HIDDEN


@pytest.mark.parametrize(
    ("stage", "precision", "held", "batches"), [(1, "bf16", 1, 1), (2, "fp16", 1, 2), (3, "bf16", 8, 2)]
)
def test_a_rank_holds_and_sends_what_zero_says(tmp_path, stage, precision, held, batches):
    """Of 8 ranks: 2 bytes a weight, an eighth of them in stage 3; an eighth of 12 for the optimizer.

    Gradients of 2 bytes are reduced once a step in stage 1, and once a batch in the others. Weights are gathered after
    a step, or twice a batch in stage 3, which keeps the layers at the turn of forward and backward.
    """
    found = rehearsed(tmp_path, "zero.py", "--stage", str(stage), "--type", precision)

    assert found["verdict"] == "accepted", found["error"]
    assert found["parameters"] == PARAMETERS // held
    parts = found["parts_bytes"]
    assert parts["weights"] == 2 * PARAMETERS // held
    assert parts["optimizer"] == pytest.approx(12 * PARAMETERS / RANKS, rel=1e-3)
    reduced = sent(found, "reduce") - sum(
        one["size_bytes"] * one["count"] for one in found["collectives"] if one["size_bytes"] <= 8
    )
    assert reduced == batches * 2 * PARAMETERS
    gathered = sent(found, "gather")
    assert gathered == 2 * PARAMETERS if stage < 3 else 2 * PARAMETERS * batches <= gathered <= 4 * PARAMETERS * batches
