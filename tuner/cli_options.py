"""What the commands have in common: their options, how they read these, and their exit statuses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hardware.errors import ConfigError

if TYPE_CHECKING:  # these load numpy
    from costmodels.parallel import ParallelConfig
    from tuner.config import StudyConfig

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY", help="Study file (YAML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the study file, e.g. search.seed=3."),
]
Storage = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Database of the study; wins over MESHTUNE_STORAGE and the study file."),
]
Config = Annotated[
    str,
    typer.Option("--config", metavar="pp=4,tp=2,...", help="A configuration; what is left out is 1 or the job's."),
]

FOUND_NOTHING = 1
USERS_MISTAKE = 2
INTERRUPTED = 130


def whole_number(option: str, text: str, least: int) -> int:
    """The number that an option holds; typer's own message would not show the value."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= least):
        raise ConfigError(f"must be a whole number of at least {least}", key=option, value=text)
    return int(text)


def launchable_config(config: StudyConfig, text: str) -> tuple[ParallelConfig, dict[str, str]]:
    """The configuration that `--config` names, with the rules of the study that it breaks.

    Raises:
        ConfigError: it cannot be launched at all.
    """
    from costmodels.parallel import parse_config
    from tuner.space import broken_rules, launchable

    wanted = parse_config(text, config.config_defaults)
    broken = broken_rules(config.setting, config.options, wanted)
    if launchable(config.setting, wanted):
        return wanted, broken
    devices, rest = config.setting.cluster.num_devices, wanted.num_devices // wanted.dp
    nearest = "`meshtune space --list` prints configurations that can"
    if wanted.num_devices != devices and devices % rest == 0:
        nearest = f"with dp={devices // rest} it would occupy the {devices} devices"
    raise ConfigError(
        "cannot be launched: " + ("; ".join(broken.values()) or "its degrees do not divide the job"),
        file=config.file,
        key="--config",
        value=str(wanted),
        nearest=nearest,
    )


def load(study: Path, overrides: list[str] | None = None, storage: str | None = None) -> StudyConfig:
    """The study of a file, with what the command line replaces in it."""
    from tuner.config import load_study

    return load_study(study, overrides=overrides or (), storage=storage)
