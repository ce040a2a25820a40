"""Working directory of a submitted Ray job: a copy that Ray throws away, so that no results may be written there.

Ray unpacks the folder given by `--working-dir` to `.../runtime_resources/working_dir_files/` on every node of the job.
It deletes the copy when it needs the room, or with the cluster. The next job begins in another copy.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from hardware.io.errors import ConfigError

_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # really its name; set for programs of `ray job submit`, not for workers
_COPIES = ("runtime_resources", "working_dir_files")


def is_submitted_job() -> bool:
    """Return whether `ray job submit` has started this program or one of its parents."""
    return _SUBMITTED in os.environ


def check_outlives_job(path: Path, *, key: str, value: str, nearest: str) -> None:
    """Check that a path does not lead into a Ray job's working directory; outside of jobs every path is valid.

    The error holds the key or option that names the path, its value, and a valid value as advice.

    Raises:
        ConfigError: The path is relative, or leads into such a copy.
    """
    if is_submitted_job() and (not path.is_absolute() or _COPIES in pairwise(path.resolve().parts)):
        raise ConfigError(
            "would be written into the working directory of this Ray job, a copy that Ray throws away",
            key=key,
            value=value,
            nearest=nearest,
        )
