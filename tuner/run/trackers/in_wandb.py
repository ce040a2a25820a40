"""Trials in Weights & Biases: one run for each, in the group of the study's name."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError
from tuner.run.trackers.contract import AbstractTracker, Tracked, needed

PROJECT, DEFAULT_PROJECT = "WANDB_PROJECT", "meshtune"
"""Environment variable of Weights & Biases that names the project, and the project without it."""


class WandbTracker(AbstractTracker):
    """Writer of runs, which a process of the library sends, or keeps on the disk if WANDB_MODE is `offline`.

    Args:
        folder: Folder that the library keeps its files in; it gives it this name.
    """

    def __init__(self, folder: Path) -> None:
        with needed("wandb"):
            import wandb  # noqa: PLC0415 # an extra

        if os.environ.get("WANDB_MODE", "online") == "online" and not _has_account(wandb):
            raise ConfigError(
                "needs the key of an account",
                key="search.callbacks",
                value="wandb",
                nearest="`wandb login`, WANDB_API_KEY, or WANDB_MODE=offline",
            )
        self._wandb: Any = wandb
        self._folder = folder.parent

    def log(self, trial: Tracked) -> None:
        """Write a run with the trial's configuration, its status and its metrics."""
        run = self._wandb.init(
            project=os.environ.get(PROJECT) or DEFAULT_PROJECT,
            group=trial.study,
            name=f"{trial.study}/trial-{trial.number}",
            config={**trial.params, "trial": trial.number, "status": trial.status},
            dir=str(self._folder),
            reinit="create_new",
            # no lines of its own on our streams, and none of ours in its logs
            settings=self._wandb.Settings(silent=True, console="off"),
        )
        run.log(dict(trial.metrics))
        run.finish(exit_code=0 if trial.is_ok else 1)

    def close(self) -> None:
        """End the process that sends runs, when it has sent them."""
        self._wandb.teardown()


def _has_account(wandb: Any) -> bool:
    """Return whether the library knows an account, without asking for one."""
    if "prompt" not in signature(wandb.login).parameters:  # older versions ask in any case
        return bool(wandb.api.api_key)
    wandb.setup(wandb.Settings(silent=True))
    return bool(wandb.login(prompt=False, verify=False))
