"""Words for a study that ended because its command fails whatever the layout: the log, and what to do."""

from __future__ import annotations

from trials.backend import Observation, Status
from trials.command.slurm.job_program import REFUSED
from tuner.run.progress import RunResult
from tuner.search.stopping import StopReason
from tuner.terminal.console import printable
from tuner.terminal.trial_words import last_log_lines, log_lines

LOG_LINES = 12
"""Number of the log's last lines that are shown."""


def failing_command_lines(result: RunResult) -> list[str]:
    """Return the lines to print for a run that ended because its trials failed alike."""
    failed = {record.number: record for record in result.records}
    last = failed[result.fails_alike[-1]]
    assert last.observation is not None, "a trial that failed was observed"
    numbers = [str(number) for number in result.fails_alike]
    lines = [
        f"Stopped: {StopReason.FAILS_ALIKE.sentence}. Trials {', '.join(numbers[:-1])} and {numbers[-1]} failed alike, "
        "and none has ever run:",
        f"  {last.observation.status.in_words}: {printable(last.observation.reason)}",
    ]
    shown = log_lines(last.observation, LOG_LINES)
    if shown:
        lines += [f"The last lines of trial {last.number}'s log:", *(f"    | {line}" for line in shown)]
    lacks_steps = bool(last_log_lines(last.observation, LOG_LINES))
    lines.append(f"What to do: {_advice(last.observation, lacks_steps=lacks_steps)}")
    lines.append(
        "Then give the same command again: it goes on with this study, and these failures count against no layout."
    )
    return lines


def _advice(failed: Observation, *, lacks_steps: bool) -> str:
    """Return advice on failures of one kind; `lacks_steps` says that the log holds no step time."""
    status = failed.status
    if failed.reason.startswith(REFUSED):
        return (
            "mend what sbatch names: its options above come from trial.sbatch, trial.time_limit and cluster.hosts; "
            "`meshtune trial STUDY --dry-run` shows them with the batch file."
        )
    if status is Status.TIMEOUT:
        return "raise trial.time_limit above the time that the command takes until its first measured step."
    if status is Status.INCIDENT:
        return (
            "run the command once by hand on these hosts; if it is silent for long before its first step, raise "
            "trial.hang_limit_s."
        )
    if lacks_steps:
        return (
            "if the log has step times, mend trial.log, which says how they are printed; if not, run the command once "
            "by hand until it prints them."
        )
    return "run the command once by hand, and mend what its log names."
