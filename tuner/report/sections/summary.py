"""First section: the best configuration, its figures, and the confidence in it."""

from __future__ import annotations

from collections import Counter

from costmodels.job.parallel_config import DEGREES
from hardware.rounding import measured, predicted
from trials.backend import CLOCK_WORDS
from tuner.economics.cost_words import limited_in_words
from tuner.economics.device_time import device_time_of, duration, hours, payback_of
from tuner.economics.training import limited_of
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, concatenate, section, tag
from tuner.report.sections.outcomes import outcomes_table
from tuner.report.words import MISSING, format_value, in_short, percent, plural, predicted_seconds, seconds
from tuner.storage.record import counted, excused_in_words, num_proxies, num_pruned, num_running, saved_s, step_time_of
from tuner.subject.ability import Ability


def summary_section(data: ReportData) -> Html:
    """Render the best configuration with its figures, the reason for stopping, and the space searched."""
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
        tag(
            "span",
            tag("b", name),
            format_value(value),
            class_="chip quiet" if name in DEGREES and value == 1 else "chip",
        )
        for name, value in values.items()
    ]
    return tag("div", *chips, class_="chips")


def _figures(data: ReportData) -> Html:
    best_s = data.best_step_time_s
    cards = [
        _card("step time", (seconds if data.best else predicted_seconds)(best_s), _source_words(data)),
        _throughput_card(data),
        _card(
            "MFU", percent(data.mfu(best_s)) if best_s else MISSING, "of the devices' peak, counting model FLOPs only"
        ),
        _reference_card(data),
        _limits_card(data),
        _prior_card(data),
        _card("trials", f"{len(counted(data.records)):,}", _trial_words(data)),
        _device_time_card(data),
        _card(
            "confidence",
            MISSING if data.p_star is None else f"{data.p_star:.2f}",
            f"that no untried configuration is faster; the search stops above {data.request.search.confidence:g}",
        ),
    ]
    return tag("div", *cards, class_="cards")


def _card(name: str, figure: str, note: str) -> Html:
    return tag("div", tag("h3", name), tag("p", figure, class_="figure"), tag("p", note, class_="note"), class_="card")


def _throughput_card(data: ReportData) -> Html | None:
    """Render the throughput; None for a step of the user's own, which has no tokens."""
    if not data.problem.subject.has(Ability.TOKENS):
        return None
    tokens_per_s = data.problem.subject.throughput(data.best_step_time_s) if data.best_step_time_s else None
    known = measured if data.best else predicted
    return _card("throughput", MISSING if tokens_per_s is None else known(tokens_per_s), "tokens/s per device")


def _source_words(data: ReportData) -> str:
    """Describe the origin of the step time."""
    if data.best:
        return f"trial {data.best.number}, {data.source_in_words}"
    return data.extrapolated.in_words if data.extrapolated else ""


def _reference_card(data: ReportData) -> Html | None:
    """Render the gain over the reference; None where there is none."""
    compared = data.compared
    if compared is None:
        return None
    reference, own_s = compared.reference, compared.step_time_s
    name = f"over {reference.in_words}"
    if compared.reason:
        return _card(name, MISSING, compared.not_compared)
    basis = f"takes {seconds(own_s)} per step" if own_s is not None else f"was {compared.basis_in_words}"
    if compared.gain is None:
        return _card(name, MISSING, f"{reference.in_words} {basis}")
    notes = [
        f"as fast{'' if own_s else ', predicted'}",
        compared.interval_in_words,
        f"{reference.in_words} {basis}",
        compared.luck_in_words,
    ]
    return _card(name, f"{compared.gain:.2f}\N{MULTIPLICATION SIGN}", "; ".join(filter(None, notes)))


def _limits_card(data: ReportData) -> Html | None:
    """Render what the training takes and which limits it breaks; None for a study without limits of time or cost."""
    training = limited_of(data.prepared, data.best, data.extrapolated)
    if not data.request.economics.limits.are_set or (data.best is None and data.extrapolated is None):
        return None
    figure = MISSING if training is None else "broken" if training.breaks else "kept"
    return _card("limits", figure, limited_in_words(data.request.economics, training))


def _prior_card(data: ReportData) -> Html:
    """Render the gain over the configuration that the cost model predicted to be fastest."""
    name, chosen = "over the cost model's first choice", data.prior_choice
    if chosen is None:
        return _card(name, MISSING, "there is no candidate")
    values = chosen.values(data.dimensions)
    what, best_s, own_s = in_short(values), data.best_step_time_s, step_time_of(data.records, values)
    if own_s and best_s and data.best:
        is_best = data.best.params == values
        note = (
            "the best is the configuration predicted to be fastest"
            if is_best
            else f"as fast by the measured steps; {what}, predicted to be fastest, takes {seconds(own_s)} per step"
        )
        return _card(name, f"{own_s / best_s:.2f}\N{MULTIPLICATION SIGN}", note)
    tried = [record for record in data.records if record.params == values and not record.is_proxy]
    ends = {record.status.in_words if record.status else "running" for record in tried}
    became = f"has no measured step: {', '.join(sorted(ends))}" if ends else "was not tried"
    return _card(name, MISSING, f"{what}, predicted to be fastest, {became}")


def _device_time_card(data: ReportData) -> Html:
    """Render the device time of the trials, and the training steps that repay it."""
    spent = device_time_of(data.request, data.records)
    payback = payback_of(data.request, data.compared, data.records)
    notes = [
        f"{hours(spent.startup_device_s)} of them for start-up and warm-up"
        if spent.startup_device_s is not None
        else "for the measured steps on real devices; none were used"
    ]
    if payback is not None and data.reference is not None:
        steps = plural(payback.steps, "training step")
        notes.append(f"repaid after {steps} ({duration(payback.seconds)}) by the gain over {data.reference.in_words}")
    clock = data.request.trials.backend.clock
    if clock != "wall":
        notes.append(f"step times are in {CLOCK_WORDS[clock]}, which cannot be compared with wall time")
    budget = data.request.search.budget_device_hours
    notes += [f"budget {budget:,.4g} device-hours"] if budget is not None else []
    return _card("device-hours of trials", hours(spent.device_s), "; ".join(notes))


def _trial_words(data: ReportData) -> str:
    failed = [record for record in counted(data.records) if record.has_failed]
    kinds = Counter(record.status for record in failed)
    failures = [f"{count} {status.in_words}" for status, count in kinds.items() if status]
    excused = excused_in_words(data.records)
    pruned = num_pruned(data.records)
    running = num_running(data.records)
    proxies = num_proxies(data.records)
    return "; ".join(
        [
            f"{len(failed)} failed ({', '.join(failures)})" if failures else "none failed",
            *([excused] if excused else []),
            *([f"{pruned} stopped early, about {seconds(saved_s(data.records))} of steps saved"] if pruned else []),
            *([f"{proxies} of a proxy job"] if proxies else []),
            *([f"{running} running"] if running else []),
            f"budget {data.request.search.max_trials:,}",
        ]
    )


def _stop(data: ReportData) -> Html:
    if data.stop_reason is None:
        return tag("p", "The search has not ended.")
    sentence = data.stop_reason.sentence
    return tag("p", f"The search ended: {sentence}.")


def _funnel(data: ReportData) -> Html:
    """Render the number of configurations left after each step of the pruning."""
    space = data.candidates.space
    by_rules = sum(count for rule, count in space.removed.items() if rule != "memory")
    tried = len({tuple(record.params.items()) for record in data.records if not record.is_proxy})
    by_proxy = len({tuple(record.params.items()) for record in data.records if record.is_proxy})
    steps: list[tuple[int, str]] = [
        (space.num_before_memory + by_rules, "raw combinations"),
        (space.num_before_memory, "obey the rules"),
        (len(space.grid), "may fit in memory"),
        *([(by_proxy, "tried as proxy job")] if by_proxy else []),
        (tried, "tried at full size" if by_proxy else "tried"),
    ]
    if not data.problem.subject.has(Ability.RULES):
        steps = [(len(space.grid), plural(len(space.grid), "measured row").partition(" ")[2]), (tried, "tried")]
    items: list[Content] = [tag("li", tag("b", f"{count:,}"), " ", words) for count, words in steps]
    return concatenate(tag("ol", *items, class_="funnel"))
