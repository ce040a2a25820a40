"""Process between Meshtune and a captured script: it goes behind a boundary of the kernel, and starts the script there.

It is a fork of the process that captures. It leaves, in the folder `out` of the capture, the records of the stand-ins
and one `Outcome`; its exit status is the script's. Where the boundary is not possible, the script is not started.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trials.command.process_tree import NOT_STARTED, Supervised, adopt_orphans
from trials.ranks.unheard_signals import hear_signals, ignore_signals
from tuner.capture.record import record_paths
from tuner.capture.room.exec_watch import NEVER, NEVER_WITHOUT_NAMESPACES, ExecWatch, start_watch
from tuner.capture.room.guard import allow_changes_in
from tuner.capture.room.keeper import Bounds, keep
from tuner.capture.room.mounts import build_root, written
from tuner.capture.room.system_calls import (
    LIBC,
    NEW_HOST_NAME,
    NEW_IPC,
    NEW_MOUNTS,
    NEW_NETWORK,
    NEW_PROCESSES,
    NEW_USER,
    drop_privileges,
    is_known_machine,
    let_others_read,
    unshare,
)

NAMESPACES, GUARD = "namespaces", "guard"
BOUNDARIES = (NAMESPACES, GUARD)
"""Boundaries in the order in which they are tried."""
SHORT = "/.m"
"""Folder of the stand-ins' short paths in the room."""
OUTCOME = "outcome.json"
"""Name of the file with the outcome, in the folder `out`."""
MOST_WRITTEN = 1_000
"""Largest number of written files that are named."""
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG
_READS_ALL = (0, 1, 2, 3, 4, 6, 7)
"""Capabilities of root's script inside namespaces: it owns, reads and changes files of all users, in the overlays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Script to run, with its boundary and bounds.

    Attributes:
        command: Program and arguments of the script.
        directory: Working directory.
        environment: Environment variables of the script.
        folder: Folder of the capture, with the stand-ins in `bin` and the empty folders `base`, `records` and `out`.
        stand_ins: Names of the programs that have a stand-in.
        own: Folders below which the script may write although they lie in folders of other users.
        boundary: Boundary to go behind.
        bounds: Bounds of the run.
    """

    command: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    folder: str
    stand_ins: tuple[str, ...]
    own: tuple[str, ...]
    boundary: str
    bounds: Bounds

    def short_paths(self, folder: str) -> dict[str, str]:
        """Return the short path of each stand-in in a folder, by the name of its program."""
        return {name: f"{folder}/{_digits(number)}" for number, name in enumerate(self.stand_ins)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of a script behind its boundary.

    Attributes:
        refused: Why the boundary was not possible, or nothing.
        stopped: Bound that ended the script, as a sentence, or nothing.
        written: Files that the script wrote and that are gone now; removed ones begin with `-`.
        unshown: Places that the script could not see, with the reason.
    """

    refused: str = ""
    stopped: str = ""
    written: tuple[str, ...] = ()
    unshown: tuple[str, ...] = ()

    @staticmethod
    def from_json(text: str) -> Outcome:
        """Return the outcome that the program wrote."""
        found = json.loads(text)
        return Outcome(**{**found, "written": tuple(found["written"]), "unshown": tuple(found["unshown"])})


def start_behind(setting: Setting) -> Supervised:
    """Start the script of a setting behind its boundary, without input; its output and error become one stream.

    Closing the life line ends the script. If this process is killed, the capture's folder is removed too.
    """
    life_end, life_line = os.pipe()
    output, output_end = os.pipe()
    parent = os.getpid()
    keeper = os.fork()
    if keeper:
        os.close(life_end)
        os.close(output_end)
        return Supervised(output=output, life_line=life_line, supervisor=keeper)
    status = NOT_STARTED
    try:
        os.close(life_line)
        os.close(output)
        os.setsid()
        ignore_signals()
        _connect(output_end)
        status = _run(setting, life_end)
    except BaseException:
        traceback.print_exc()  # a mistake of ours; the last line is told
        raise
    finally:
        if os.getppid() != parent:  # it was killed, and can remove nothing
            shutil.rmtree(setting.folder, ignore_errors=True)
        sys.stderr.flush()
        os._exit(status)


def _connect(output: int) -> None:
    """Make a descriptor the standard output and error, and let the input be empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(output)


def _run(setting: Setting, life_end: int) -> int:
    """Run the script behind its boundary and return its exit status."""
    out = os.open(f"{setting.folder}/out", os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not is_known_machine():
            raise OSError("the numbers of this machine's system calls are not known")
        return (_run_in_namespaces if setting.boundary == NAMESPACES else _run_guarded)(setting, out, life_end)
    except OSError as error:
        _write(out, Outcome(refused=error.strerror or str(error)))
        return NOT_STARTED


def _run_in_namespaces(setting: Setting, out: int, life_end: int) -> int:
    """Run the script in namespaces of its own.

    Raises:
        OSError: the machine does not allow them; nothing was started.
    """
    told, tell = os.pipe()
    outer = os.fork()
    if not outer:
        os.close(told)
        status = NOT_STARTED
        try:
            _enter_namespaces()
            inner = os.fork()
            if not inner:
                _end_with_parent()
                status = _run_as_first(setting, out, life_end, tell)
            else:
                os.close(tell)
                _end_with_parent()
                code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
                status = code if code >= 0 else 128 - code
        except OSError as error:
            with contextlib.suppress(OSError):
                os.write(tell, (error.strerror or str(error)).encode())
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(tell)
    reason = b""
    while read := os.read(told, 4096):
        reason += read
    os.close(told)
    status = os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])
    if reason:
        raise OSError(reason.decode(errors="replace"))
    return status if status >= 0 else 128 - status


def _enter_namespaces() -> None:
    """Put this process into a new user namespace, with the same numbers, and what belongs to it."""
    ready, make_ready = os.pipe()
    own = os.getpid()
    helper = os.fork()
    if not helper:
        # It stays outside, because only there somebody may map more than one number.
        os.close(make_ready)
        code = 1
        try:
            if os.read(ready, 1):
                _map_numbers(own)
                code = 0
        finally:
            os._exit(code)
    os.close(ready)
    try:
        unshare(NEW_USER | NEW_MOUNTS | NEW_PROCESSES | NEW_NETWORK | NEW_IPC | NEW_HOST_NAME)
        os.write(make_ready, b"1")
    finally:
        os.close(make_ready)
        mapped = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if mapped != 0:
        raise OSError("user and group numbers cannot be mapped")


def _map_numbers(process: int) -> None:
    """Map the user's and the group's number to themselves, and all that there are for root."""
    for name, number in (("uid", os.geteuid()), ("gid", os.getegid())):
        place = Path(f"/proc/{process}/{name}_map")
        if os.geteuid() == 0:
            lines = Path(f"/proc/self/{name}_map").read_text(encoding="utf-8").splitlines()
            with contextlib.suppress(OSError):  # root of a container may lack the right
                place.write_text("".join("{0} {0} {2}\n".format(*line.split()) for line in lines), encoding="utf-8")
                continue
        if name == "gid":
            Path(f"/proc/{process}/setgroups").write_text("deny", encoding="utf-8")
        place.write_text(f"{number} {number} 1\n", encoding="utf-8")


def _run_as_first(setting: Setting, out: int, life_end: int, tell: int) -> int:
    """Build the room as the first process of its namespaces, run the script, and return its exit status.

    Raises:
        OSError: a step is not allowed; nothing was started.
    """
    paths = setting.short_paths(SHORT)
    links = {path.rpartition("/")[2]: f"{setting.folder}/bin/{name}" for name, path in paths.items()}
    root = build_root(
        f"{setting.folder}/base",
        own=setting.own,
        bytes_in_memory=setting.bounds.written_bytes,
        apart=(f"{setting.folder}/records", setting.bounds.records_bytes),
        short=SHORT,
        links=links,
    )
    _raise_loopback()
    let_others_read(allowed=False)
    kept = _READS_ALL if os.geteuid() == 0 else ()
    command, listener = _start(setting, lambda: drop_privileges(kept), never=NEVER, network=True)
    os.close(tell)  # nothing was refused
    watch = ExecWatch(listener=listener, short_paths=paths, own_folders=(f"{setting.folder}/", f"{SHORT}/"))
    status, stopped = keep(command, watch, setting.bounds, life_end)
    names = written(root, without=setting.folder, most=MOST_WRITTEN)
    _finish(setting, out, Outcome(stopped=stopped, written=tuple(names), unshown=tuple(root.unshown)))
    return status


def _run_guarded(setting: Setting, out: int, life_end: int) -> int:
    """Run the script under the guard.

    Raises:
        OSError: the machine does not allow it; nothing was started.
    """

    def confine() -> None:
        drop_privileges()
        allow_changes_in([setting.folder])

    adopt_orphans()
    paths = setting.short_paths(setting.folder)
    for name, path in paths.items():
        if not Path(path).is_symlink():
            Path(path).symlink_to(f"{setting.folder}/bin/{name}")
    command, listener = _start(setting, confine, never=NEVER_WITHOUT_NAMESPACES, network=False)
    watch = ExecWatch(listener=listener, short_paths=paths, own_folders=(f"{setting.folder}/",))
    status, stopped = keep(command, watch, setting.bounds, life_end)
    _finish(setting, out, Outcome(stopped=stopped))
    return status


def _start(setting: Setting, confine: Callable[[], None], *, never: tuple[str, ...], network: bool) -> tuple[int, int]:
    """Start the script behind the filter; return its process number and the descriptor on which the filter asks.

    Raises:
        OSError: the confinement or the filter is not allowed; nothing was started.
    """
    ours, its = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        try:
            os.setsid()
            hear_signals()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (setting.bounds.written_bytes,) * 2)
            os.chdir(setting.directory)
            let_others_read(allowed=True)  # the keeper reads what it starts
            confine()
            listener = start_watch(never=never, network=network)
            its.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener]))])
            its.close()
            os.close(listener)
            os.execve(_program(setting), setting.command, dict(setting.environment))  # noqa: S606 # the user's script
        except OSError as error:
            words = error.strerror or str(error)
            with contextlib.suppress(OSError):
                its.send(words.encode())  # closed, once the filter was in place
            sys.stderr.write(f"{setting.command[0]}: {words}\n")
            sys.stderr.flush()
        finally:
            os._exit(NOT_STARTED)
    its.close()
    found, ancillary, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(4))
    ours.close()
    if not ancillary:
        os.waitpid(child, 0)
        raise OSError(found.decode(errors="replace") or "the script's process ended before it began")
    return child, array.array("i", ancillary[0][2][:4])[0]


def _program(setting: Setting) -> str:
    """Return the path of the command's program, or of its stand-in."""
    name = setting.command[0]
    if name.rpartition("/")[2] in setting.stand_ins:
        return f"{setting.folder}/bin/{name.rpartition('/')[2]}"
    return shutil.which(name, path=setting.environment.get("PATH")) or name


def _raise_loopback() -> None:
    """Bring the new network's loopback device up, since scripts ask for free ports on it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    LIBC.prctl(_SIGNAL_OF_PARENT, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def _finish(setting: Setting, out: int, outcome: Outcome) -> None:
    """Copy the stand-ins' records out of the room, and write the outcome."""
    paths = record_paths(
        Path(setting.folder, "records"), most=setting.bounds.records, most_bytes=setting.bounds.records_bytes
    )
    for path in paths:
        with path.open("rb") as source, open(path.name, "wb", opener=_below(out)) as target:  # an opener
            shutil.copyfileobj(source, target)
    _write(out, outcome)


def _write(out: int, outcome: Outcome) -> None:
    with open(OUTCOME, "w", encoding="utf-8", opener=_below(out)) as file:  # an opener
        json.dump(asdict(outcome), file)


def _below(folder: int) -> Callable[[str, int], int]:
    """Return an opener of files in the folder behind a descriptor."""
    return lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=folder)


def _digits(number: int) -> str:
    """Return a number below 1,296 as two digits and letters."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    return letters[number // 36] + letters[number % 36]
