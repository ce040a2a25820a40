"""Why configurations fell before any trial."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, section, table, tag
from tuner.report.words import percent

TITLE = "Why configurations fell"


def pruning_section(data: ReportData) -> Html:
    """A table of the rules, the most effective first, and what memory dropped."""
    space, config = data.candidates.space, data.config
    if config.measured is not None:
        words = "A replay offers exactly the configurations that were measured, so no rule dropped any."
        return section("pruning", TITLE, tag("p", words))
    reasons = data.reasons
    total = space.num_before_memory + sum(count for rule, count in space.removed.items() if rule != "memory")
    ranked = sorted(space.removed.items(), key=lambda entry: -entry[1])
    rows: list[list[Content]] = [
        [tag("code", rule), reasons.get(rule, ""), f"{count:,}", percent(count / total)] for rule, count in ranked
    ]
    words = (
        "Rules drop raw combinations, each counted under the first rule that it breaks; memory drops configurations "
        "that obey all rules."
    )
    head: list[Content] = ["rule", "reason", "dropped", "of all"]
    return section("pruning", TITLE, tag("p", words), table(head, rows, numeric=frozenset({2, 3})))
