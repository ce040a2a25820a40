"""Comparison of a study's facts with the truth, and the verdict on each way in."""

from __future__ import annotations

from typing import Any

from benchmarks.launch_scripts.study import Outcome
from benchmarks.launch_scripts.truth import SIZES, Truth

RIGHT, AFTER, REFUSED, WRONG = "right", "right after answers", "refused", "wrong"
VERDICTS = (RIGHT, AFTER, REFUSED, WRONG)


def verdict(outcome: Outcome, truth: Truth) -> tuple[str, list[str]]:
    """Return the verdict and the differences, each as `key: the study's value, not the true one`.

    A study of what is no training of a decoder-only transformer is wrong as a whole, a refusal of it is right.
    """
    if outcome.refused:
        return (RIGHT if truth.refusal else REFUSED), []
    if truth.refusal:
        return WRONG, [f"kind: a study was made in spite of: {truth.refusal}"]
    differences = _differences(outcome, truth)
    if differences:
        return WRONG, differences
    return (AFTER if outcome.asked else RIGHT), []


def _differences(outcome: Outcome, truth: Truth) -> list[str]:
    """Return the facts that differ. Facts that an answer stated, or that the truth does not have, are left out."""
    expected: dict[str, Any] = dict(truth.facts)
    if "model" in outcome.answered:
        expected = {name: value for name, value in expected.items() if name not in SIZES}
    elif truth.padded and outcome.facts.get("vocab") not in truth.padded:
        expected["vocab"] = truth.padded[0]
    return [
        f"{name}: {outcome.facts.get(name)}, not {value}"
        for name, value in expected.items()
        if outcome.facts.get(name) != value and name not in outcome.answered
    ]
