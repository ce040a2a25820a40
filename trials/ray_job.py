"""What a program may rely on that `ray job submit` has started: its working directory is a copy that Ray throws away.

Ray unpacks what `--working-dir` sends to `.../runtime_resources/working_dir_files/` of every node that works for the
job, and deletes it when it needs the room, or with the cluster. The next job begins in another copy.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from hardware.io.errors import ConfigError

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set, under this very name, for what `ray job submit` starts and no worker
_COPIES = ("runtime_resources", "working_dir_files")


def is_submitted_job() -> bool:
    """Whether this program, or one that has started it, was started by `ray job submit`."""
    return _SUBMITTED in os.environ


def check_outlives_job(path: Path, *, key: str, value: str, nearest: str) -> None:
    """Refuses to write into a Ray job's working directory; outside of jobs every path will do.

    Args:
        path: What is to be written, as the user gave it.
        key: The key or option that names it.
        value: What it was given.
        nearest: What would be valid.

    Raises:
        ConfigError: the path is relative, or leads into such a copy.
    """
    if is_submitted_job() and (not path.is_absolute() or _COPIES in pairwise(path.resolve().parts)):
        raise ConfigError(
            "would be written into the working directory of this Ray job, a copy that Ray throws away",
            key=key,
            value=value,
            nearest=nearest,
        )
