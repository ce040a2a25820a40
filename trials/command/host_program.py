"""Program on each host of a trial: it runs the user's command and reads its output line by line.

The supervisor of the command inherits the pipe of this process's messages, and closes it last. The end of a host is
therefore received only when all processes that the command started are gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trials.backend import Status
from trials.command.knob_files import write_files
from trials.command.log_pattern import LogPattern, StepSize
from trials.command.log_reader import READ_BYTES, LogReader, SlowLineError
from trials.command.placeholders import FLAGS, KNOBS, fill_all, fill_text, values_of_variables, without_wildcards
from trials.command.process_tree import adopt_orphans, start_supervised
from trials.ranks.messages import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCommand:
    """Command of a user, which a study describes and every host runs.

    Attributes:
        arguments: Program and arguments of the command, with placeholders.
        environment: Environment variables in addition to the host's, with placeholders; None removes a variable.
        variables: Variables of the environment of `meshtune run` that the command refers to, with their values.
        directory: Working directory of the command.
        pattern: Pattern that reads the log.
        logs: Folder for whole logs on each host; None keeps only the end of a log, in the study.
        profile: Path of the traces of torch.profiler that the command leaves, with placeholders and perhaps wildcards;
            None if it leaves none.
        profile_root: Folder that `profile` is relative to.
    """

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str | None], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    directory: Path
    pattern: LogPattern
    logs: Path | None = None
    profile: str | None = None
    profile_root: Path = Path()


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan(UserCommand):
    """Work of each host.

    Attributes:
        values: Names and values of the placeholders, except for those that only a host knows.
        flags: Arguments that take the place of `{flags}`.
        knobs: Arguments that take the place of `{knobs}`.
        files: Files of which the trial gets a copy: the placeholder of its path, its name, and its text.
        step: Size of a step, which converts rates to times.
        log_name: Beginning of the log's file name.
    """

    values: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    knobs: tuple[str, ...] = ()
    files: tuple[tuple[str, str, str], ...] = ()
    step: StepSize
    log_name: str

    def kept_log(self, host_rank: int) -> Path | None:
        """Return the file for the whole log of a host; None if none is kept."""
        return None if self.logs is None else self.logs / f"{self.log_name}-host-{host_rank}.log"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Message that the command has ended.

    Attributes:
        code: Exit status of the command, or the negative number of the signal that killed it.
        trouble: Reason for the end that the log does not state; empty if the command has ended by itself.
        status: Outcome that the trouble means.
        time_limit_s: Limit at which a queue cut the command off [s]; None unless it did.
    """

    code: int
    trouble: str = ""
    status: Status = Status.CRASHED
    time_limit_s: float | None = None


def run_host(place: Place, plan: HostPlan) -> None:
    """Run the command to its end, and print its output here too."""
    if place.listening is not None:
        os.close(place.listening)  # the command will listen there
    values = (
        dict(plan.values)
        | values_of_variables(plan.variables)
        | {"host_rank": str(place.rank), "master_address": place.host, "master_port": str(place.port)}
    )
    if plan.profile is not None:
        values["profile"] = str(plan.profile_root / without_wildcards(fill_text(plan.profile, values)))
    with (
        write_files(plan.files, values) as paths,
        LogReader(place.tell, plan.pattern, plan.step, plan.kept_log(place.rank)) as reader,
    ):
        values |= paths
        arguments = fill_all(plan.arguments, values, {FLAGS: plan.flags, KNOBS: plan.knobs})
        adopt_orphans()
        command = start_supervised(arguments, _environment(plan, values), plan.directory)
        try:
            while read := command.read(READ_BYTES):
                reader.feed(read)
            reader.end()
        except SlowLineError as error:
            place.tell(Ended(code=1, trouble=str(error)))
            return
        place.tell(Ended(code=command.wait()))


def _environment(plan: HostPlan, values: Mapping[str, str]) -> dict[str, str]:
    found = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE"):  # they count hosts here, and would mislead the command
        found.pop(name, None)
    for name, text in plan.environment:
        if text is None:
            found.pop(name, None)
        else:
            found[name] = fill_text(text, values)
    return found
