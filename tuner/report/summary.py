"""The first section: what was found, and how sure it is."""

from __future__ import annotations

from collections import Counter

from costmodels.parallel import DEGREES
from trials.backend import Status
from tuner.candidates import tokens_per_s_per_device
from tuner.record import num_proxies, num_pruned, saved_s
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, joined, section, tag
from tuner.report.outcomes import outcomes_table
from tuner.report.words import MISSING, percent, plural, seconds, shown


def summary_section(data: ReportData) -> Html:
    """The best configuration with its figures, why the search ended, and what it searched."""
    return section(
        "summary",
        "Result",
        _synthetic_banner(data),
        _headline(data),
        _figures(data),
        _stop(data),
        _funnel(data),
        outcomes_table(data),
    )


def _synthetic_banner(data: ReportData) -> Html:
    if data.origin != "synthetic":
        return Html("")
    return tag(
        "p",
        tag("strong", "SYNTHETIC"),
        " These step times come from a simulated world. Nothing here was measured on real devices.",
        class_="banner",
    )


def _headline(data: ReportData) -> Html:
    if data.best_config is None:
        return tag("p", "No trial has completed yet, so there is no best configuration.", class_="empty")
    values = data.best_config.values(data.dimensions)
    chips = [
        tag("span", tag("b", name), shown(value), class_="chip quiet" if name in DEGREES and value == 1 else "chip")
        for name, value in values.items()
    ]
    return tag("div", *chips, class_="chips")


def _figures(data: ReportData) -> Html:
    setting, best_s, records = data.config.setting, data.best_step_time_s, data.records
    reference_s = data.reference_step_time_s
    role = data.reference.role if data.reference else "expert"
    cards = [
        _card("step time", seconds(best_s), _source_words(data)),
        _card(
            "throughput",
            f"{tokens_per_s_per_device(setting, best_s):,.0f}" if best_s else MISSING,
            "tokens/s per device",
        ),
        _card("MFU", percent(data.mfu(best_s)) if best_s else MISSING, "of the devices' peak, model FLOPs only"),
        _card(
            f"against the {role}",
            f"{reference_s / best_s:.2f}\N{MULTIPLICATION SIGN}" if reference_s and best_s else MISSING,
            _reference_words(data),
        ),
        _card("trials", f"{len(records):,}", _trial_words(data)),
        _card(
            "p_star",
            MISSING if data.p_star is None else f"{data.p_star:.2f}",
            f"share of draws whose fastest candidate was tried; enough above {data.config.search.confidence:g}",
        ),
    ]
    return tag("div", *cards, class_="cards")


def _card(name: str, figure: str, note: str) -> Html:
    return tag("div", tag("h3", name), tag("p", figure, class_="figure"), tag("p", note, class_="note"), class_="card")


def _source_words(data: ReportData) -> str:
    """Where the step time comes from."""
    if data.best:
        return f"trial {data.best.number}, {data.source_in_words}"
    return data.extrapolated.in_words if data.extrapolated else ""


def _reference_words(data: ReportData) -> str:
    if data.reference is None:
        return "the study names no expert configuration"
    if data.reference_step_time_s is None:
        return f"{data.reference.in_words} has no measured step"
    whose = "the expert's" if data.reference.role == "expert" else "the baseline's"
    return f"as fast; {whose} step takes {seconds(data.reference_step_time_s)}"


def _trial_words(data: ReportData) -> str:
    kinds = Counter(record.status for record in data.failed)
    failures = [f"{count} {_STATUS_WORDS[status]}" for status, count in kinds.items() if status]
    pruned = num_pruned(data.records)
    running = sum(not record.finished for record in data.records)
    proxies = num_proxies(data.records)
    return "; ".join(
        [
            f"{len(data.failed)} failed ({', '.join(failures)})" if failures else "none failed",
            *([f"{pruned} stopped early, about {seconds(saved_s(data.records))} of steps saved"] if pruned else []),
            *([f"{proxies} of a smaller job"] if proxies else []),
            *([f"{running} running"] if running else []),
            f"budget {data.config.search.max_trials:,}",
        ]
    )


_STATUS_WORDS = {status: status.value.replace("_", " ") for status in Status}


def _stop(data: ReportData) -> Html:
    if data.stop_reason is None:
        return tag("p", "The search has not ended.")
    sentence = data.stop_reason.sentence
    return tag("p", f"The search ended: {sentence}.")


def _funnel(data: ReportData) -> Html:
    """How many configurations were left after each step of the pruning."""
    space = data.candidates.space
    by_rules = sum(count for rule, count in space.removed.items() if rule != "memory")
    tried = len({tuple(record.params.items()) for record in data.records if not record.is_proxy})
    by_proxy = len({tuple(record.params.items()) for record in data.records if record.is_proxy})
    steps: list[tuple[int, str]] = [
        (space.num_before_memory + by_rules, "raw combinations"),
        (space.num_before_memory, "obey the rules"),
        (len(space.grid), "predicted to fit in memory"),
        *([(by_proxy, "tried by a smaller job")] if by_proxy else []),
        (tried, "tried at full size" if by_proxy else "tried"),
    ]
    if data.config.measured is not None:
        steps = [(len(space.grid), plural(len(space.grid), "measured row").partition(" ")[2]), (tried, "tried")]
    items: list[Content] = [tag("li", tag("b", f"{count:,}"), " ", words) for count, words in steps]
    return joined(tag("ol", *items, class_="funnel"))
