"""Programs that a study of a step of the user's own hands over, written as `export` writes them."""

from __future__ import annotations

from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from tuner.answers.basis import basis_in
from tuner.answers.export import export_configuration
from tuner.run.studies import prepared_of
from tuner.study_file.request import StudyRequest


def write_program(request: StudyRequest, chosen: ParallelConfig, target: str, file: Path) -> None:
    """Write the module of a candidate of a study that was never run."""
    prepared = prepared_of(request)
    exported = export_configuration(prepared, basis_in(prepared, None), chosen, target, file)
    file.write_text(exported.text, encoding="utf-8")
