"""Export of a configuration of a study, in the form of a framework or as a program that shards a user's own step."""

from __future__ import annotations

from pathlib import Path

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from tuner.answers.best import best_known
from tuner.export.exporter import Export
from tuner.forecast.prepared import Prepared
from tuner.own_step.answer import module_name
from tuner.storage.stored_studies import StoredStudies


def export_configuration(
    prepared: Prepared, stored: StoredStudies, chosen: ParallelConfig, target: str, out: Path | None = None
) -> Export:
    """Return a configuration in the form of a target that suits the study's subject.

    Args:
        prepared: Study.
        stored: Studies in its storage.
        chosen: Configuration.
        target: Name of the target.
        out: File that is written, after which a module is named; None for a name made of the study's.
    """

    def known() -> str:
        best = best_known(prepared, stored.find(prepared.request.name))
        if best is not None and best.config == chosen:
            return f"{best.step_time_s:.3g} s per step, {best.known_in_words}"
        forecast = prepared.problem.subject.forecast(ConfigGrid.from_configs([chosen], prepared.problem.options.opened))
        return f"{forecast.estimate.step_time_s[0]:.3g} s per step, predicted"

    module = module_name(prepared.request.name, out)
    return prepared.problem.subject.export(chosen, target, knobs=prepared.problem.knobs, known=known, module=module)
