"""Ray on this machine: a quiet import, and a start with local sockets and with workers that find our modules.

Ray is imported when it is needed, not before. The import takes a second that other commands need not spend, and the
environment at that moment decides whether sockets stay on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError
from hardware.io.temporary import check_room
from trials.on_ray import keeper as keeper_program
from trials.on_ray.cluster import first_line, job_of
from trials.on_ray.keeper import DISMISSED, GRACE_S, MARK
from trials.on_ray.side_processes import kill_when_ended, without_helpers
from trials.ranks.unheard_signals import sigterm_kept, unheard

OBJECT_STORE_BYTES = 100_000_000
"""Size of Ray's object store [bytes]. Trials exchange a few kilobytes, and Ray would reserve 30% of the memory."""

RAY_ROOM_BYTES = 4 << 20
"""Room that Ray needs in its folder [bytes]: it writes 0.2 MB of logs and tables at its start (measured)."""

OWN_SESSION = "meshtune"
"""File in the folder of a session that tells that this program has begun it."""

_LOCAL_ENVIRONMENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",  # some of Ray's agents outlive a killed driver by this
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the only switch that keeps every socket on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without GPUs of its own still sees those of the machine
}
_QUIET_ENVIRONMENT = {
    # Ray prints the raylet's error messages to standard output, which belongs to the command's result
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}


STARTS = 2
"""Times that Ray is started: it gives up after 30 s, which a busy machine may take."""

NUM_KEEPERS = 2
"""Keepers of one Ray: whoever kills one of them with the driver leaves another."""

_KEEPERS: list[subprocess.Popen[bytes]] = []
"""Keepers of the Ray that this process has started, if it has."""


def import_ray() -> Any:
    """Import Ray without its messages on standard output. The library is not typed, hence `Any`."""
    with _environment(_QUIET_ENVIRONMENT):  # read once, at import
        ray = import_module("ray")
        import_module("ray.exceptions")
    return ray


def start_local_ray(num_cpus: int, *, study: str = "") -> bool:
    """Start Ray on this machine, unless the program has started or joined one; return whether it was started.

    Args:
        num_cpus: Number of cores that it has to give.
        study: Name of the study that the job of this program belongs to.

    Raises:
        ConfigError: Ray does not start.
    """
    starts_left = STARTS
    while True:
        starts_left -= 1
        try:
            return _start(num_cpus, study)
        except ConfigError:
            raise
        except OSError as error:
            raise _does_not_start(error, "set RAY_TMPDIR to a folder with a short path that Ray can write to") from None
        except Exception as error:  # noqa: BLE001 # Ray raises plain Exceptions where its processes start too slowly
            if not starts_left:
                raise _does_not_start(error, "try again when the machine is less busy") from None


def _does_not_start(error: Exception, remedy: str) -> ConfigError:
    return ConfigError(
        f"does not start on this machine ({first_line(error)})",
        key="address",
        value="local",
        nearest=f"{remedy}, or join a cluster with RAY_ADDRESS",
    )


def _start(num_cpus: int, study: str) -> bool:
    mark = uuid.uuid4().hex  # a later Ray of this process is another one
    changes = _LOCAL_ENVIRONMENT | _own_token() | {"PYTHONPATH": _python_path(), MARK: mark}
    with _environment(changes), warnings.catch_warnings():
        # a process that has traced JAX warns of forks; Ray's children run another program at once
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        ray = import_ray()
        if ray.is_initialized():
            return False
        _check_room()
        _start_keepers(mark, str(Path(ray.__file__).parent))
        try:
            with unheard(), sigterm_kept(), without_helpers(ray):
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    job_config=job_of(ray, study),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                )
        except BaseException:  # an interrupt, too, leaves no process behind
            stop_local_ray(ray)
            raise
    with contextlib.suppress(OSError):  # it serves `meshtune doctor` alone
        (Path(ray._private.worker._global_node.get_session_dir_path()) / OWN_SESSION).touch()
    return True


def _check_room() -> None:
    """Check that there is room in the folder in which Ray keeps its logs and sockets.

    Raises:
        ConfigError: There is not, where Ray would wait for its own processes for more than a minute.
    """
    key = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = Path(os.environ.get(key, "/tmp"))  # noqa: S108 # Ray's own choice
    check_room(folder, "Ray's logs and sockets", key=key, room_bytes=RAY_ROOM_BYTES)


def stop_local_ray(ray: Any) -> None:
    """End the Ray that `start_local_ray` has started."""
    kill_when_ended(ray)
    with unheard(), sigterm_kept():
        ray.shutdown()
    keepers, _KEEPERS[:] = _KEEPERS[:], []
    for keeper in keepers:
        assert keeper.stdin is not None, "a keeper has a pipe"
        with contextlib.suppress(OSError):  # somebody has killed it
            keeper.stdin.write(DISMISSED)
            keeper.stdin.close()
    for keeper in keepers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(timeout=GRACE_S)


def renew_keepers() -> None:
    """Start a keeper in place of each that somebody has killed."""
    for at, keeper in enumerate(_KEEPERS):
        if keeper.poll() is not None:
            assert keeper.stdin is not None, "a keeper has a pipe"
            keeper.stdin.close()
            _KEEPERS[at] = _start_keeper(keeper.args)


def _start_keepers(mark: str, folder: str) -> None:
    """Start the keepers of Ray, which is installed in `folder`; they end after this process."""
    if sys.platform != "linux":  # where processes tell their environment
        return
    command = [sys.executable, "-I", "-S", str(Path(keeper_program.__file__)), mark, folder, str(os.getpid())]
    _KEEPERS.extend(_start_keeper(command) for _ in range(NUM_KEEPERS))


def _start_keeper(command: Any) -> subprocess.Popen[bytes]:
    """Start one keeper; Popen, whose `args` may be given here again, types its command as nothing in particular."""
    with unheard():
        return subprocess.Popen(  # noqa: S603 # our own module
            command,
            env={name: value for name, value in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside the block, and restore the old ones."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _own_token() -> dict[str, str]:
    """Return a token that protects Ray where it can neither find nor keep one in the home folder, as in a container."""
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
        return {}
    with contextlib.suppress(OSError, RuntimeError):  # a user without a home
        home = Path.home()
        folder = home / ".ray"
        if (folder / "auth_token").is_file() or os.access(folder if folder.exists() else home, os.W_OK):
            return {}
    return {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _python_path() -> str:
    """Return the PYTHONPATH with which local workers find modules that are not installed.

    It holds the checkout, and all other folders that this program imports from outside of its Python installation.
    """
    entries = [Path(__file__).parents[2], *map(Path, sys.path)]
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    resolved = dict.fromkeys(entry.resolve() for entry in entries)
    return os.pathsep.join(str(path) for path in resolved if not prefixes & {path, *path.parents})
