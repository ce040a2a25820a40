"""Options of a trial's job of Slurm, from the `#SBATCH` lines of a script and from its srun.

A trial takes names, files, hosts and the time limit from the study. Options for these are left out; all others are
kept. Where a trial starts its command once on every host, a request of so many tasks with so many cores each becomes
one task with all of them.

Source: the manual pages of sbatch and srun of Slurm 24.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from trials.command.slurm.jobs import Tasks
from tuner.capture.slurm import allocation_of
from tuner.imports.bash.texts import Argument
from tuner.imports.imported import SlurmOptions

_LETTERS = {
    "A": "--account",
    "C": "--constraint",
    "G": "--gpus",
    "B": "--extra-node-info",
    "D": "--chdir",
    "H": "--hold",
    "J": "--job-name",
    "K": "--kill-on-bad-exit",
    "L": "--licenses",
    "M": "--clusters",
    "N": "--nodes",
    "O": "--overcommit",
    "W": "--wait",
    "a": "--array",
    "b": "--begin",
    "c": "--cpus-per-task",
    "d": "--dependency",
    "e": "--error",
    "i": "--input",
    "l": "--label",
    "n": "--ntasks",
    "o": "--output",
    "p": "--partition",
    "q": "--qos",
    "s": "--oversubscribe",
    "t": "--time",
    "u": "--unbuffered",
    "w": "--nodelist",
    "x": "--exclude",
}
_WITHOUT_VALUE = frozenset(
    {
        *("--exclusive", "--overcommit", "--oversubscribe", "--contiguous", "--spread-job", "--overlap", "--exact"),
        *("--requeue", "--no-requeue", "--hold", "--quiet", "--verbose", "--parsable", "--test-only", "--wait"),
        *("--label", "--unbuffered", "--kill-on-bad-exit", "--pty", "--container-mount-home"),
        *("--no-container-mount-home", "--container-writable", "--container-readonly", "--container-remap-root"),
        *("--no-container-remap-root", "--container-entrypoint", "--no-container-entrypoint"),
    }
)
_NOT_KEPT = frozenset(
    {
        *("--job-name", "--output", "--error", "--input", "--open-mode", "--chdir", "--nodes", "--time"),
        *("--ntasks", "--time-min"),
        *("--array", "--dependency", "--wait", "--wrap", "--parsable", "--test-only", "--clusters", "--begin"),
        *("--mail-type", "--mail-user", "--signal", "--requeue", "--no-requeue", "--hold", "--quiet", "--verbose"),
    }
)
"""Options of a script's job that are a trial's own, or that a trial must not have; it keeps all others."""
_PER_TASK = frozenset({"--ntasks-per-node", "--cpus-per-task", "--gpus-per-task", "--tasks-per-node"})
"""Options that say how many tasks a host has, and what each of them gets."""
_OF_SRUN_ALONE = frozenset(
    {
        *("--partition", "--account", "--qos", "--reservation", "--constraint", "--gres", "--gpus", "--gpus-per-node"),
        *("--mem", "--mem-per-cpu", "--mem-per-gpu", "--exclusive", "--nodelist", "--exclude", "--licenses"),
    }
)
"""Options that choose hosts, of an srun that is no part of a job."""
_NOT_OF_STEP = _NOT_KEPT | _OF_SRUN_ALONE | {"--label", "--jobid", "--relative", "--pty"}
"""Options of an srun that a trial's own srun does not take over."""


def slurm_options(header: Sequence[str], outer: Sequence[Argument], tasks: Tasks = "per_host") -> SlurmOptions | None:
    """Return the options of a trial's job; None if the script says nothing of Slurm.

    Args:
        header: Words of the script's `#SBATCH` lines.
        outer: Words before the command, such as srun with its options.
        tasks: How often the job starts the command.
    """
    texts = [word.text.rsplit("/", 1)[-1] for word in outer]
    at = texts.index("srun") if "srun" in texts else None
    if at is None and not header:
        return None
    step = list(_pairs([word.text for word in outer[at + 1 :]])) if at is not None else []
    job = list(_pairs(header)) or step
    kept = {name: value for name, value in job if (name not in _NOT_KEPT if header else name in _OF_SRUN_ALONE)}
    counts = dict(job)
    if tasks == "per_host":
        number = allocation_of(header or [word.text for word in outer]).tasks_per_host or 1
        kept = {name: value for name, value in kept.items() if name not in _PER_TASK}
        for name, whole in (("--cpus-per-task", "--cpus-per-task"), ("--gpus-per-task", "--gpus-per-node")):
            if (value := counts.get(name, "")).isdigit():
                kept.setdefault(whole, str(int(value) * number))
    if kept.get("--gres", "").startswith("gpu"):
        kept.pop("--gpus-per-node", None)  # said twice
    own = [(name, value) for name, value in step if name not in _NOT_OF_STEP | _PER_TASK]
    texts_of_own = {f"{name}={value}" if value else name for name, value in own}
    unknown = [
        word.unknown
        for word in (outer[at + 1 :] if at is not None else ())
        if word.unknown and any(word.text in text for text in texts_of_own)
    ]
    return SlurmOptions(
        sbatch=_words(kept.items()),
        srun=_words(own),
        time_limit=_time_limit(counts.get("--time", "")),
        changes=_changes(job, step, {**kept, **dict(own)}, tasks),
        unknown=tuple(dict.fromkeys(unknown)),
    )


_COUNTS = frozenset({"--nodes", "--ntasks", *_PER_TASK})
"""Options that a trial has by its configuration, with the values of the script where the layout is the same."""


def _changes(
    job: Sequence[tuple[str, str]], step: Sequence[tuple[str, str]], kept: Mapping[str, str], tasks: Tasks
) -> tuple[tuple[str, str, str], ...]:
    """Return the options that a trial does not take over, and the tasks that it starts where the script counts none."""
    named = dict((*job, *step))
    gone = [name for name in named if name not in kept and name not in _COUNTS]
    found = [(name, "", "the job of each trial has its own") for name in gone]
    if tasks == "per_device" and not {"--ntasks-per-node", "--tasks-per-node", "--ntasks"} & named.keys():
        found.append(("", "--ntasks-per-node={devices_per_host}", "srun starts one process for each device"))
    return tuple(found)


def end_of_options(words: Sequence[Argument], begin: int) -> int:
    """Return the position of the first word from `begin` on that is neither an option of srun nor the value of one."""
    rest = [word.text for word in words[begin:]]
    for _ in _pairs(rest, consume=True):
        pass
    return len(words) - len(rest)


def _pairs(words: Sequence[str] | list[str], *, consume: bool = False) -> Iterable[tuple[str, str]]:
    """Yield the options among words with their values, by their long names, up to the first word that is no option."""
    rest = words if consume and isinstance(words, list) else list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word.partition("=")
        elif len(word) > 1 and word[0] == "-" and word[1] in _LETTERS:
            name, value = _LETTERS[word[1]], word[2:].removeprefix("=")
            equals = "=" if value else ""
        else:
            rest.insert(0, word)
            return
        if not equals and name not in _WITHOUT_VALUE and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        yield name, value


def _words(options: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" if value else name for name, value in options)


def _time_limit(text: str) -> str:
    """Return a time of `--time` as a study writes it, where a bare number is seconds; empty if there is none."""
    if re.fullmatch(r"[0-9]{1,6}", text):
        return f"{text}:00"
    return text if re.fullmatch(r"([0-9]{1,4}-)?[0-9]{1,6}(:[0-9]{1,2}){0,2}", text) else ""
