"""Standard error on which every line is a JSON object, whoever writes there: messages too, and what libraries print."""

from __future__ import annotations

import io
import json
import time
from typing import TextIO


class EventLines(io.TextIOBase):
    """Stream that hands on texts that are JSON objects, and wraps others as events `message`.

    Args:
        stream: Stream to write to.

    Attributes:
        study: Name of the study that the messages are about; None before it is known.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self.study: str | None = None

    def write(self, text: str, /) -> int:
        """Write a text; what does not end a line waits for the rest of it."""
        self._begun += text
        if self._begun.endswith("\n"):
            self._tell()
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a begun line goes on waiting."""
        self._stream.flush()

    def finish(self) -> None:
        """Write a begun line."""
        self._tell()
        self._stream.flush()

    def isatty(self) -> bool:
        """Return that this is no terminal: bars and colours are for people."""
        return False

    def writable(self) -> bool:
        """Return that it can be written to."""
        return True

    def _tell(self) -> None:
        text, self._begun = self._begun.strip("\n"), ""
        if not text.strip():
            return
        if not _is_object(text):
            text = json.dumps({"time_s": time.time(), "event": "message", "study": self.study, "text": text})
        self._stream.write(f"{text}\n")
        self._stream.flush()


def _is_object(text: str) -> bool:
    if not text.startswith("{") or "\n" in text:
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
