"""Claim of one driving process per study, and protection of its steps from interrupts.

Two drivers at once would run the same trials twice. The claim is an attribute of the study itself, so that it works on
every storage. A claim whose process this one can see holds while that process lives, whatever its clock says. Any other
claim holds while it is renewed: that of another host, of another container, or from before the host's last start. The
clocks of both hosts tell that where they agree. Otherwise the claim is watched, since clocks can be set and may differ.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hardware.io.errors import ConfigError
from trials.ranks.unheard_signals import ENDING_SIGNALS
from tuner.run.endings import FirstSignal, TakenOverError, put_back
from tuner.storage.store import AbstractStore, Condition, OvertakenError

DRIVER = "driver"
RENEW_AFTER_S = 15.0
STALE_AFTER_S = 90.0
WATCHED_S = 45.0
"""Time for which an old claim of another host is watched [s]: a driver renews its claim three times meanwhile."""
WATCHES = 15
CLAIM_ATTEMPTS = 3
"""Number of attempts to take a claim that changes meanwhile; somebody who is quicker each time is driving."""


def ignore_note(note: str) -> None:
    """Do nothing, for callers who pass the notes to nobody."""


class Claim:
    """Claim of this process to drive one study, until another process takes the study over.

    A driver writes only in transactions of its claim. If it was suspended or cut off for too long, it finds at its next
    write that the claim belongs to another process, and that write has no effect.

    Attributes:
        store: Store that holds the study.
        is_lost: Whether another process has taken the study over, as far as this one has noticed.
    """

    def __init__(self, store: AbstractStore, study_id: int, text: str, renewed_s: float) -> None:
        self.store = store
        self._study_id = study_id
        self._text = text
        self._renewed_s = renewed_s
        self.is_lost = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write everything in the block together, while the claim holds; a block without writes only checks the claim.

        Raises:
            TakenOverError: Another process has taken the study over; nothing was written.
        """
        try:
            with self.store.together(self._condition):
                yield
        except OvertakenError:
            raise self._overtaken_error() from None

    def renew(self, *, now_s: float) -> bool:
        """Write the claim again if it is old, or from the future of a clock that was set back; return whether it was.

        Raises:
            TakenOverError: Another process has taken the study over.
        """
        if 0 <= now_s - self._renewed_s < RENEW_AFTER_S:
            return False
        mine = _own_claim(now_s)
        if not self.store.replace_attribute(self._condition, mine):
            raise self._overtaken_error()
        self._text, self._renewed_s = json.dumps(mine), now_s
        return True

    def release(self) -> None:
        """Give the claim up, unless another process has taken it over."""
        self.store.replace_attribute(self._condition, None)

    @property
    def _condition(self) -> Condition:
        return Condition(study_id=self._study_id, key=DRIVER, text=self._text)

    def _overtaken_error(self) -> TakenOverError:
        self.is_lost = True
        held, _ = self.store.read_attribute(self._study_id, DRIVER)
        told = _driven_error(self.store.storage.get_study_name_from_id(self._study_id), held or {})
        return TakenOverError(told.rule, key=told.key, value=told.value, nearest=told.nearest)


def claim(
    store: AbstractStore,
    study_name: str,
    *,
    now_s: float,
    on_note: Callable[[str], None] = ignore_note,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim:
    """Make this process the study's driver; of several that ask at once, one gets the claim.

    It is `now_s` after the epoch [s]. `on_note` is told what takes seconds, and `sleep` waits so many.

    Raises:
        ConfigError: Another process is driving the study.
    """
    study_id = store.storage.get_study_id_from_name(study_name)
    mine = _own_claim(now_s)
    for _ in range(CLAIM_ATTEMPTS):
        held, text = store.read_attribute(study_id, DRIVER)
        if held and (is_held(held, now_s=now_s) or _is_renewed(store, study_id, text, held, on_note, sleep)):
            raise _driven_error(study_name, held)
        made = Claim(store, study_id, json.dumps(mine), now_s)
        try:
            if store.replace_attribute(Condition(study_id=study_id, key=DRIVER, text=text), mine):
                return made
        except KeyboardInterrupt:  # it may be written already
            made.release()
            raise
    raise _driven_error(study_name, held or {})


def _is_renewed(
    store: AbstractStore,
    study_id: int,
    text: str | None,
    held: dict[str, Any],
    on_note: Callable[[str], None],
    sleep: Callable[[float], None],
) -> bool:
    """Return whether a claim that seems old changes while it is watched: its host's clock differs from ours then."""
    if _is_visible(held):
        return False
    on_note(
        f"process {held['pid']} on {held['host']} drove this study; watching {WATCHED_S:.0f} s whether it still does"
    )
    for _ in range(WATCHES):
        sleep(WATCHED_S / WATCHES)
        changed, now = store.read_attribute(study_id, DRIVER)
        if now != text:
            return bool(changed)
    return False


def _own_claim(now_s: float) -> dict[str, Any]:
    """Return the claim of this process; its start tells it apart from a later process with the same number."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "pid_namespace": _pid_namespace(),
        "started": _start_of(pid),
        "renewed_s": now_s,
    }


def _is_visible(held: dict[str, Any]) -> bool:
    """Return whether the process that made the claim would be seen here if it lived.

    Containers may share a host's name, and machines may have the same name.
    """
    boot = _start_of(os.getpid()).partition(":")[0]
    return (
        held["host"] == socket.gethostname()
        and held.get("pid_namespace", _pid_namespace()) == _pid_namespace()  # older versions did not write it
        and str(held["started"]).partition(":")[0] in (boot, "gone", "")
    )


def _pid_namespace() -> str:
    """Return the name of the namespace in which process numbers count; empty where it cannot be known."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _driven_error(study_name: str, held: dict[str, Any]) -> ConfigError:
    process = f"process {held['pid']} on {held['host']}" if held else "another process"
    return ConfigError(
        f"is being run by {process}",
        key="name",
        value=study_name,
        nearest="wait for it or stop it; `meshtune status` shows how far it is",
    )


def is_held(held: dict[str, Any], *, now_s: float | None = None) -> bool:
    """Return whether the process that made the claim is still driving."""
    if _is_visible(held):
        started: str = held["started"]
        return held["pid"] != os.getpid() and _start_of(held["pid"]) == started
    renewed_s: float = held["renewed_s"]
    return abs((time.time() if now_s is None else now_s) - renewed_s) < STALE_AFTER_S


def _start_of(pid: int) -> str:
    """Return boot and start time of a process; empty if neither can be known, `gone` if there is no such process."""
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


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let signals that end a run wait until the block has ended, then hand them to the handlers that were there before.

    It protects steps that an interrupt would leave half done. A second signal does not wait, unless it only repeats the
    first. Handlers that the block installs do not outlive it. Starting Ray replaces that of SIGTERM by one that exits:
    such an exit is handed on as the signal that it was.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    waiting: list[int] = []
    first = FirstSignal()

    def hold(number: int, _frame: FrameType | None) -> None:
        waiting.append(number)
        if not first.is_repeated() and len(waiting) > 1:
            put_back(before)
            signal.raise_signal(number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, hold)
    try:
        yield
    except SystemExit:
        put_back(before)
        if callable(before[signal.SIGTERM]):
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        put_back(before)
    if waiting:
        signal.raise_signal(waiting[0])
