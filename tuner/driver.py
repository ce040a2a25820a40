"""One driving process per study: two at once would run the same trials twice.

The claim stands on the study itself, so that it works on every storage. A claim of this host holds while its process
lives; a claim of another host holds while it is renewed.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from optuna import Study

from hardware.errors import ConfigError

DRIVER = "driver"
RENEW_AFTER_S = 15.0
STALE_AFTER_S = 90.0


def claim(study: Study, *, now_s: float) -> dict[str, Any]:
    """Makes this process the study's driver and returns the claim.

    Raises:
        ConfigError: another process is driving the study.
    """
    held = study.user_attrs.get(DRIVER)
    if held and is_held(held, now_s=now_s):
        raise ConfigError(
            f"is being run by process {held['pid']} on {held['host']}",
            key="name",
            value=study.study_name,
            nearest="wait for it or stop it; `meshtune status` shows how far it is",
        )
    mine = {**_identity(os.getpid()), "renewed_s": now_s}
    study.set_user_attr(DRIVER, mine)
    return mine


def renew(study: Study, mine: dict[str, Any], *, now_s: float) -> dict[str, Any]:
    """The claim, written again if it has become old."""
    if now_s - mine["renewed_s"] < RENEW_AFTER_S:
        return mine
    mine = {**mine, "renewed_s": now_s}
    study.set_user_attr(DRIVER, mine)
    return mine


def release(study: Study) -> None:
    """Gives the claim up."""
    study.set_user_attr(DRIVER, None)


def is_held(held: dict[str, Any], *, now_s: float | None = None) -> bool:
    """Whether the process that made the claim is still driving."""
    if held["host"] == socket.gethostname():
        return held["pid"] != os.getpid() and _identity(held["pid"]) == {
            key: held[key] for key in ("host", "pid", "started")
        }
    return (time.time() if now_s is None else now_s) - held["renewed_s"] < STALE_AFTER_S


def _identity(pid: int) -> dict[str, Any]:
    """A process, told apart from a later one that got the same number."""
    return {"host": socket.gethostname(), "pid": pid, "started": _started(pid)}


def _started(pid: int) -> str:
    """Boot and start time of a process; empty if there is none, or no way to know."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # the command name, in parentheses, may hold spaces: fields are counted behind it; the 20th is the start time
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
        except OSError:
            return ""
        return ""
    return "gone" if fields[0] in "ZX" else f"{boot}:{fields[19]}"
