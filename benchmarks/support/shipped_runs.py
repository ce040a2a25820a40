"""Measured runs that the project ships: what benchmarks read if no file is named."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "measured" / "runs"


def shipped_runs() -> list[Path]:
    """Return all files of configs/measured/runs, those of failed runs included, by name."""
    return sorted(FOLDER.glob("*.csv"))
