"""Plans of shapes that are kept between studies, each as a file in the cache folder of the user.

The name of a file is a digest of all that its plan rests on: the model and the job, the cluster, the shape and its
number of micro-batches, the planner with its pins, and the source of planners and cost models. Another study with the
same digest takes the plan as it would have found it, and a change of any of these leads to another name. A file is
written whole, under a name of its own that then replaces the other, so that processes may share the folder. One that
cannot be read, or whose content is not what was written, is named in a note, and its shape is planned anew. The folder
may be removed at any time. Where the files take more than MOST_KEPT_MIB together, those go first that were not used for
the longest time.

`MESHTUNE_CACHE` names another folder, or `off` for none, and `MESHTUNE_CACHE_MIB` another size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.job.layer_change import SHAPE
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input
from hardware.io.output_file import write_output
from tuner.plans.layer_tasks import LayerTask

VARIABLE, OFF = "MESHTUNE_CACHE", "off"
"""Environment variable that names the folder, and its value for none."""

SOURCES = ("hardware", "costmodels", "tuner/planners", "tuner/plans")
"""Folders whose code and tables make a plan what it is."""

SIZE_VARIABLE = "MESHTUNE_CACHE_MIB"
"""Environment variable with the most that all files may take together [MiB]."""

MOST_KEPT_MIB = 256
"""Most that all files take together without that variable [MiB], room for some 40,000 plans."""

KEPT_SHARE = 0.9
"""Share of that size which is left once files were removed, so that not every study removes some."""

MOST_BYTES = 2**20
"""Most bytes of a file, far above what a plan takes."""

_ROOT = Path(__file__).resolve().parents[2]


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of kept plans, which may be missing yet; None if no plans are kept."""
    named = environment.get(VARIABLE, "")
    if named:
        return None if named == OFF else Path(named) / "plans"
    try:
        home = Path.home()
    except RuntimeError:  # the user has none
        return None
    usual = {"darwin": home / "Library" / "Caches", "win32": home / "AppData" / "Local"}.get(
        sys.platform, home / ".cache"
    )
    return Path(environment.get("XDG_CACHE_HOME") or usual) / "meshtune" / "plans"


def most_kept_bytes(environment: Mapping[str, str] = os.environ) -> float:
    """Return the most that all files may take together [bytes].

    Raises:
        ConfigError: The variable is no size.
    """
    named = environment.get(SIZE_VARIABLE, "")
    try:
        found = float(named) if named else float(MOST_KEPT_MIB)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ConfigError("must be a number of MiB", key=SIZE_VARIABLE, value=named, nearest=str(MOST_KEPT_MIB))
    return found * 2**20


class PlanCache:
    """Kept plans.

    Args:
        folder: Folder of their files; None to keep none.
        most_bytes: Most that these take together [bytes].

    Attributes:
        notes: Sentences on what could not be read or written.
    """

    def __init__(self, folder: Path | None, most_bytes: float = MOST_KEPT_MIB * 2**20) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self.notes: list[str] = []

    def find(self, task: LayerTask) -> dict[str, Any] | None:
        """Return what was kept of a shape; None if nothing was, or nothing that can be read."""
        if self._folder is None:
            return None
        path = self._path_of(task)
        try:
            kept = json.loads(read_input(path, most_bytes=MOST_BYTES))
            found, digest = kept["found"], kept["digest"]
        except ConfigError as error:
            if os.path.lexists(path):
                self.notes.append(f"{path}: the kept plan {error.rule}; its shape is planned anew")
            return None
        except (ValueError, TypeError, KeyError):
            found, digest = None, ""
        if not isinstance(found, dict) or digest != _digest_of(found):
            self.notes.append(f"{path}: the kept plan is damaged; its shape is planned anew")
            return None
        with suppress(OSError):  # another process may have removed it
            os.utime(path)
        return found

    def trim(self) -> None:
        """Remove the files that were not used for the longest time, if all together take too much.

        Others may remove the same files at the same time, and write new ones.
        """
        if self._folder is None:
            return
        kept = []
        with suppress(OSError), os.scandir(self._folder) as entries:  # the folder may be missing
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        kept.append((status.st_mtime_ns, status.st_size, entry.path))
        left = sum(num_bytes for _, num_bytes, _ in kept)
        if left <= self._most_bytes:
            return
        for _, num_bytes, path in sorted(kept):
            if left <= KEPT_SHARE * self._most_bytes:
                break
            with suppress(OSError):
                Path(path).unlink()
            left -= num_bytes

    def keep(self, task: LayerTask, found: Mapping[str, Any]) -> None:
        """Keep what was found for a shape."""
        if self._folder is None:
            return
        path = self._path_of(task)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_output(path, json.dumps({"found": found, "digest": _digest_of(found)}), option=VARIABLE)
        except (OSError, ConfigError) as error:
            self.notes.append(f"{self._folder}: plans cannot be kept there for later studies ({error})")
            self._folder = None

    def _path_of(self, task: LayerTask) -> Path:
        assert self._folder is not None, "only a folder has files"
        return self._folder / f"{key_of(task)}.json"


def key_of(task: LayerTask) -> str:
    """Return the digest of all that the plan of a shape rests on."""
    shape = tuple(getattr(task.config, name) for name in SHAPE)
    rest = (shape, task.num_micro_batches, task.planning.name, task.planning.pins)
    texts = (_source_digest(), _text_of_job(task.job), _text_of_cluster(task.cluster), _text_of(rest))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@lru_cache(maxsize=8)
def _text_of_job(job: TrainingJob) -> str:
    # The number of micro-batches says what a plan needs to know of the global batch.
    return _text_of(replace(job, global_batch_size=1))


@lru_cache(maxsize=8)
def _text_of_cluster(cluster: Cluster) -> str:
    return _text_of(cluster)


def _text_of(value: Any) -> str:
    """Return a text that is equal for equal values, in every process."""
    if is_dataclass(value):
        told = ",".join(f"{each.name}={_text_of(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({told})"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(_text_of, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(_text_of, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_text_of(key)}:{_text_of(each)}' for key, each in value.items()))}}}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    assert value is None or isinstance(value, str | int | float), f"{value!r} has no text"
    return repr(value)


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Return the digest of the code and the tables that make plans."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (_ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".yaml", ".csv", ".json"):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _digest_of(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
