"""Plans of shapes that are kept between studies, each as a file in the cache folder of the user.

The name of a file is a digest of all that its plan rests on: the model and the job, the cluster, the shape and its
number of micro-batches, the planner with its pins, and the source of planners and cost models. Another study with the
same digest takes the plan as it would have found it, and a change of any of these leads to another name. A file is
written whole, under a name of its own that then replaces the other, so that processes may share the folder. One that
cannot be read, or whose content is not what was written, is named in a note, and its shape is planned anew. The folder
may be removed at any time.

`MESHTUNE_CACHE` names another folder, or `off` for none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
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
from tuner.plans.layer_plans import LayerTask

VARIABLE, OFF = "MESHTUNE_CACHE", "off"
"""Environment variable that names the folder, and its value for none."""

SOURCES = ("hardware", "costmodels", "tuner/planners", "tuner/plans")
"""Folders whose code and tables make a plan what it is."""

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


class PlanCache:
    """Kept plans.

    Args:
        folder: Folder of their files; None to keep none.

    Attributes:
        notes: Sentences on what could not be read or written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
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
        return found

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
