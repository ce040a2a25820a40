"""Check whether the step has all the operators that a job needs."""

from __future__ import annotations

from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError


def check_trainable(job: TrainingJob) -> None:
    """Check that JAX can compute all operators of a job.

    Raises:
        ConfigError: The backend lacks a part of the model, or the job's precision.
    """
    model = job.model
    missing = {"latent attention": model.uses_mla, "heads of an odd size": model.head_dim % 2 == 1}
    for part, has in missing.items():
        if has:
            raise ConfigError(
                f"has {part}, which the jax backend cannot train",
                key="model",
                value=model.name,
                nearest="trial.backend: torch, or a model with plain attention",
            )
    if job.precision != "fp32":
        raise ConfigError(
            "is not a precision that the jax backend trains in",
            key="job.precision",
            value=job.precision,
            nearest="valid: fp32",
        )
    if model.learned_positions and model.learned_positions < job.sequence_length:
        raise ConfigError(
            f"is longer than the model's table of {model.learned_positions} learned positions",
            key="job.sequence_length",
            value=job.sequence_length,
        )
