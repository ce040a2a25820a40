"""The files that pages offer: whole logs of trials where they lie, and the report, written when it is asked for.

Nothing is copied, and pages can neither change nor remove any of it. A file's identity holds for one server and cannot
be guessed: optuna-dashboard hands a file to every site that knows it.
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

from tuner.report import collect, render_report
from tuner.study_file.config import StudyConfig

REPORT = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedFile:
    """A file that a page offers.

    Attributes:
        identity: What the dashboard asks for it by.
        name: What it is called.
        entry: What optuna.artifacts keeps of it, as JSON.
    """

    identity: str
    name: str
    entry: str


class StudyFiles:
    """The files of a study, as an artifact store of Optuna's."""

    def __init__(self, config: StudyConfig) -> None:
        self._config = config
        self._ours = uuid.uuid4()
        self._opened: dict[str, Callable[[], BinaryIO]] = {}

    def report(self) -> OfferedFile:
        """The study's report."""
        return self._offered(REPORT, "text/html", self._written_report)

    def logs(self) -> dict[int, tuple[OfferedFile, ...]]:
        """The whole logs that this machine holds, host by host, by the trial's number."""
        return {
            number: tuple(self._offered(path.name, "text/plain; charset=utf-8", _reader(path)) for path in paths)
            for number, paths in self._config.backend.kept_logs().items()
        }

    def _offered(self, name: str, mimetype: str, opened: Callable[[], BinaryIO]) -> OfferedFile:
        identity = str(uuid.uuid5(self._ours, name))
        self._opened[identity] = opened
        entry = {"artifact_id": identity, "filename": name, "mimetype": mimetype, "encoding": None}
        return OfferedFile(identity=identity, name=name, entry=json.dumps(entry))

    def _written_report(self) -> BinaryIO:
        return io.BytesIO(render_report(collect(self._config)).encode())

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """What a file holds.

        Raises:
            ArtifactNotFound: no such file is offered, or it has gone.
        """
        opened = self._opened.get(artifact_id)
        if opened is None:
            raise ArtifactNotFound(artifact_id)
        try:
            return opened()
        except FileNotFoundError as error:
            raise ArtifactNotFound(artifact_id) from error

    def _refused(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("requests for it are refused before they come here")

    write = remove = _refused


def _reader(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")
