"""ManuMatic's tables: the order of the rows on a few layers."""

from dataclasses import replace

import pytest

from benchmarks.papers import manumatic_tables
from benchmarks.papers.manumatic_rows import (
    D_REC,
    EXPERT,
    FULL,
    MEGATRON,
    PIN,
    PLANNED_STAGES,
    SCENARIOS,
    WIDE,
    best_of,
    rows_of,
)

MIXTRAL = replace(SCENARIOS[1], layers=4, order="reverse")
LLAMA = replace(SCENARIOS[2], layers=4)
QWEN = replace(SCENARIOS[3], layers=16, stages=(8,), sequences=8)


def speed_ups(scenario, *rows):
    """Return the speed-up of each row over D-Rec."""
    base_s = best_of(scenario, D_REC).score.step_s
    return {row: base_s / best_of(scenario, row).score.step_s for row in rows}


def test_a_pin_on_experts_comes_near_the_expert():
    """In MindSpore's order of visits D-Rec without experts is slowest, and a pin gains most of what an expert does."""
    found = speed_ups(MIXTRAL, PIN, EXPERT)

    assert 1.0 < found[PIN] <= found[EXPERT]
    assert found[PIN] - 1 > 0.5 * (found[EXPERT] - 1)


def test_the_shipped_order_does_not_find_experts_by_itself():
    """With experts in its vocabulary D-Rec still cuts the batch, in that order of visits."""
    assert speed_ups(MIXTRAL, FULL)[FULL] == pytest.approx(1.0)


def test_a_pin_on_the_sequence_beats_tensor_parallelism():
    """With fewer sequences than devices: D-Rec without the sequence, then Megatron's way with it, then the pin."""
    found = speed_ups(LLAMA, EXPERT, PIN, WIDE)

    assert 1.0 < found[EXPERT] < found[PIN]
    assert found[PIN] == pytest.approx(found[WIDE], rel=0.05)


def test_as_many_sequences_as_devices_leave_nothing_to_pin():
    """Then the batch cuts everything, and a pin on the sequence gains next to nothing."""
    found = speed_ups(replace(LLAMA, sequences=8), PIN)

    assert found[PIN] < 1.05


def test_both_parts_gain_together():
    """With eight stages a pin and planned stages each gain alone, and more together; the expert stands between."""
    found = rows_of(QWEN)
    step_s = {row: each.score.step_s for row, each in found.items()}

    assert step_s[PIN + PLANNED_STAGES] < step_s[PIN] < step_s[D_REC]
    assert step_s[PIN + PLANNED_STAGES] < step_s[D_REC + PLANNED_STAGES] <= step_s[D_REC]
    assert step_s[PIN + PLANNED_STAGES] < step_s[EXPERT] < step_s[D_REC]


def test_the_program_tells_all_rows(answered):
    """Every order has every row beside the paper's figure, where there is one, and a line of assumptions."""
    figures = answered(manumatic_tables, "--table", 2, "--order", "price", "reverse")

    rows = [row for row in figures["rows"] if row["paper"] is not None]
    assert [(row["order"], row["row"]) for row in rows] == [
        (order, row) for order in ("price", "reverse") for row in (MEGATRON, D_REC, PIN, EXPERT)
    ]
    assert all(row["speed_up"] == 1.0 for row in rows if row["row"] == D_REC)
    assert [row["assumption"] for row in figures["assumptions"]] == ["as assumed"] * 2
