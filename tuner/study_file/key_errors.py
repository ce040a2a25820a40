"""Report mistakes in a part of a study file under the key that holds the part."""

from __future__ import annotations

from typing import Any

from hardware.io.errors import ConfigError


def under(prefix: str, resolve: Any) -> Any:
    """Call `resolve` and return its result; report a mistake inside it under the key `prefix`."""
    try:
        return resolve()
    except ConfigError as error:
        if error.file:  # the mistake is in a file that the study names: report that file and the key that names it
            error = ConfigError(str(error.in_file(error.file)), key=prefix)
            raise error from None
        raise error.under(prefix) from None
