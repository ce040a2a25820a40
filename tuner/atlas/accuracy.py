"""Errors of predictions for sources of runs that no fit has seen, as the catalog keeps them (catalog/accuracy.yaml)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from costmodels.step.error_models import CATALOG_FILE
from hardware.io.config_file import read_mapping

ACCURACY_FILE = CATALOG_FILE.with_name("accuracy.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceAccuracy:
    """Errors of one source's runs.

    Attributes:
        source: Source of the runs, by its name in the catalog of sources.
        tuned_by: `vendor` or `user`: who chose software and flags.
        runs: Number of timed runs.
        step_error: Median of |predicted / measured - 1| of step times; None without timed runs.
        step_signed: Median of predicted / measured - 1; None without timed runs.
        after_one: Median error of a run where another configuration of its job was measured; None without such jobs.
        inside_95: Share of the runs inside their 95% intervals; None without timed runs.
        peaks: Number of runs with a measured peak of memory.
        peak_error: Median of |predicted / measured - 1| of these peaks; None without any.
    """

    source: str
    tuned_by: str
    runs: int
    step_error: float | None
    step_signed: float | None
    after_one: float | None
    inside_95: float | None
    peaks: int
    peak_error: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Errors of all sources.

    Attributes:
        made_with: Command that measured them.
        sources: Errors by source.
    """

    made_with: str
    sources: tuple[SourceAccuracy, ...]


def read_accuracy() -> Accuracy:
    """Read the errors that the catalog keeps."""
    return TypeAdapter(Accuracy).validate_python(read_mapping(ACCURACY_FILE))
