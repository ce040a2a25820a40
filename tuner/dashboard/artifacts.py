"""Files offered by the pages: complete logs of trials at their place, and the report, rendered on request.

Nothing is copied, and pages can neither change nor remove a file. A file's identity is valid for one server only and
cannot be guessed, because optuna-dashboard serves a file to every site that knows its identity.
"""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from optuna.artifacts.exceptions import ArtifactNotFound

from hardware.io.errors import ConfigError
from hardware.io.input_file import open_input
from tuner.report import collect, render_report
from tuner.study_file.request import StudyRequest

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedFile:
    """File offered by a page.

    Attributes:
        identity: Identifier by which the dashboard requests the file.
        name: Name of the file.
        entry: Description of the file as optuna.artifacts stores it, in JSON.
    """

    identity: str
    name: str
    entry: str


class StudyFiles:
    """Files of a study, as an artifact store for Optuna."""

    def __init__(self, request: StudyRequest) -> None:
        self._request = request
        self._ours = uuid.uuid4()
        self._opened: dict[str, Callable[[], BinaryIO]] = {}

    def report(self) -> OfferedFile:
        """Offer the study's report."""
        return self._offer(REPORT, "text/html", self._render_report)

    def logs(self) -> dict[int, tuple[OfferedFile, ...]]:
        """Offer the complete logs on this machine, one per host, by the trial's number."""
        return {
            number: tuple(self._offer(path.name, "text/plain; charset=utf-8", _reader(path)) for path in paths)
            for number, paths in self._request.trials.backend.kept_logs().items()
        }

    def _offer(self, name: str, mimetype: str, opened: Callable[[], BinaryIO]) -> OfferedFile:
        identity = str(uuid.uuid5(self._ours, name))
        self._opened[identity] = opened
        entry = {"artifact_id": identity, "filename": name, "mimetype": mimetype, "encoding": None}
        return OfferedFile(identity=identity, name=name, entry=json.dumps(entry))

    def _render_report(self) -> BinaryIO:
        return io.BytesIO(render_report(collect(self._request)).encode())

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Open a file for reading.

        Raises:
            ArtifactNotFound: The file is not offered, is no longer a file, or may not be read.
        """
        opened = self._opened.get(artifact_id)
        if opened is None:
            raise ArtifactNotFound(artifact_id)
        try:
            return opened()
        except (ConfigError, PermissionError) as error:
            raise ArtifactNotFound(artifact_id) from error

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("the server refuses write requests before they reach the store")

    write = remove = _refuse


def _reader(path: Path) -> Callable[[], BinaryIO]:
    return lambda: open_input(path)
