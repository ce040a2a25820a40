"""Standard output and error that a full disk or a closed pipe does not end: what is printed is not what is kept."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _LossyFile(io.FileIO):
    """Descriptor that drops what it cannot write, and remembers the first error."""

    error: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes; report them all as written if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes


@contextmanager
def lossy_streams() -> Iterator[Callable[[], str]]:
    """Replace standard output and error by streams that drop what they cannot write, and end nothing.

    The function that it gives says in words what standard output dropped; it is empty if that is nothing, or if the
    reader of a pipe went away because it had read enough.
    """
    before = sys.stdout, sys.stderr
    out, sys.stdout = _lossy(sys.stdout, sys.__stdout__)
    _, sys.stderr = _lossy(sys.stderr, sys.__stderr__)

    def lost() -> str:
        if out is not None:
            sys.stdout.flush()
        if out is None or out.error is None or out.error.errno == errno.EPIPE:
            return ""
        return f"standard output could not take the whole result ({out.error.strerror})"

    try:
        yield lost
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # a stream that was closed before this process began
                stream.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: TextIO, original: TextIO | None) -> tuple[_LossyFile | None, TextIO]:
    """Return a lossy stream on the same descriptor, or the stream itself if somebody has replaced it."""
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return None, stream
    file = _LossyFile(stream.fileno(), "w", closefd=False)
    return file, io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )
