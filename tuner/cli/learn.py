"""Commands `meshtune learn` and `share`: rows of measured runs from the user's own logs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from hardware.io.errors import ConfigError
from tuner.cli import completion as cli_completion
from tuner.cli.options import AsJson, Storage, check_out, with_options
from tuner.study_file.questions import IGNORE, QUESTIONS
from tuner.terminal.console import print_json, printable, say
from tuner.terminal.tables import print_table

if TYPE_CHECKING:  # these load numpy
    from tuner.learn.learning import Learned
    from tuner.learn.shared import Shared

SHOWN = 20
"""Number of files that are named of each kind; `--json` has all."""


@with_options({question.key: (question.metavar, question.help) for question in QUESTIONS.values()}, hidden=True)
def learn(
    logs: Annotated[
        list[Path], Argument(metavar="LOGS", help="Logs of trainings, folders of them, or studies that have run.")
    ],
    pool: Annotated[Path, Option(metavar="CSV", help="Your measured runs; rows are added, and none is lost.")] = Path(
        "my-runs.csv"
    ),
    out: Annotated[
        Path, Option(metavar="FILE", help="Profile that is fitted to all of them, for `runtime:` of studies.")
    ] = Path("my-profile.yaml"),
    cluster: Annotated[
        str | None,
        Option(
            metavar="WHICH",
            help="Cluster or device in the catalog, or a file that describes the cluster; where logs name no device.",
            autocompletion=cli_completion.clusters,
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Model of logs that state none: name in the catalog, or path.",
            autocompletion=cli_completion.models,
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        Option(
            metavar="NAME", help="Runtime to fit, if the logs are of several.", autocompletion=cli_completion.runtimes
        ),
    ] = None,
    source: Annotated[
        str | None,
        Option(metavar="NAME", help="Name of the runs of one cluster; by default that of each file or folder given."),
    ] = None,
    ignore_flags: Annotated[str | None, Option(IGNORE.option, metavar=IGNORE.metavar, help=IGNORE.help)] = None,
    storage: Storage = None,
    force: Annotated[
        bool, Option("--force", help="Write the profile also if it predicts runs left out no better than before.")
    ] = False,
    as_json: AsJson = False,
    **answers: str | None,
) -> None:
    """Learn from your own training logs: keep each run, and fit a profile that predicts your cluster.

    Logs of Megatron-LM, Megatron-Bridge, NeMo, torchtitan, nanotron, DeepSpeed and others become rows of a file of
    measured runs. What a log does not state is asked for, and a log that contradicts itself is refused. The options
    from --hosts to --expert-tp, which `meshtune init --help` explains, say what logs leave open; what a log states
    itself comes first.
    """
    for option, file in (("--pool", pool), ("--out", out)):
        check_out(file, option)
    if pool.suffix != ".csv":
        raise ConfigError("must end in .csv", key="--pool", value=str(pool))

    from tuner.learn.learning import STUDIES, gather
    from tuner.learn.learning import learn as learn_from
    from tuner.learn.pool import models_of
    from tuner.study_file.answers import Added, parse_answer, parse_ignored

    if out.suffix not in STUDIES:
        raise ConfigError("must end in .yaml, so that a study recognises it as a file", key="--out", value=str(out))
    if runtime is not None:
        from costmodels.job.runtime import catalog_path

        catalog_path(runtime)
    added = Added(
        cluster=cluster,
        model=model,
        answers={key: parse_answer(key, text) for key, text in answers.items() if text is not None},
        ignored=parse_ignored(ignore_flags or ""),
        command=("meshtune learn LOGS", ""),
    )
    gathered = gather(logs, added, source=source, models=models_of(pool), storage=storage)
    done = learn_from(
        gathered, pool, out, runtime=runtime, force=force, on_progress=lambda line: typer.echo(line, err=True)
    )
    if as_json:
        print_json(done.as_json())
    else:
        _print_learned(done)


def _print_learned(done: Learned) -> None:
    added = done.added
    again = "".join(
        f", {len(rows):,} {what}"
        for rows, what in ((added.renewed, "renewed by more steps"), (added.known, "known already"))
        if rows
    )
    say(f"{printable(str(done.pool))}: {added.rows:,} runs, {len(added.added):,} of them new{again}.")
    _print_left_out(done)
    if done.refitted is not None:
        check = done.refitted.check
        say(f"Error of step times under the catalog's {done.runtime}, and after a fit to the other {check.part}s:")
        print_table(
            [check.part, "runs", "before", "after", "predicted / measured"],
            [
                [
                    printable(one.name),
                    f"{one.runs:,}",
                    f"{one.before:.1%}",
                    "too few others" if one.after is None else f"{one.after:.1%}",
                    f"{one.ratio_before:.2f}" + ("" if one.ratio_after is None else f" -> {one.ratio_after:.2f}"),
                ]
                for one in check.parts
            ],
        )
        if check.before is None or check.after is None:
            say("Too few runs are left for a fit to the others, so how well one predicts is not known.")
        else:
            say(f"Median of all: {check.before:.1%} before, {check.after:.1%} after.")
    if done.written is None:
        say(f"No profile was written: {done.why_not}.")
        return
    say(f"wrote {printable(str(done.written))}; a study names it by `runtime: ./{printable(done.written.name)}`")


def _print_left_out(done: Learned) -> None:
    """Print on stderr the gaps of logs, and the lines that were not understood."""
    gathered = done.gathered
    unsure = [f"{file}: {one}" for file, told in gathered.unsure.items() for one in told]
    refused = [f"{one.file}: {one.reason}" for one in gathered.refused]
    others = [f"{count:,} {what}" for what, count in gathered.left_out.items()]
    for head, lines in (("not stated, or not read", unsure), ("no row", refused), ("left out", others)):
        for line in lines[:SHOWN]:
            say(f"  {head}: {printable(line)}", err=True)
        if len(lines) > SHOWN:
            say(f"  {head}: {len(lines) - SHOWN:,} more, see --json", err=True)


def share(
    files: Annotated[list[Path], Argument(metavar="FILES", help="Files of measured runs, or studies that have run.")],
    out: Annotated[Path, Option(metavar="CSV", help="File to write.")] = Path("shared-runs.csv"),
    force: Annotated[bool, Option("--force", help="Replace an existing file.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Write your measured runs without anything that names you, for others to learn from. Nothing is sent anywhere.

    Names of sources, models, hosts and files, paths and remarks are left out. Devices, degrees, sizes, facts, times and
    memory stay.
    """
    check_out(out)
    if out.suffix != ".csv":
        raise ConfigError("must end in .csv", key="--out", value=str(out))
    if out.exists() and not force:
        raise ConfigError("already exists", key="--out", value=str(out), nearest="--force replaces it")

    from tuner.learn.shared import share as share_rows

    done = share_rows(files, out, storage=storage)
    if as_json:
        print_json(done.as_json())
    else:
        _print_shared(done)


def _print_shared(done: Shared) -> None:
    from tuner.learn.shared import LEFT_OUT

    say(f"wrote {printable(str(done.out))}: {len(done.rows):,} runs. Look it over before you give it away.")
    for column, why in LEFT_OUT.items():
        say(f"  not copied: {column} ({why})", err=True)
    for reason, count in done.skipped.items():
        say(f"  left out: {count:,} {printable(reason)}", err=True)
