"""Configurations that were removed before any trial, by rule."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, section, table, tag
from tuner.report.words import percent
from tuner.subject.ability import Ability

TITLE = "Removed configurations"


def pruning_section(data: ReportData) -> Html:
    """Render a table of the rules, the most effective first, and of the memory limit."""
    space, config = data.candidates.space, data.prepared
    if words := config.problem.subject.refusal(Ability.RULES):
        return section("pruning", TITLE, tag("p", words))
    reasons = data.reasons
    total = space.num_before_memory + sum(count for rule, count in space.removed.items() if rule != "memory")
    ranked = sorted(space.removed.items(), key=lambda entry: -entry[1])
    rows: list[list[Content]] = [
        [tag("code", rule), reasons.get(rule, ""), f"{count:,}", percent(count / total)] for rule, count in ranked
    ]
    words = (
        "Rules remove raw combinations of degrees; each is counted under the first rule that it breaks. The memory "
        "limit removes configurations that obey all rules."
    )
    head: list[Content] = ["rule", "reason", "removed", "share"]
    return section("pruning", TITLE, tag("p", words), table(head, rows, numeric=frozenset({2, 3})))
