"""Page of accuracy: how far predictions were from measured runs of sources that no fit had seen."""

from __future__ import annotations

from tuner.atlas.accuracy import Accuracy
from tuner.atlas.pages.frame import lines, page
from tuner.atlas.places import AtlasJob
from tuner.report.markup import Content, section, table
from tuner.report.words import MISSING, percent


def accuracy_page(found: Accuracy, job: AtlasJob) -> str:
    """Render the page.

    Args:
        found: Errors of each source.
        job: Job of the atlas.
    """
    rows: list[list[Content]] = [
        [
            each.source,
            each.tuned_by,
            f"{each.runs:,}",
            percent(each.step_error),
            percent(each.step_signed, signed=True),
            percent(each.after_one),
            percent(each.inside_95),
            f"{each.peaks:,}" if each.peaks else MISSING,
            percent(each.peak_error),
        ]
        for each in found.sources
    ]
    heads: list[Content] = [
        "source",
        "tuned by",
        "runs",
        "step: median error",
        "signed",
        "after one measured run",
        "in 95% interval",
        "peaks",
        "memory: median error",
    ]
    told = (
        "Each source's runs were predicted by profiles fitted without their publisher. The error is the median of "
        "|predicted / measured - 1| over its runs; a negative signed error means longer steps than predicted. "
        f"Measured by {found.made_with}",
    )
    return page(
        "Accuracy by source",
        section("accuracy", "Errors of runs that no fit has seen", lines(*told), table(heads, rows, numeric=_NUMERIC)),
        root="",
        job=job,
    )


_NUMERIC = frozenset(range(2, 9))
