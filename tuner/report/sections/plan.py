"""Sharding plan of the best configuration's layers, in studies with a planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.job.parallel_config import HAND
from trials.backend import TrialAbility
from tuner.plans.layer_planning import shape_text
from tuner.plans.layer_plans import differences_in_words, pin_in_words
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, concatenate, empty_section, section, table, tag
from tuner.report.words import in_short, percent, predicted_seconds

TITLE = "Sharding plan"


def plan_section(data: ReportData) -> Html:
    """Render the plan's collectives and its differences from the plan by hand; empty without a planner."""
    planner = data.problem.planning.name
    if planner == "megatron":
        return Html("")
    if data.best_config is None:
        return empty_section("plan", TITLE, "The plan is shown once a trial has completed.")
    chosen = data.best_config
    plan = data.problem.layer_plans.get(shape_text(chosen))
    if plan is None:
        words = (
            f"The layers of {in_short(chosen.values(data.dimensions))} are not planned: each device holds whole "
            "layers, there is no plan by hand to compare with, or other shapes of layers came first. "
            "They are sharded by hand."
        )
        return empty_section("plan", TITLE, words)
    return section(
        "plan",
        TITLE,
        tag(
            "p",
            _describe(
                plan,
                has_run=chosen.plan != HAND,
                is_trained=TrialAbility.TRAINING in data.request.trials.backend.abilities,
            ),
        ),
        _collectives(plan),
        _differences(plan),
        _pins(plan),
    )


def _describe(plan: Mapping[str, Any], *, has_run: bool, is_trained: bool) -> str:
    """Describe the plan of the best configuration's shape; `has_run` if it ran, and not the one by hand beside it."""
    axes = ", ".join(f"{name} {size}" for name, size in plan["mesh"].items())
    own_s, by_hand_s = plan["step_time_s"], plan["by_hand_step_time_s"]
    words = (
        f"The layers of the best configuration as {plan['planner']} shards them over {axes}, for "
        f"{plan['layers']} and {plan['micro_batches']:,} micro-batch{'es' if plan['micro_batches'] > 1 else ''}. "
    )
    ratio = plan["predicted_ratio"]
    if not plan["differs"]:
        words += "It equals the plan that frameworks write by hand, and takes "
        return words + f"{predicted_seconds(own_s)} without overlap. "
    words += f"Without overlap they take {predicted_seconds(own_s)}, by hand {predicted_seconds(by_hand_s)}"
    if ratio is not None:
        words += f"; with overlap, the step time is predicted to change by {percent(ratio - 1, signed=True)}"
    if not has_run:
        return words + ". The best configuration ran with the plan by hand, and not with this one."
    if is_trained:
        return words + ". Its trial trained with this plan."
    return words + ". No framework runs this plan yet: times are predicted, and trials are simulated."


def _collectives(plan: Mapping[str, Any]) -> Html:
    rows: list[list[Content]] = [
        [
            each["kind"],
            each["axes"],
            f"{each['times']:,}",
            f"{each['bytes'] / 1e6:,.1f}",
            predicted_seconds(each["seconds"]),
        ]
        for each in plan["collectives"]
    ]
    return table(["collective", "axes", "times", "MB", "time"], rows, numeric=frozenset({2, 3, 4}))


def _differences(plan: Mapping[str, Any]) -> Html | None:
    rows: list[list[Content]] = [list(row) for row in differences_in_words(plan)]
    if not rows:
        return None
    return concatenate(tag("h3", "Differences from the plan by hand"), table(["operator", "planned", "by hand"], rows))


def _pins(plan: Mapping[str, Any]) -> Html | None:
    if not plan["pins"]:
        return None
    lines = map(pin_in_words, plan["pins"])
    return concatenate(tag("h3", "Pins"), tag("ul", *(tag("li", line) for line in lines)))
