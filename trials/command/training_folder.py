"""Checkpoints of a training that goes on while trials run in it (FlexParallel 3.2: the running job tries candidates).

A trial loads the latest checkpoint, trains some steps in another layout and saves. The framework reshards: the tensors
of a distributed checkpoint belong to the whole job. What a trial saves counts only when its command has ended by itself
with status 0 and left a checkpoint of a later step, so a trial that fails, is cut off or stopped early costs the
training nothing but its own steps.

    FOLDER/progress.json   trials whose steps count
    FOLDER/trial-0007/     what trial 7 saved; the latest two are kept

Two conventions say which step a folder's checkpoint holds: `latest_checkpointed_iteration.txt` of Megatron-LM
(megatron/training/checkpointing.py, get_checkpoint_tracker_filename), and folders named `step-N` of torchtitan
(torchtitan/components/checkpoint.py). Without either, a trial is taken at the word of its exit status.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input
from hardware.io.output_file import write_output
from trials.backend import MAX_LOSSES

CHECKPOINT = "checkpoint"
"""Placeholder of the folder that a trial loads."""

NEW_CHECKPOINT = "new_checkpoint"
"""Placeholder of the folder that it saves to."""

FIRST_STEP, LAST_STEP = "first_step", "last_step"
"""Placeholders of the steps of the training that are done before a trial, and after it."""

TRAINING = (CHECKPOINT, NEW_CHECKPOINT, FIRST_STEP, LAST_STEP)
"""Placeholders of a study whose trials run inside of a training."""

KEPT = 2
"""Number of checkpoints that are kept: the latest, and the one that it began with."""

PROGRESS = "progress.json"

MOST_BYTES = 64 << 20
"""Largest file of a state that is read."""

_OWN = re.compile(r"trial-\d{4,}(?:-\d+)?")
_STEP = re.compile(r"(?:step|iter)[-_](\d+)")
_TRACKER = "latest_checkpointed_iteration.txt"


class NoProgressError(Exception):
    """The steps of a trial do not count, for the reason that the message gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """Trial whose steps count.

    Attributes:
        trial: Number of the trial.
        first_step: Steps of the training before it.
        last_step: Steps of the training after it.
        layout: Degrees of its configuration above 1, such as "tp=2 dp=4".
        checkpoint: Name of the folder with what it saved.
    """

    trial: int
    first_step: int
    last_step: int
    layout: str
    checkpoint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """State of a training in which trials run.

    Attributes:
        step: Number of steps that are done.
        checkpoint: Folder with the latest checkpoint.
        trials: Trials whose steps count, in their order.
    """

    step: int
    checkpoint: Path
    trials: tuple[Passed, ...] = ()

    @property
    def in_words(self) -> str:
        """State of the training as a sentence."""
        count = len(self.trials)
        steps = sum(each.last_step - each.first_step for each in self.trials)
        made = f"{steps:,} of them in {count} trial{'' if count == 1 else 's'}" if count else "none of them in trials"
        return f"The training has done {self.step:,} steps, {made}; it goes on from {self.checkpoint}"

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON types."""
        return {
            "step": self.step,
            "checkpoint": str(self.checkpoint),
            "trials": [asdict(each) for each in self.trials],
            "in_words": self.in_words,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFolder:
    """Folder of a training's checkpoints.

    Attributes:
        study: Name of the study, whose own folder it is.
        folder: The folder, which every host has to see.
        start: Checkpoint that the first trial loads; None to begin with new weights.
        start_step: Number of steps that it holds.
    """

    study: str
    folder: Path
    start: Path | None = None
    start_step: int = 0

    def progress(self) -> Progress:
        """Return the state of the training.

        Raises:
            ConfigError: The folder belongs to another study, or its state cannot be read.
        """
        file = self.folder / PROGRESS
        if not file.exists():
            return Progress(step=self.start_step, checkpoint=self.start or self.folder / "new")
        try:
            entry = json.loads(read_input(file, most_bytes=MOST_BYTES))
            study, trials = str(entry["study"]), tuple(Passed(**each) for each in entry["trials"])
            latest = trials[-1]
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"cannot be read: {error}", key="trial.training.folder", value=str(file)) from error
        if study != self.study:
            raise ConfigError(
                f"holds the training of the study {study}",
                key="trial.training.folder",
                value=str(self.folder),
                nearest=f"{self.folder}-{self.study}",
            )
        return Progress(step=latest.last_step, checkpoint=self.folder / latest.checkpoint, trials=trials)

    def check(self) -> None:
        """Check that the training can go on.

        Raises:
            ConfigError: It cannot: the folder is another study's, no folder can be made there, or its checkpoint is
                gone.
        """
        progress = self.progress()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot be made: {error.strerror}", key="trial.training.folder", value=str(self.folder)
            ) from error
        if (progress.trials or self.start is not None) and not progress.checkpoint.is_dir():
            raise ConfigError(
                "is not there, and the training goes on from it", key="trial.training", value=str(progress.checkpoint)
            )

    def values(self, progress: Progress, saves: Path, steps: int) -> dict[str, str]:
        """Return the values of the placeholders for a trial that trains some steps."""
        return {
            CHECKPOINT: str(progress.checkpoint),
            NEW_CHECKPOINT: str(saves),
            FIRST_STEP: str(progress.step),
            LAST_STEP: str(progress.step + steps),
        }

    def place_of(self, trial_number: int) -> Path:
        """Return the path of a new folder for the checkpoint of a trial."""
        name = f"trial-{trial_number:04}"
        free = (name if at == 1 else f"{name}-{at}" for at in range(1, 10_000))
        return next(place for each in free if not (place := self.folder / each).exists())

    def begin(self, progress: Progress, saves: Path) -> None:
        """Make the folders of a trial, so that a program finds an empty one where there is no checkpoint yet."""
        saves.mkdir(parents=True)
        progress.checkpoint.mkdir(parents=True, exist_ok=True)

    def advance(self, progress: Progress, saves: Path, *, steps: int, trial: int, layout: str) -> Progress:
        """Take what a trial saved as the training's state; called when its command has ended with status 0.

        Args:
            progress: State of the training when the trial began.
            saves: Folder that it saved to.
            steps: Number of steps that it was asked to train.
            trial: Number of the trial.
            layout: Degrees of its configuration, in words.

        Raises:
            NoProgressError: It left no checkpoint, or none of a later step.
        """
        found = step_in(saves)
        last_step = progress.step + steps if found is None else found
        if not any(saves.iterdir()):
            raise NoProgressError(f"it left no checkpoint in {{{NEW_CHECKPOINT}}}")
        if last_step <= progress.step:
            raise NoProgressError(
                f"its checkpoint is of step {last_step:,}, and the training had done {progress.step:,} before; "
                f"does the command load {{{CHECKPOINT}}}?"
            )
        passed = Passed(
            trial=trial, first_step=progress.step, last_step=last_step, layout=layout, checkpoint=saves.name
        )
        after = Progress(step=last_step, checkpoint=saves, trials=(*progress.trials, passed))
        self._write(after)
        return after

    def clean(self, progress: Progress) -> None:
        """Remove the folders of trials that are not among the latest; nothing but folders named `trial-N` goes."""
        kept = {each.checkpoint for each in progress.trials[-KEPT:]}
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            if place.is_dir() and not place.is_symlink() and _OWN.fullmatch(place.name) and place.name not in kept:
                shutil.rmtree(place, ignore_errors=True)

    def _write(self, progress: Progress) -> None:
        """Replace the file of the state in one step, so that a program that dies leaves the old one."""
        entry = {"study": self.study, "trials": [asdict(each) for each in progress.trials]}
        write_output(self.folder / PROGRESS, json.dumps(entry, indent=1) + "\n", option="trial.training.folder")


def losses_of_training(told: Mapping[int, float], first_step: int, last_step: int) -> tuple[tuple[int, float], ...]:
    """Return the losses of a trial's steps by their steps of the training, at most MAX_LOSSES, evenly spread.

    Args:
        told: Losses by the numbers of steps in the log: those of the training, or else counted from the trial's start.
        first_step: Steps of the training before the trial.
        last_step: Steps of the training after it.
    """
    begins = min(told, default=0)
    shift = first_step if begins < first_step else 0
    found = sorted((at + shift, loss) for at, loss in told.items() if at + shift <= last_step)
    every = -(-len(found) // MAX_LOSSES) or 1
    return tuple(found[::every])


def step_in(folder: Path) -> int | None:
    """Return the step of the latest checkpoint in a folder; None if no convention of the known ones says it."""
    with contextlib.suppress(ConfigError, ValueError):  # there is none, or it says `release`
        return int(read_input(folder / _TRACKER, most_bytes=MOST_BYTES))
    steps = [int(match[1]) for place in folder.iterdir() if place.is_dir() and (match := _STEP.fullmatch(place.name))]
    return max(steps, default=None)
