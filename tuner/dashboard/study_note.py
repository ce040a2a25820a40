"""Note on a study's page: the best so far, its gain, the confidence, and the failures."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hardware.rounding import MEASURED_DIGITS, PREDICTED_DIGITS, measured, predicted, rounded
from trials.backend import Status
from tuner.answers.basis import place_of
from tuner.answers.gain import Compared
from tuner.dashboard.markdown import code, paragraphs, plain, table
from tuner.dashboard.snapshot import Snapshot
from tuner.economics.cost_words import limited_in_words
from tuner.economics.training import limited_of
from tuner.report.words import after_trials, in_short, percent, plural, predicted_seconds, seconds
from tuner.search.population import Moment
from tuner.storage.record import TrialRecord, counted, excused_in_words, num_running, saved_s
from tuner.terminal.console import in_words

MOST_PROBABLE = 5
"""Number of most probable candidates that get a row."""

LAST_FAILURES = 8
"""Number of failures that get a row, the latest first; each trial's own page describes its failure too."""

STATUS_WORDS = {status: status.in_words for status in Status} | {Status.PRUNED: "stopped early"}
"""Words for each status of a trial."""


def study_note(seen: Snapshot) -> str:
    """Compose the study's note."""
    return paragraphs(
        _headline(seen),
        _synthetic(seen),
        table(["", ""], [[f"**{name}**", words] for name, words in _figures(seen)]),
        _population(seen),
        _failures(seen),
        _lessons(seen),
        "*Written by Meshtune each time the page is loaded. If you edit this note, your text is kept as it is; delete "
        "all of it to get this note back.*",
    )


def study_facts(seen: Snapshot) -> dict[str, Any]:
    """Collect the figures shown as the study's attributes; the dashboard's table shows five at once."""
    facts: dict[str, Any] = {}
    if seen.best_step_s is not None:
        facts["best step [s]" if seen.best else "best step by extrapolation [s]"] = rounded(
            seen.best_step_s, MEASURED_DIGITS if seen.best else PREDICTED_DIGITS
        )
    if seen.compared is not None and seen.compared.gain is not None:
        facts[f"times as fast as {seen.compared.reference.in_words}"] = rounded(
            seen.compared.gain, MEASURED_DIGITS if seen.compared.step_time_s else PREDICTED_DIGITS
        )
    if seen.p_star is not None:
        facts["confidence"] = rounded(seen.p_star, PREDICTED_DIGITS)
    return facts | {"search": _search(seen), "trials": _trials(seen)}


def _headline(seen: Snapshot) -> str:
    if seen.best is not None:
        source = seen.request.trials.backend.source_in_words
        words = [
            f"### Best so far: {seconds(seen.best.step_time_s)} per step",
            f"{code(in_words(seen.best.params))}, trial {seen.best.number}, {source}",
        ]
    elif seen.extrapolated is not None:
        words = [
            f"### Best by extrapolation: {predicted_seconds(seen.extrapolated.step_time_s)} per step",
            f"{code(in_words(seen.extrapolated.config))}, {seen.extrapolated.in_words}",
        ]
    else:
        return "### No trial has completed yet"
    words.append("" if seen.compared is None else _gain(seen.compared))
    return paragraphs(*words)


def _gain(compared: Compared) -> str:
    """Describe the gain over the reference, or why there is none."""
    reference = compared.reference
    if compared.gain is None:
        return compared.not_compared
    own_s = compared.step_time_s
    basis = f"whose step takes {seconds(own_s)}" if own_s is not None else f"which was {compared.basis_in_words}"
    beside = "; ".join(filter(None, [compared.interval_in_words, compared.luck_in_words]))
    return (
        f"**{compared.gain_in_words} times as fast as {reference.in_words}**, {basis}: "
        f"{code(in_words(reference.values))}" + (f" ({beside})" if beside else "")
    )


def _synthetic(seen: Snapshot) -> str:
    if seen.request.trials.backend.origin != "synthetic":
        return ""
    return "**SYNTHETIC**: these step times come from a simulated world, not from a measurement."


def _figures(seen: Snapshot) -> list[tuple[str, str]]:
    told_by = plural(sum(record.finished for record in seen.records), "trial")
    figures = [("search", _search(seen)), ("trials", _trials(seen))]
    figures.append(("told by", f"{told_by} of study {plain(seen.request.name)} in {code(place_of(seen.request))}"))
    if seen.p_star is not None:
        limit = seen.request.search.confidence
        words = f"{seen.p_star:.2f} that no untried configuration is faster; the search stops above {limit:g}"
        figures.append(("confidence", words))
    if seen.best_step_s is not None:
        tokens = seen.prepared.problem.subject.throughput(seen.best_step_s)
        known = measured if seen.best else predicted
        figures += [] if tokens is None else [("throughput", f"{known(tokens)} tokens/s per device")]
    if seen.best_step_s is not None and seen.request.economics.limits.are_set:
        training = limited_of(seen.prepared, seen.best, seen.extrapolated)
        figures.append(("limits", limited_in_words(seen.request.economics, training)))
    if seen.history:
        figures.append(("history", plain(seen.history)))
    return figures


def _search(seen: Snapshot) -> str:
    if seen.stop_reason is not None:
        return f"stopped: {seen.stop_reason.sentence}"
    running = num_running(seen.records)
    return f"running, {plural(running, 'trial')} in progress"


def _trials(seen: Snapshot) -> str:
    ended = counted(seen.records)
    kinds = Counter(_status_words(record) for record in ended)
    told = ", ".join(f"{count:,} {words}" for words, count in kinds.most_common())
    saved = saved_s(seen.records)
    return (
        f"{len(ended):,} of at most {seen.request.search.max_trials:,}"
        + (f": {told}" if told else "")
        + (f"; {excused}" if (excused := excused_in_words(seen.records)) else "")
        + (f"; about {seconds(saved)} of steps saved" if saved else "")
    )


def _status_words(record: TrialRecord) -> str:
    words = STATUS_WORDS[record.status] if record.status else "running"
    return f"{words} as proxy jobs" if record.is_proxy else words


def _population(seen: Snapshot) -> str:
    """Describe the candidates that are most probably the fastest."""
    if not seen.moments:
        return ""
    moment = seen.moments[-1]
    when = after_trials(seen.records, moment.trial)
    rows = [
        [percent(share.probability), code(in_short(share.config)), _result_words(seen, share.config, tried=share.tried)]
        for share in moment.shares[:MOST_PROBABLE]
    ]
    others = _others(moment)
    if others:
        rows.append([percent(others), "all others", ""])
    return paragraphs(
        f"#### Probability of being the fastest, {when}", table(["probability", "configuration", ""], rows)
    )


def _others(moment: Moment) -> float:
    return sum(share.probability for share in moment.shares[MOST_PROBABLE:]) + moment.rest_tried + moment.rest_untried


def _result_words(seen: Snapshot, config: dict[str, Any], *, tried: bool) -> str:
    """Describe the first trial of a candidate and its measured step time."""
    if not tried:
        return "not tried yet"
    first = next((each for each in seen.records if each.params == config and not each.is_proxy and each.finished), None)
    if first is None:
        return "tried"
    return f"trial {first.number}" + (f", {seconds(first.step_time_s)}" if first.step_time_s is not None else "")


def _failures(seen: Snapshot) -> str:
    failed = [record for record in seen.records if record.has_failed]
    if not failed:
        return ""
    rows = [
        [
            str(record.number),
            code(in_short(record.params)),
            _status_words(record),
            plain(record.observation.reason) if record.observation else "",
        ]
        for record in reversed(failed[-LAST_FAILURES:])
    ]
    earlier = len(failed) - len(rows)
    return paragraphs(
        f"#### {plural(len(failed), 'failure')}",
        table(["trial", "configuration", "status", "reason"], rows),
        f"and {earlier:,} earlier failures" if earlier > 0 else "",
    )


def _lessons(seen: Snapshot) -> str:
    if not seen.conclusions:
        return ""
    return paragraphs("#### Conclusions from failures", "\n".join(f"- {plain(each.text)}" for each in seen.conclusions))
