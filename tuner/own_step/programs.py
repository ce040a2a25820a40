"""Answer of a study of a user's own step, made for the library that the step is written in."""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig
from tuner.own_step.answer import OwnAnswer
from tuner.own_step.plans import OwnStepPlans

# The modules of a library are imported where a step is one in it, because the other library may be missing.


def answer_of(plans: OwnStepPlans, chosen: ParallelConfig) -> OwnAnswer:
    """Return the shardings of a candidate."""
    if plans.step.world == "jax":
        from tuner.own_step import jax_program  # noqa: PLC0415 # see above

        return jax_program.answer_of(plans, chosen)
    from tuner.own_step import torch_program  # noqa: PLC0415 # see above

    return torch_program.answer_of(plans, chosen)


def usage_lines(plans: OwnStepPlans, file: str) -> tuple[str, str, str]:
    """Return three lines of Python that use the exported program of this module name."""
    if plans.step.world == "jax":
        from tuner.own_step import jax_program  # noqa: PLC0415 # see above

        return jax_program.usage_lines(plans, file)
    from tuner.own_step import torch_program  # noqa: PLC0415 # see above

    return torch_program.usage_lines(file)


def program_text(plans: OwnStepPlans, chosen: ParallelConfig, *, known: str, file: str) -> str:
    """Return a Python module that shards the user's step as a candidate does.

    Args:
        plans: Plans of the user's step.
        chosen: Candidate.
        known: Step time with its source, in words.
        file: Name of the module.
    """
    if plans.step.world == "jax":
        from tuner.own_step import jax_program  # noqa: PLC0415 # see above

        return jax_program.program_text(plans, chosen, known=known, file=file)
    from tuner.own_step import torch_program  # noqa: PLC0415 # see above

    return torch_program.program_text(plans, chosen, known=known, file=file)
