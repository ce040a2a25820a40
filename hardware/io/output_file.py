"""Write files that users name on the command line."""

from __future__ import annotations

from pathlib import Path

from hardware.io.errors import ConfigError


def check_place(out: Path) -> None:
    """Check that a file can be written there, before the work for it begins.

    Raises:
        ConfigError: The path is a directory, or its directory does not exist.
    """
    if out.is_dir() or not out.parent.is_dir():
        rule = "is a directory, not a file" if out.is_dir() else "is in a directory that does not exist"
        raise ConfigError(rule, key="--out", value=str(out))


def write_output(out: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Write a text or bytes to the file that an option names.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        out.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(f"cannot be written ({error.strerror})", key=option, value=str(out)) from None
