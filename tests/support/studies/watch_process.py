"""Process of `meshtune watch`, whose answers are read while it runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 90.0
"""Time within which an answer has to come [s]."""


RUN = """
from tuner.cli.main import main
{settings}
main()
"""
"""The command `meshtune` with other settings."""


class Watch:
    """Running watch of the study `study.yaml` in a folder.

    Args:
        folder: The folder.
        options: Further options of `meshtune watch`.
        environment: Its environment; None gives it that of this process.
        settings: Statements that it executes before it begins.

    Attributes:
        err: File of what it writes to standard error.
        process: The process.
    """

    def __init__(
        self, folder: Path, *options: str, environment: Mapping[str, str] | None = None, settings: str = ""
    ) -> None:
        surroundings = {**(os.environ if environment is None else environment)}
        paths = filter(None, (str(ROOT), surroundings.get("PYTHONPATH")))
        self.out, self.err = folder / "answers.jsonl", folder / "trouble.txt"
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", RUN.format(settings=settings)),
                    *("watch", "study.yaml", "--json", "--every", "0.2", *options),
                ],
                cwd=folder,
                env={**surroundings, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=out,
                stderr=err,
            )

    def answers(self) -> list[dict[str, Any]]:
        """Return all answers so far."""
        return [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]

    def wait_for(self, decision: str, at: int) -> dict[str, Any]:
        """Wait for answer number `at`, which has to be of this kind, and return it."""
        deadline_s = time.monotonic() + LIMIT_S
        while len(self.answers()) <= at:
            assert self.process.poll() is None, self.err.read_text(encoding="utf-8")
            assert time.monotonic() < deadline_s, (self.answers(), self.err.read_text(encoding="utf-8"))
            time.sleep(0.1)
        found = self.answers()[at]
        assert found["decision"] == decision, found
        return found

    def wait_for_event(self, begin: str) -> dict[str, Any]:
        """Wait for an answer with an event that begins so, and return the first one."""
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            for answer in self.answers():
                if any(event.startswith(begin) for event in answer["events"]):
                    return answer
            assert self.process.poll() is None, self.err.read_text(encoding="utf-8")
            assert time.monotonic() < deadline_s, (self.answers(), self.err.read_text(encoding="utf-8"))
            time.sleep(0.1)

    def wait_for_state(self, is_enough: Callable[[dict[str, Any]], bool], file: Path) -> None:
        """Wait until the state that it keeps is enough."""
        deadline_s = time.monotonic() + LIMIT_S
        while not (file.exists() and is_enough(json.loads(file.read_text(encoding="utf-8")))):
            assert self.process.poll() is None, self.err.read_text(encoding="utf-8")
            assert time.monotonic() < deadline_s, (file.read_text(encoding="utf-8"), self.err.read_text("utf-8"))
            time.sleep(0.1)

    def wait_for_trouble(self, text: str) -> None:
        """Wait until it has written this to standard error."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in (told := self.err.read_text(encoding="utf-8")):
            assert self.process.poll() is None, told
            assert time.monotonic() < deadline_s, told
            time.sleep(0.1)

    def wait_for_references(self, count: int, state: Path) -> None:
        """Wait until its probe has a reference for this number of pairs of hosts."""
        self.wait_for_state(
            lambda kept: sum(pair["reference_bytes_per_s"] > 0 for pair in kept["links"]["pairs"]) == count, state
        )


@contextmanager
def watching(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None, settings: str = ""
) -> Iterator[Watch]:
    """Yield a watch that is killed at the end of the block."""
    watch = Watch(folder, *options, environment=environment, settings=settings)
    try:
        yield watch
    finally:
        watch.process.kill()
        watch.process.wait()
