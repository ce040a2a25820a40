"""Command `meshtune init`: write a study file from a training framework's launch script or configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from hardware.io.errors import ConfigError
from hardware.io.secret_texts import hide_words
from hardware.io.temporary import temporary_folder
from tuner.cli import completion as cli_completion
from tuner.cli.init_capture import captured_import
from tuner.cli.options import AsJson, with_options, write_file
from tuner.study_file.questions import IGNORE, QUESTIONS
from tuner.study_file.schema_file import with_schema
from tuner.terminal.console import print_json, printable, warn

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import Value
    from trials.own_step import World
    from tuner.capture.run_script import Capture
    from tuner.imports import Imported
    from tuner.study_file.answers import Added
    from tuner.study_file.new_study import NewStudy
    from tuner.study_file.request import StudyRequest
    from tuner.study_file.word_differences import Difference

_File = Path | None
_SCRIPTS = ("megatron", "torchtitan", "bridge", "maxtext", "nemo", "swift", "verl")
"""Frameworks whose file may be a script, which takes arguments."""


@with_options({question.key: (question.metavar, question.help) for question in QUESTIONS.values()})
def init(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[-- WORD...]",
            help="With --capture, the command that trains; with --from-torch or --from-jax, that of trials, with "
            "{plan} in it; otherwise arguments of the script, for $1, $2 and $@.",
        ),
    ] = None,
    capture: Annotated[
        bool, Option("--capture", help="Run the command behind -- with stand-ins for everything that trains.")
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Run the command of --capture without asking.")] = False,
    unconfined: Annotated[
        bool, Option("--unconfined", help="Run it also where nothing can be put between the script and this machine.")
    ] = False,
    from_megatron: Annotated[_File, Option(metavar="SCRIPT", help="Launch script, or a file of flags.")] = None,
    from_torchtitan: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE", help="TOML file, or a script with flags; TOML or the Python of its recipe may follow it."
        ),
    ] = None,
    from_deepspeed: Annotated[_File, Option(metavar="FILE", help="JSON configuration file.")] = None,
    from_nanotron: Annotated[_File, Option(metavar="FILE", help="YAML configuration file.")] = None,
    from_gpt_neox: Annotated[
        list[Path] | None, Option(metavar="FILE", help="YAML configuration file; once for each of several.")
    ] = None,
    from_flagscale: Annotated[
        _File, Option(metavar="FILE", help="YAML file of an experiment, or the one it names for training.")
    ] = None,
    from_bridge: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Script or YAML of Megatron-Bridge; a recipe's YAML may follow its script."),
    ] = None,
    from_maxtext: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Script or YAML of MaxText; the YAML that a script names may follow it."),
    ] = None,
    from_nemo: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Script or YAML of NeMo; the YAML of its recipe may follow a script."),
    ] = None,
    from_swift: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Script or YAML of Megatron-SWIFT; the YAML that a script names may follow it."),
    ] = None,
    from_verl: Annotated[
        _File, Option(metavar="SCRIPT", help="Script of verl with Megatron, for its actor's training.")
    ] = None,
    from_hugging_face: Annotated[
        _File, Option(metavar="FILE", help="A model's config.json; the study then has no current configuration.")
    ] = None,
    from_json: Annotated[_File, Option(metavar="FILE", help="File written by `meshtune export --to json`.")] = None,
    from_jax: Annotated[
        str | None,
        Option(
            metavar="MODULE:FACTORY",
            help="Training step of your own in JAX, which the factory returns; it is imported.",
        ),
    ] = None,
    from_torch: Annotated[
        str | None,
        Option(
            metavar="MODULE:FACTORY",
            help="Training step of your own in torch, whose module the factory returns; it is imported.",
        ),
    ] = None,
    from_log: Annotated[
        _File,
        Option(
            metavar="FILE",
            help="Log of a training, from its start. Together with a launch script, whose command the trials then run.",
        ),
    ] = None,
    from_package: Annotated[
        str | None,
        Option("--from", metavar="NAME=FILE", help="File that the importer NAME of an installed package reads."),
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            metavar="WHICH",
            help="Cluster or device in the catalog, such as dgx-h100 or H100; a number of devices, such as 64xH100; or "
            "a file that describes the cluster.",
            autocompletion=cli_completion.clusters,
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Model to use instead of the file's: name in the catalog, or path.",
            autocompletion=cli_completion.models,
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Runtime profile, if not that of the file's framework.",
            autocompletion=cli_completion.runtimes,
        ),
    ] = None,
    config: Annotated[
        str | None,
        Option(
            "--config", metavar="pp=4,tp=2,...", help="Several of the degrees and further dimensions below at once."
        ),
    ] = None,
    trial_hosts: Annotated[
        int | None,
        Option(metavar="N", help="Hosts that trials occupy at most: they are smaller jobs, and none takes all hosts."),
    ] = None,
    checkpoints: Annotated[
        str | None,
        Option(
            metavar="FOLDER", help="Run trials inside of the training: each goes on from the last one's checkpoint."
        ),
    ] = None,
    ignore_flags: Annotated[str | None, Option(IGNORE.option, metavar=IGNORE.metavar, help=IGNORE.help)] = None,
    out: Annotated[Path, Option(metavar="STUDY", help="Study file to write.")] = Path("study.yaml"),
    force: Annotated[bool, Option("--force", help="Replace existing files.")] = False,
    as_json: AsJson = False,
    **answers: str | None,
) -> None:
    """Write a study file from your launch script or configuration file.

    Its parallelism becomes the study's current configuration (`current:`). The file is parsed, never executed, unless
    --capture is given: then your script runs, with stand-ins that record the training command instead of training. If
    something is left open, the error message names the option to add.
    """
    several = {"torchtitan": from_torchtitan, "gpt-neox": from_gpt_neox, "bridge": from_bridge, "maxtext": from_maxtext}
    several |= {"nemo": from_nemo, "swift": from_swift}
    files = {
        "megatron": from_megatron,
        "deepspeed": from_deepspeed,
        "nanotron": from_nanotron,
        "flagscale": from_flagscale,
        "verl": from_verl,
        "hugging-face": from_hugging_face,
        "json": from_json,
        **{framework: given[0] if given else None for framework, given in several.items()},
        "log": from_log,
    }
    of_package = _of_package(from_package)
    own: tuple[tuple[World, str | None, str | None], ...] = (("jax", from_jax, from_torch), ("torch", from_torch, None))
    for world, factory, other in own:
        if factory is not None:
            beside: dict[str, Any] = {f"from-{name}": file for name, file in files.items() if file is not None}
            beside |= {"from": from_package, "from-torch": other, "capture": True if capture else None}
            beside |= {"model": model, "runtime": runtime, "config": config, "trial-hosts": trial_hosts}
            beside |= {"checkpoints": checkpoints}
            beside |= {"ignore-flags": ignore_flags}
            others, trial = {**beside, **answers}, tuple(arguments or ())
            _init_own_step(world, factory, cluster, others, trial, out, force=force, as_json=as_json)
            return
    chosen = [(framework, file) for framework, file in files.items() if file is not None and framework != "log"]
    chosen += of_package
    # a recipe's file beside a captured command
    recipe = chosen[0][0] if capture and len(chosen) == 1 and chosen[0][0] in {*several} - {"gpt-neox"} else ""
    if (len(chosen) + capture > 1 and not recipe) or not (chosen or capture or from_log) or (capture and from_log):
        options = ", ".join(f"--from-{framework}" for framework in (*files, "jax", "torch"))
        raise ConfigError(f"needs exactly one of {options}, --from, --capture", key="init")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("must end in .yaml", key="--out", value=str(out))
    _check_free(out, force=force)

    from hardware.io.config_file import read_text
    from tuner.study_file.answers import Added, parse_answer, parse_ignored
    from tuner.study_file.new_study import MOST_BYTES, read_import, read_log, read_several, with_command

    given = {key: text for key, text in answers.items() if text is not None}
    named = {"cluster": cluster, "model": model, "runtime": runtime, "config": config, **given}
    named |= {"trial_hosts": None if trial_hosts is None else str(trial_hosts), "checkpoints": checkpoints}
    named |= {"ignore_flags": ignore_flags, "from": from_package}
    added = Added(
        cluster=cluster,
        model=model,
        runtime=runtime,
        answers=({} if config is None else _parse_config(config))
        | {key: parse_answer(key, text) for key, text in given.items()},
        trial_hosts=trial_hosts,
        checkpoints=checkpoints,
        ignored=parse_ignored(ignore_flags or ""),
        command=_command_so_far({**files, **several}, named, out, arguments, capture=capture),
    )
    words = None if arguments is None else tuple(arguments)
    if words and not capture and any(framework not in _SCRIPTS for framework, _ in chosen):
        raise ConfigError("only a script has arguments", key="--", value=" ".join(hide_words(words)))
    scripts = [
        read_import(framework, path, read_text(path, most_bytes=MOST_BYTES), arguments=words)
        for framework, path in chosen
        if framework not in several
    ]
    scripts += [read_several(name, given, words) for name, given in several.items() if given and not recipe]
    captured: Capture | None = None
    if capture:
        imported, file, captured = captured_import(
            arguments or (), yes=yes, unconfined=unconfined, beside=(several[recipe] or ()) if recipe else ()
        )
    elif from_log is None:
        imported, file = scripts[0], chosen[0][1]
    else:
        imported, file = read_log(from_log), from_log
        imported = with_command(imported, scripts[0], chosen[0][1]) if scripts else imported
    written, made, differences = _write(imported, added, file, out, force=force)
    payload = {
        "written": str(written[0]),
        "model": str(written[1]) if len(written) > 1 else None,
        "current": dict(made.present.current) or None,
        "job": dict(made.present.job),
        "devices": made.devices,
        "trial": "command" if made.measures else "simulated",
        "measured": None if made.measured is None else asdict(made.measured),
        "steps": None if made.steps is None else made.steps.as_json(),
        "unread": [str(one) for one in made.imported.unread],
        "notes": list(made.imported.notes),
        "capture": captured
        and {"boundary": captured.boundary or None, "written": captured.written, "unseen": captured.unseen},
        "variables": [] if made.imported.command is None else list(made.imported.command.variables),
        "holds_secret": made.holds_secret,
        "differences": None if differences is None else [asdict(one) for one in differences],
    }
    warn((*map(str, made.imported.unread), *made.imported.notes))
    if as_json:
        print_json(payload)
        return
    _print_result(made, written, differences, out)


def _init_own_step(
    world: World,
    factory: str,
    cluster: str | None,
    others: Mapping[str, object],
    command: tuple[str, ...],
    out: Path,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Write a study of a training step of the user's own, after checking that `load_study` can read it.

    Args:
        world: Library of the step.
        factory: Factory as `module:factory`.
        cluster: Cluster in the catalog.
        others: All other options by name, of which only the numbers of hosts and of their devices say something here.
        command: Command of the trials; empty if they run the step itself.
        out: Study file to write.
        force: Whether to replace an existing file.
        as_json: Whether to print JSON.
    """
    from trials.backend import TrialAbility
    from tuner.cli.options import whole_number
    from tuner.study_file.config import load_study
    from tuner.study_file.own_study_text import own_study_text
    from tuner.subject.own_step import OwnStepSubject

    if cluster is None:
        raise ConfigError("is missing", key="--cluster", nearest="for example --cluster cpu-host --devices-per-host 4")
    counts = {
        key: None if others.get(key) is None else whole_number(f"--{key.replace('_', '-')}", str(others[key]), 1)
        for key in ("hosts", "devices_per_host")
    }
    for name, value in others.items():
        if value is not None and name not in counts:
            raise ConfigError(
                f"cannot be combined with --from-{world}, whose factory says all about the step",
                key=f"--{name.replace('_', '-')}",
                value=str(value),
                nearest="leave it out",
            )
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError("must end in .yaml", key="--out", value=str(out))
    _check_free(out, force=force)
    text = own_study_text(world, factory, cluster=cluster, command=command, **counts)
    with temporary_folder("checking the study") as folder:
        trial = folder / "study.yaml"
        trial.write_text(text, encoding="utf-8")
        try:
            checked = load_study(trial)
        except ConfigError as error:
            key = error.key and error.key.replace(f"model.{world}", f"--from-{world}", 1)
            raise ConfigError(error.rule, key=key, value=error.value, nearest=error.nearest) from None
    subject, trains = checked.problem.subject, TrialAbility.TRAINING in checked.trials.backend.abilities
    assert isinstance(subject, OwnStepSubject), "the text names such a step"
    devices, operators = subject.cluster.num_devices, len(subject.plans.graph().ops)
    write_file(out, with_schema(text))
    if as_json:
        print_json({"written": str(out), "devices": devices, "operators": operators})
        return
    study = printable(str(out))
    typer.echo(f"wrote {study}")
    typer.echo(f"{factory}: {operators:,} operators, on {devices:,} devices")
    typer.echo("Next:")
    typer.echo(f"  meshtune rank {study}    # meshes and plans by their predicted step times")
    typer.echo(f"  meshtune run {study}     # {'time them' if trains else 'try them in a simulated world'}")
    typer.echo(f"  meshtune export {study} --to {world} --out sharded.py    # the best one as a module")


def _of_package(given: str | None) -> list[tuple[str, Path]]:
    """Return the importer and the file of `--from`; none without it.

    Raises:
        ConfigError: It is no `NAME=FILE`.
    """
    if given is None:
        return []
    name, equals, file = given.partition("=")
    if not (name and equals and file):
        raise ConfigError("must be the name of an importer and a file", key="--from", value=given, nearest="NAME=FILE")
    return [(name, Path(file))]


def _command_so_far(
    files: Mapping[str, Path | list[Path] | None],
    options: Mapping[str, str | None],
    out: Path,
    arguments: Sequence[str] | None,
    *,
    capture: bool,
) -> tuple[str, str]:
    """Return the command line as it was given: up to `--`, and from there on."""
    words = ["meshtune", "init", *(["--capture"] if capture else [])]
    for name, given in files.items():
        for file in given if isinstance(given, list) else [given]:
            words += [] if file is None else [f"--from-{name}", str(file)]
    for key, value in options.items():
        words += [] if value is None else [f"--{key.replace('_', '-')}", value]
    words += ["--out", str(out)] if out != Path("study.yaml") else []
    return shlex.join(words), shlex.join(["--", *hide_words(arguments)]) if arguments else ""


def _parse_config(text: str) -> dict[str, Value]:
    """Parse the degrees and further dimensions that `--config` names; those it does not name stay open."""
    from costmodels.job.parallel_config import DEGREES, DIMENSIONS, parse_config

    found = parse_config(text, {})
    valid = [key for key in QUESTIONS if key in DEGREES or key in DIMENSIONS]
    named = {entry.partition("=")[0].strip() for entry in text.split(",")}
    for name in sorted(named - {*valid, ""}):
        raise ConfigError("cannot be stated here", key="--config", value=name, nearest=f"valid: {', '.join(valid)}")
    return {name: getattr(found, name) for name in valid if name in named}


def _check_free(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise ConfigError("already exists", key="--out", value=str(out), nearest="--force replaces it")


def _write(
    imported: Imported, added: Added, file: Path, out: Path, *, force: bool
) -> tuple[list[Path], NewStudy, list[Difference] | None]:
    """Write the study and, if needed, the model's file, after checking that `load_study` can read both.

    Return the paths, the study, and how the words of its first trial differ from the script's; None for the last if
    trials do not run the script's command.
    """
    from tuner.study_file.new_study import new_study

    made = new_study(imported, added, file=file, out=out)
    if made.model_file and (out.parent / made.model_file).exists() and not force:
        rule = f"its model would be written to {made.model_file} beside it, which already exists"
        raise ConfigError(rule, key="--out", value=str(out), nearest="another name, or --force, which replaces both")

    from tuner.study_file.config import load_study  # after the questions, which need none of it

    with temporary_folder("checking the study") as folder:
        # Load the same texts from a temporary folder first, so that no unloadable file is left behind.
        trial = folder / "study.yaml"
        beside = folder / "model.yaml"
        beside.write_text(made.model_text, encoding="utf-8")
        checked = new_study(imported, added, file=file, out=trial, model_at=str(beside))
        trial.write_text(checked.text, encoding="utf-8")
        try:
            request = load_study(trial)
        except ConfigError as error:
            key = (error.key or "").rpartition(".")[2]
            stated = "" if key in added.answers else imported.origins.get(key, "")
            rule = f"{error.rule}; {stated} says so" if stated else error.rule
            raise ConfigError(rule, key=error.key, value=error.value, nearest=error.nearest, file=str(file)) from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"its folder cannot be made ({error.strerror})", key="--out", value=str(out)) from None
    written = [out]
    if made.model_file:
        write_file(out.parent / made.model_file, made.model_text)
        written.append(out.parent / made.model_file)
    write_file(out, with_schema(made.text), private=made.holds_secret)
    return written, made, _differences(made, request)


def _differences(made: NewStudy, request: StudyRequest) -> list[Difference] | None:
    """Return how the words of the first trial differ from the script's; None if trials do not run its command."""
    from trials.command.backend import CommandBackend
    from tuner.study_file.word_differences import word_differences

    command, backend, current = made.imported.command, request.trials.backend, request.problem.current
    if command is None or current is None or not isinstance(backend, CommandBackend):
        return None
    return word_differences(command, backend, current)


def _print_differences(differences: list[Difference] | None) -> None:
    if differences is None:
        return
    typer.echo(f"Differences between the words of your script and of the first trial:{'' if differences else ' none'}")
    for one in differences:
        typer.echo(f"  {printable(str(one))}")


def _print_result(made: NewStudy, written: list[Path], differences: list[Difference] | None, out: Path) -> None:
    from tuner.terminal.console import in_words

    for path in written:
        typer.echo(f"wrote {printable(str(path))}")
    if made.present.current:
        typer.echo(f"Current: {in_words(made.present.current)} on {made.devices:,} devices")
    else:
        typer.echo("No current configuration: the file describes a model only. Add what you use today as `current:`.")
    if made.measured is not None and made.steps is not None:
        counts = made.steps.counts
        used = f"{counts.used:,} of {counts.found:,} lines that may be of steps"
        typer.echo(
            f"The log says {made.measured.step_time_s:.4g} s per step, by {used}: see `measured:` in the study file."
        )
    if made.measures:
        is_job = made.imported.command is not None and made.imported.command.slurm is not None
        typer.echo(f"Trials run your own command{', each as a job of Slurm' if is_job else ''}.")
    elif made.imported.command is not None:
        typer.echo("Trials are simulated; comments in the study file list what is missing to run your own command.")
    else:
        typer.echo("Trials are simulated; docs/own-command.md explains how to run your own command.")
    study = printable(str(out))
    _print_differences(differences)
    if made.imported.command is not None and (variables := made.imported.command.variables):
        typer.echo(
            f"Secrets of the script are not copied; set them before `meshtune run`: {printable(' '.join(variables))}"
        )
    if made.holds_secret:
        typer.echo(
            f"{study} still shows a secret, in an option of Slurm or a comment: only you may read it (mode 0600)."
        )
    typer.echo("Next:")
    typer.echo(f"  meshtune space {study}    # count the configurations that can work")
    if made.present.current:
        typer.echo(
            f"  meshtune predict {study} --config {in_words(made.present.current)}    # your current configuration"
        )
        if made.measures:
            typer.echo(f"  meshtune trial {study} {made.first_trial}")
        typer.echo(f"  meshtune run {study}      # tune, starting from your current configuration")
    else:
        typer.echo(f"  meshtune run {study}      # tune")
