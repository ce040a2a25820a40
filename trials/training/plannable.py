"""Checks that a job's training step is one that backends can execute as a sharding plan says."""

from __future__ import annotations

from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError

PLANNED_OPTIMIZERS = ("adam", "sgd")
"""Optimizers whose update is an operator that backends compute."""


def check_plannable(job: TrainingJob, *, backend: str, nearest: str, precisions: tuple[str, ...] = ("fp32",)) -> None:
    """Check that the operators of a job's graph are among those that a backend computes.

    Args:
        job: Training job of the trials.
        backend: Name of the backend in messages.
        nearest: What the user can choose instead for another model.
        precisions: Precisions that the backend trains in.

    Raises:
        ConfigError: The backend lacks a part of the model, or the job's precision.
    """
    model = job.model.plain
    missing = {
        "a tower": bool(job.model.towers),
        "windows of attention": not job.model.is_plain,
        "latent attention": model.uses_mla,
        "heads of an odd size": model.head_dim % 2 == 1,
    }
    for part, has in missing.items():
        if has:
            raise ConfigError(
                f"has {part}, which the {backend} backend cannot train", key="model", value=model.name, nearest=nearest
            )
    if job.precision not in precisions:
        raise ConfigError(
            f"is not a precision that the {backend} backend trains in",
            key="job.precision",
            value=job.precision,
            nearest=f"valid: {', '.join(precisions)}",
        )
    check_optimizer(job, PLANNED_OPTIMIZERS, backend=backend)
    check_sequences(job, backend=backend)


def check_optimizer(job: TrainingJob, known: tuple[str, ...], *, backend: str) -> None:
    """Check that a backend has the job's optimizer.

    Raises:
        ConfigError: It has others only.
    """
    if job.optimizer not in known:
        raise ConfigError(
            f"is not an optimizer that the {backend} backend has",
            key="job.optimizer",
            value=job.optimizer,
            nearest=f"valid: {', '.join(known)}",
        )


def check_sequences(job: TrainingJob, *, backend: str) -> None:
    """Check that sequences are of one length, and not longer than the model's table of positions.

    Raises:
        ConfigError: Their length varies, or the table is shorter.
    """
    if job.sequences is not None:
        raise ConfigError(
            f"vary in length, but the {backend} backend trains sequences of one length",
            key="job.sequences",
            nearest="the simulated or the command backend",
        )
    model = job.model
    if model.learned_positions and model.learned_positions < job.sequence_length:
        raise ConfigError(
            f"is longer than the model's table of {model.learned_positions} learned positions",
            key="job.sequence_length",
            value=job.sequence_length,
        )
