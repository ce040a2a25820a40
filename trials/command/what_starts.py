"""What a trial of a user's command starts: the words, variables and files of its plan, with all values filled in."""

from __future__ import annotations

from dataclasses import replace

from trials.command.host_program import HostPlan
from trials.command.placeholders import (
    FLAGS,
    KNOBS,
    ON_HOST,
    PROFILE,
    fill_all,
    fill_text,
    values_of_variables,
    variables_in,
    without_wildcards,
)
from trials.command.slurm.job_program import JobPlan
from trials.started import Started


def shown_plan(plan: HostPlan) -> HostPlan:
    """Return a plan with `$NAME` for the value of each variable that it refers to, which may be a secret or not set."""
    texts = (*plan.arguments, *(text or "" for _, text in plan.environment), plan.profile or "")
    return replace(plan, variables=tuple((name, f"${name}") for name in variables_in(texts)))


def what_starts(plan: HostPlan, job: JobPlan | None, *, where: str, num_hosts: int) -> Started:
    """Return what a trial starts.

    Args:
        plan: Work of each host, as `shown_plan` returns it.
        job: Job of Slurm that does it; None if Ray's workers start the command.
        where: Words for how often the command is started, and where.
        num_hosts: Number of hosts that start the command.
    """
    several = num_hosts > 1
    # what only a host knows stays as it is written; files are named in the same way
    left = {name: f"{{{name}}}" for name in (*ON_HOST, *(name for name, _, _ in plan.files))}
    values = dict(plan.values) | values_of_variables(plan.variables) | left | ({} if several else {"host_rank": "0"})
    if plan.profile is not None:
        values[PROFILE] = str(plan.profile_root / without_wildcards(fill_text(plan.profile, values)))
    command = tuple(fill_all(plan.arguments, values, {FLAGS: plan.flags, KNOBS: plan.knobs}))
    environment = {name: None if text is None else fill_text(text, values) for name, text in plan.environment}
    told = f"{'Ray starts the command' if job is None else 'A job of Slurm starts the command'} {where}."
    texts = (*command, *(text or "" for text in environment.values()))
    if any(mark in text for text in texts for mark in left.values()):
        told += " What stands in braces is known on a host, when it starts."
    return Started(
        in_words=told,
        command=command,
        environment=environment,
        directory=plan.directory,
        variables=tuple(name for name, _ in plan.variables),
        files={name: text for name, _, text in plan.files},
        submit=() if job is None else ("sbatch", "--parsable", *job.options),
        batch_file=None if job is None else job.script,
    )
