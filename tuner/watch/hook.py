"""Command that a watch calls with each answer."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hardware.io.errors import ConfigError, quote_value

HOOK_LIMIT_S = 600.0
"""Time after which a hook is killed, and counts as failed [s]."""


def check_hook(command: str) -> None:
    """Check that a command can be started, before the watch begins.

    Raises:
        ConfigError: It is empty, cannot be parted into words, or names no program.
    """
    try:
        words = shlex.split(command)
        is_there = bool(words) and shutil.which(words[0]) is not None
    except ValueError as error:
        raise ConfigError(f"cannot be parted into words ({error})", key="--hook", value=command) from None
    if not words or not words[0].strip():
        raise ConfigError("names no program", key="--hook", value=command, nearest="leave it out for no hook")
    if not is_there:
        if "/" not in words[0]:
            rule = "is no program on the PATH"
        else:
            rule = "cannot be executed" if os.access(words[0], os.F_OK) else "does not exist"
        raise ConfigError(f"{quote_value(words[0])} {rule}", key="--hook", value=command)


def call_hook(command: str, payload: Mapping[str, Any]) -> str:
    """Run a command with an answer as JSON on its standard input; return why it failed, or nothing.

    The command is a program and its arguments, as a shell would part them; no shell runs it. What it prints goes to
    standard error, since standard output belongs to the answers.
    """
    flags = payload["flags"] or {}
    best, training = payload["best"] or {}, payload["in_training"] or {}
    environment = {
        **os.environ,
        "MESHTUNE_DECISION": payload["decision"],
        "MESHTUNE_FORCED": str(int(payload["forced"])),
        "MESHTUNE_PAYS": str(int(payload["pays"])),
        "MESHTUNE_HOSTS": ",".join(best.get("names", [])),
        "MESHTUNE_CONFIG": ",".join(f"{name}={value}" for name, value in best.get("config", {}).items()),
        "MESHTUNE_FLAGS": flags.get("text", ""),
        "MESHTUNE_TARGET": flags.get("target", ""),
        "MESHTUNE_CHECKPOINT": training.get("checkpoint", ""),
        "MESHTUNE_STEP": str(training.get("step", "")),
    }
    text = (json.dumps(payload, allow_nan=False) + "\n").encode()
    try:
        process = subprocess.Popen(  # noqa: S603 # the user's own command
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=2,  # the file descriptor of standard error
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # the program has gone since, or a name holds what no environment can
        return f"the hook could not be started: {getattr(error, 'strerror', None) or error}"
    with process:
        try:
            process.communicate(text, timeout=HOOK_LIMIT_S)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.communicate()
            return f"the hook was killed after {HOOK_LIMIT_S:.0f} s"
        except BaseException:
            _signal(process, signal.SIGTERM)
            raise
    status = process.returncode
    return f"the hook ended with status {status}" if status else ""


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a hook and what it has started, unless they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
