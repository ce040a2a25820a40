"""Standard output and error that a full disk or a closed pipe does not end: what is printed is not what is kept."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hardware.io.answer_stream import AnswerStream, LossyFile


@contextmanager
def lossy_streams() -> Iterator[Callable[[], str]]:
    """Replace standard output and error by streams that drop what they cannot write, and end nothing.

    The function that it gives says in words what standard output dropped; it is empty if that is nothing, or if the
    reader of a pipe went away because it had read enough.
    """
    before = sys.stdout, sys.stderr
    is_ours = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__
    out = AnswerStream(sys.stdout) if is_ours else None
    sys.stdout = out or sys.stdout
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(sys.stderr)

    def lost() -> str:
        if out is not None:
            sys.stdout.flush()
        if out is None or out.file.error is None or out.file.error.errno == errno.EPIPE:
            return ""
        return f"standard output could not take the whole result ({out.file.error.strerror})"

    try:
        yield lost
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # a stream that was closed before this process began
                stream.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a lossy stream on the same descriptor."""
    return io.TextIOWrapper(
        io.BufferedWriter(LossyFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
