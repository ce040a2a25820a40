"""Check whether the trainer has all the modules that a job needs."""

from __future__ import annotations

from costmodels.job.training_job import TrainingJob
from hardware.io.errors import ConfigError
from trials.training.plannable import check_optimizer, check_sequences

PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adam", "sgd", "plain_sgd", "adagrad", "rmsprop")
"""Optimizers that update any part of a weight by itself (optimizers.py)."""


def check_trainable(job: TrainingJob) -> None:
    """Check that the trainer has all modules for a job.

    Raises:
        ConfigError: The trainer lacks a part of the model, the job's precision, its recomputation or its optimizer.
    """
    model = job.model.plain
    missing = {
        "latent attention": model.uses_mla,
        "more than two norms per layer": model.norms_per_layer != 2,
        "gated shared experts": model.shared_expert_gate,
        "router biases": model.router_bias,
        "attention without a causal mask": not model.causal,
        "a tower": bool(job.model.towers),
        "windows of attention": not job.model.is_plain,
        "heads of an odd size": model.head_dim % 2 == 1,
    }
    for part, has in missing.items():
        if has:
            raise ConfigError(
                f"has {part}, which the torch backend cannot train",
                key="model",
                value=model.name,
                nearest="another backend or model",
            )
    if job.precision not in PRECISIONS:
        raise ConfigError(
            "is not a precision that the torch backend trains in",
            key="job.precision",
            value=job.precision,
            nearest=f"valid: {', '.join(PRECISIONS)}",
        )
    if job.recompute_modules != ("core_attn",):
        raise ConfigError(
            "is more than the torch backend can recompute selectively",
            key="job.recompute_modules",
            value=list(job.recompute_modules),
            nearest="valid: core_attn",
        )
    check_optimizer(job, OPTIMIZERS, backend="torch")
    check_sequences(job, backend="torch")
