"""Export of a study of a user's own step: a Python module that shards the step as a candidate does."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from optuna import Study

from costmodels.job.parallel_config import ParallelConfig
from trials.own_step import World
from tuner.answers.best import best_known
from tuner.own_step.programs import program_text
from tuner.study_file.config import StudyConfig

OWN_TARGETS: tuple[str, ...] = get_args(World)
"""Names of the targets of such exports: the library of the step."""


def export_own_step(config: StudyConfig, study: Study | None, chosen: ParallelConfig, out: Path | None) -> str:
    """Return the text of the module of a candidate.

    Args:
        config: Study of a user's own step.
        study: Its stored counterpart; None for a study that was never run.
        chosen: Candidate.
        out: File that the module is written to; None for a module named after the study.
    """
    assert config.own_step is not None, "the caller checked"
    best = best_known(config, study)
    seconds = config.own_step.step_time_s(chosen)
    known = f"{sum(seconds):.3g} s per step, predicted"
    if best is not None and best.config == chosen:
        known = f"{best.step_time_s:.3g} s per step, {best.known_in_words}"
    return program_text(config.own_step, chosen, known=known, file=module_name(config, out))


def module_name(config: StudyConfig, out: Path | None = None) -> str:
    """Return the name of the exported module: that of its file, or one made of the study's name."""
    stem = out.stem if out is not None else f"{config.name}_sharded"
    name = "".join(char if char.isalnum() else "_" for char in stem)
    return name if name.isidentifier() else f"study_{name}"
