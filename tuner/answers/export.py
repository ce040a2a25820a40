"""Export of a configuration of a study, in the form of a framework or as a program that shards a user's own step."""

from __future__ import annotations

from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from hardware.rounding import by_source
from tuner.answers.basis import Basis
from tuner.answers.predictions import predict_taught
from tuner.export.exporter import Export
from tuner.forecast.prepared import Prepared
from tuner.own_step.answer import module_name


def export_configuration(
    prepared: Prepared, basis: Basis, chosen: ParallelConfig, target: str, out: Path | None = None
) -> Export:
    """Return a configuration in the form of a target that suits the study's subject.

    Args:
        prepared: Study.
        basis: What its answers rest on.
        chosen: Configuration.
        target: Name of the target.
        out: File that is written, after which a module is named; None for a name made of the study's.
    """

    def known() -> str:
        told = predict_taught(prepared.problem, chosen, basis)
        return f"{by_source(told['step_time_s'], told['source'])} s per step, {told['outcome'] or told['source']}"

    module = module_name(prepared.request.name, out)
    return prepared.problem.subject.export(chosen, target, knobs=prepared.problem.knobs, known=known, module=module)
