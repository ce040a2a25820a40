"""Standard output as a command uses it for its answer, which nothing else in the process can write into."""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LossyFile(io.FileIO):
    """Descriptor that drops what it cannot write, and remembers the first error."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes; report them all as written if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes


class AnswerStream(io.TextIOWrapper):
    """Text stream on a copy of a descriptor, for the thread that makes it.

    What other threads print, as those that a user's own code has started may, goes to standard error.

    Args:
        stream: Stream whose descriptor is copied; no child process inherits the copy.
    """

    def __init__(self, stream: TextIO) -> None:
        self.file = LossyFile(os.dup(stream.fileno()), "w")
        self._thread = threading.get_ident()
        super().__init__(
            io.BufferedWriter(self.file),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=bool(stream.line_buffering),
        )

    def write(self, text: str, /) -> int:
        """Write a text, or print it to standard error if another thread asks for it."""
        if threading.get_ident() == self._thread:
            return super().write(text)
        return len(text) if sys.stderr is None else sys.stderr.write(text)
