"""Words for the trials of a run: the first one, each ended one, and the state between them."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.job.parallel_config import DEGREES, Value
from hardware.rounding import measured, predicted
from trials.backend import Observation, Status
from tuner.answers.comparison import Comparison
from tuner.economics.device_time import duration
from tuner.run.next_trial import NextTrial
from tuner.run.opening import Opening, Why
from tuner.run.progress import Progress
from tuner.storage.record import TrialRecord
from tuner.terminal.console import printable, short_layout

LAYOUT_WIDTH = 22
"""Least width of the column of layouts."""

SURE_TO_RUN = 0.995
"""Share of the draws in which a candidate runs from which on nobody need be told."""

LOG_LINES = 4
"""Number of a log's last lines that are shown under a trial whose reason does not quote its log."""

_WHY = {
    Why.CURRENT: "the current configuration, which all others are compared with",
    Why.BASELINE: "the baseline that an engineer would write by hand, which all others are compared with",
    Why.PREDICTED: "the most promising configuration by the cost model",
    Why.LEARNED: "the most promising configuration by what earlier trials taught",
    Why.CLOSE: "measured again, because the fastest are too close to tell apart",
    Why.LEFT_OVER: "left unfinished by the last run of this study",
}


def opening_line(opening: Opening, progress: Progress) -> str:
    """Describe the first trial of a run and why it comes first, with what is known already."""
    proxy = " as a smaller proxy job" if opening.is_proxy else ""
    told = f"trying first {short_layout(opening.values)}{proxy}: {_WHY[opening.why]}"
    if opening.why is not Why.LEFT_OVER:
        told += f"; predicted {predicted(opening.predicted_s)} s per step"
    if not progress.done:
        return told
    best_s = progress.best.step_time_s if progress.best is not None else None
    best = f", best {measured(best_s)} s" if best_s is not None else ""
    return f"{progress.done:,} trials so far{best}; {told}"


def next_line(chosen: NextTrial, progress: Progress, confidence: float) -> str:
    """Describe the trial that was asked for, why it is tried, and what would end the search.

    Args:
        chosen: Trial.
        progress: Progress of the run.
        confidence: Confidence at which the search ends.
    """
    found = chosen.prospect
    if found.is_repeat:
        why = "measured again, because the fastest are too close to tell apart"
    else:
        others = "" if found.num_open else ", nor any other that is left"
        why = f"probability {found.best_probability:.2f} to be the best"
        why = why if found.best_probability else f"no draw names it the best{others}"
        if found.expected_s is not None:
            why += f", expected {predicted(found.expected_s)} s"
        if found.run_probability < SURE_TO_RUN:
            why += f", probability {found.run_probability:.2f} to run"
        if found.first_with:
            why += f"; the first with {short_layout({name: chosen.values[name] for name in found.first_with})}"
    proxy = " as a smaller proxy job" if chosen.is_proxy else ""
    return f"next {printable(short_layout(chosen.values))}{proxy}: {why}. {_end_in_words(chosen, progress, confidence)}"


def _end_in_words(chosen: NextTrial, progress: Progress, confidence: float) -> str:
    """Return what would end the search, as far as it is known: confidence, or a budget."""
    left = [f"after {max(progress.budget - progress.done, 0):,} more trials"]
    if progress.seconds_left is not None:
        left.append(f"in {duration(progress.seconds_left)}")
    if progress.device_hours_left is not None:
        left.append(f"after {progress.device_hours_left:,.3g} device-hours")
    if confidence >= 1:
        return f"Ends {' or '.join(left)}"
    open_ones = f"{chosen.prospect.num_open:,} untried may be faster"
    return f"Ends above confidence {confidence:.2f} (now {progress.p_star:.2f}, {open_ones}) or {' or '.join(left)}"


def layout_of(values: Mapping[str, Value], compared: Comparison | None) -> str:
    """Format a configuration by its degrees above 1, and by what else differs from the one that it is compared with."""
    if compared is None:
        return short_layout(values)
    changed = compared.differences(values)
    if not changed:
        return f"{compared.name} ({short_layout(values)})"
    return short_layout({name: value for name, value in values.items() if name in DEGREES or name in changed})


def trial_line(record: TrialRecord, compared: Comparison | None, best: TrialRecord | None) -> str:
    """Describe an ended trial on one line: layout, and step time with the speed-up, or the failure.

    Args:
        record: Record of the trial.
        compared: Configuration that it is told relative to.
        best: Best record after it.
    """
    layout = layout_of(record.params, compared)
    if compared is not None and record.params == compared.values and compared.name == f"trial {record.number}":
        layout = short_layout(record.params)
    return f"trial {record.number:<3} {printable(layout):<{LAYOUT_WIDTH}}  {outcome(record, compared, best)}"


def outcome(record: TrialRecord, compared: Comparison | None, best: TrialRecord | None) -> str:
    """Describe the outcome of an ended trial: its step time and speed-up, or the failure and its reason."""
    assert record.status is not None, "the trial has ended"
    if record.step_time_s is not None:
        speedup = compared.speedup(record.step_time_s) if compared is not None else None
        is_other = compared is not None and record.params != compared.values
        gain = f", {speedup:.3f}x as fast" if speedup is not None and is_other else ""
        is_best = is_other and best is not None and best.number == record.number
        return f"{measured(record.step_time_s)} s{gain}{', best' if is_best else ''}"
    observation = record.observation
    if observation is not None and observation.step_time_s is not None:  # of a proxy
        return f"{measured(observation.step_time_s)} s as a proxy job"
    status = "stopped early" if record.status is Status.PRUNED else record.status.in_words
    # whatever a program prints of memory says no more
    has_reason = observation is not None and observation.reason and record.status is not Status.OUT_OF_MEMORY
    return f"{status}: {printable(observation.reason)}" if observation is not None and has_reason else status


def last_log_lines(observation: Observation | None, count: int = LOG_LINES) -> tuple[str, ...]:
    """Return the last lines of a failed trial's log, if its reason quotes none of them and no step time was read."""
    if observation is None or observation.step_times_s or dict(observation.conditions).get("readings"):
        return ()
    if observation.status in (Status.OUT_OF_MEMORY, Status.CANCELLED):
        return ()
    lines = log_lines(observation, count)
    return () if any(line.strip() in observation.reason for line in lines) else lines


def log_lines(observation: Observation, count: int) -> tuple[str, ...]:
    """Return the last lines of a trial's log that are not empty."""
    lines = [printable(line.rstrip().expandtabs()) for line in observation.log_tail.splitlines() if line.strip()]
    return tuple(lines[-count:])


def state_line(progress: Progress, clock: str, compared: Comparison | None) -> str:
    """Describe the state of a run: trials, best step time, confidence, what is left of its budgets, and what runs.

    Args:
        progress: Progress of the run.
        clock: Words for the clock of its step times, in parentheses; empty for the wall clock.
        compared: Configuration that layouts are told relative to.
    """
    best, extrapolated = progress.best, progress.extrapolated
    if best is not None and best.step_time_s is not None:
        told = f"best {measured(best.step_time_s)} s{clock}"
    elif extrapolated is not None:
        told = f"best {predicted(extrapolated.step_time_s)} s, {extrapolated.in_words}"
    else:
        told = "no result yet"
    parts = [f"{progress.done}/{progress.budget} trials", told, f"confidence {progress.p_star:.2f}"]
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    if progress.device_hours_left is not None:
        parts.append(f"{progress.device_hours_left:,.3g} device-hours left")
    if progress.layouts:
        first, others = layout_of(progress.layouts[0], compared), progress.running - 1
        parts.append(f"running {printable(first)}" + (f" and {others:,} more" if others > 0 else ""))
    if progress.queued:
        parts.append(f"{progress.queued:,} waiting in the queue")
    if progress.idle_in_words:
        parts.append(progress.idle_in_words)
    return ", ".join(parts)
