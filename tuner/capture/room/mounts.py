"""File system of the room: everything can be read, nothing that is written stays.

The new root is a small file system in memory. Each folder of the old root appears in it through an overlay, whose upper
layer lies in memory too: the kernel sends every change there. A folder with mounts below it is taken apart, because an
overlay shows no mounts of its lower folder. Where an overlay is not possible, the place can only be read. /proc is new,
/sys can only be read, and /dev has the usual pseudo-devices and nothing else. Sockets and named pipes of the old file
systems lead nowhere: an overlay has files of its own for them.

Source: the kernel's documentation of overlayfs (user namespaces, `userxattr`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tuner.capture.room.system_calls import (
    BIND,
    NO_DEVICES,
    NO_PROGRAMS,
    NO_SETUID,
    PRIVATE,
    READ_ONLY,
    RECURSIVE,
    REMOUNT,
    enter_root,
    mount,
)

MOST_ENTRIES = 1_000
"""Largest number of entries of a folder that is taken apart."""
_SMALL_BYTES = 1_000_000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_KERNELS = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "sysfs", "tracefs"),
    )
)
"""Kinds of file systems by which the kernel is spoken to; none of them is shown."""
_KEPT_FLAGS = (
    (os.ST_NOSUID, NO_SETUID),
    (os.ST_NODEV, NO_DEVICES),
    (os.ST_NOEXEC, NO_PROGRAMS),
    (os.ST_NOATIME, 1024),
    (os.ST_NODIRATIME, 2048),
    (os.ST_RELATIME, 1 << 21),
)
"""Flags of a mount as statvfs tells them and as mount takes them; a namespace may not take them away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Upper layer of one overlay.

    Attributes:
        place: Folder that the overlay shows.
        upper: Descriptor of the folder with what was written.
    """

    place: str
    upper: int

    def changes(self, most: int) -> list[str]:
        """Return what was written, removed names with a leading `-`, up to a number of names."""
        found: list[str] = []
        for folder, folders, files, descriptor in os.fwalk(dir_fd=self.upper):
            here = os.path.normpath(os.path.join(self.place, folder))  # noqa: PTH118 # as fwalk's own texts
            for name in sorted(files):
                is_gone = stat.S_ISCHR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)
                found.append(f"{'-' * is_gone}{here.rstrip('/')}/{name}")
            if not folders and not files and folder != ".":
                found.append(f"{here}/")
            if len(found) >= most:
                return found[:most]
        return found


@dataclass(kw_only=True, slots=True)
class NewRoot:
    """Root of the room while it is built.

    Attributes:
        base: Folder of the file system in memory.
        own: Folders that get an overlay of their own, so that a user may write below folders of others.
        mounts: Kind of file system by mount point of the old root.
        parts: Names in each folder that was taken apart.
        layers: Upper layers so far.
        unshown: Places that could not be shown.
    """

    base: str
    own: frozenset[str]
    mounts: dict[str, str]
    parts: dict[str, frozenset[str]] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    unshown: list[str] = field(default_factory=list)

    def show(self, place: str) -> None:
        """Show a place of the old root at the same place of the new one."""
        target = f"{self.base}/root{place}"
        if self.mounts.get(place) in _KERNELS:
            Path(target).mkdir(exist_ok=True)
            return
        mode = os.lstat(place).st_mode
        if stat.S_ISLNK(mode):
            Path(target).symlink_to(os.readlink(place))  # noqa: PTH115 # as it stands, also if it leads nowhere
        elif stat.S_ISREG(mode):
            self._show_file(place, target)
        elif stat.S_ISDIR(mode):
            Path(target).mkdir(exist_ok=True)
            below = f"{place.rstrip('/')}/"
            if any(point.startswith(below) for point in self.mounts):
                self._show_parts(place, below)
            else:
                self._overlay(place, target)
                for own in sorted(one for one in self.own if one.startswith(below)):
                    self._overlay(own, f"{self.base}/root{own}")

    def added(self, most: int) -> list[str]:
        """Return what was written into folders that were taken apart, as far as its name is new there."""
        found: list[str] = []
        for place, names in self.parts.items():
            for name in sorted(set(os.listdir(place)) - names):  # noqa: PTH208 # names, not paths
                found += _names_below(f"{place.rstrip('/')}/{name}", most)
        return found

    def _show_parts(self, place: str, below: str) -> None:
        entries = sorted(os.listdir(place))  # noqa: PTH208 # names, not paths
        if len(entries) > MOST_ENTRIES:
            raise OSError(f"{place} has mounts below it and {len(entries)} entries")
        self.parts[place] = frozenset(entries)
        for name in entries:
            try:
                self.show(below + name)
            except OSError as error:
                self.unshown.append(f"{below}{name}: {error.strerror}")
        with contextlib.suppress(OSError):
            Path(f"{self.base}/root{place}").chmod(stat.S_IMODE(os.stat(place).st_mode))  # noqa: PTH116 # a text

    def _overlay(self, place: str, target: str) -> None:
        """Show a folder through an overlay; where that is not possible, so that it can only be read."""
        layer = f"{self.base}/layers/{len(self.layers)}"
        for name in ("upper", "work"):
            os.makedirs(f"{layer}/{name}")  # noqa: PTH103 # a text
        upper = Path(f"{layer}/upper")
        upper.chmod(stat.S_IMODE(os.stat(place).st_mode))  # noqa: PTH116 # a text
        options = (
            f"lowerdir={_option(place)},upperdir={_option(str(upper))},workdir={_option(f'{layer}/work')},userxattr"
        )
        try:
            mount("overlay", target, "overlay", NO_SETUID, options)
        except OSError:
            if place.split("/")[1] in ("run", "tmp"):
                return  # sockets of servers lie there: rather an empty folder
            bind_to_read(place, target)
            return
        self.layers.append(Layer(place=place, upper=os.open(upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)))

    def _show_file(self, place: str, target: str) -> None:
        """Copy a small file, and bind another one so that it can only be read."""
        if os.stat(place).st_size <= _SMALL_BYTES:  # noqa: PTH116 # a text
            shutil.copy(place, target)
        else:
            Path(target).touch()
            bind_to_read(place, target)


def build_root(
    base: str, *, own: Iterable[str], bytes_in_memory: int, apart: tuple[str, int], short: str, links: dict[str, str]
) -> NewRoot:
    """Build the new root, enter it, and return it with its layers. The calling process has namespaces of its own.

    Args:
        base: Empty folder, over which the file system in memory is mounted.
        own: Folders that get an overlay of their own.
        bytes_in_memory: Most that can be written [bytes].
        apart: Folder with memory of its own, which is there when nothing else can be written, and its size [bytes].
        short: Folder of the links, for example `/.m`.
        links: Target of each link by its name.

    Raises:
        OSError: a step is not allowed here.
    """
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    points = mount_points(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape"))
    mount("meshtune", base, "tmpfs", NO_SETUID | NO_DEVICES, f"size={bytes_in_memory},mode=755")
    for name in ("root", "layers"):
        Path(base, name).mkdir()
    mount(f"{base}/root", f"{base}/root", flags=BIND)
    found = NewRoot(base=base, own=frozenset(own), mounts=points)
    for name in sorted(os.listdir("/")):  # noqa: PTH208 # names, not paths
        if name not in ("proc", "sys", "dev"):
            try:
                found.show(f"/{name}")
            except OSError as error:
                found.unshown.append(f"/{name}: {error.strerror}")
    _make_proc(f"{base}/root/proc")
    _make_devices(f"{base}/root/dev", bytes_in_memory)
    found.parts |= {"/": frozenset((*os.listdir("/"), short[1:])), "/dev/shm": frozenset()}  # noqa: PTH208, S108 # names
    Path(f"{base}/root/sys").mkdir()
    with contextlib.suppress(OSError):  # a container may hide it
        mount("sysfs", f"{base}/root/sys", "sysfs", READ_ONLY | NO_SETUID | NO_DEVICES | NO_PROGRAMS)
    mount("meshtune", f"{base}/root{apart[0]}", "tmpfs", NO_SETUID | NO_DEVICES, f"size={apart[1]},mode=755")
    folder = Path(f"{base}/root{short}")
    folder.mkdir()
    for name, target in links.items():
        (folder / name).symlink_to(target)
    Path(f"{base}/root/.old").mkdir()
    enter_root(f"{base}/root", "/.old")
    Path("/.old").rmdir()
    return found


def mount_points(text: str) -> dict[str, str]:
    """Return the kind of file system by mount point, from the text of /proc/self/mountinfo; the root is left out."""
    found = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        words = before.split()
        if len(words) > 4 and after:
            place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
            found[place] = after.split()[0]
    found.pop("/", None)
    return found


def bind_to_read(place: str, target: str) -> None:
    """Show a place at another one so that it can only be read."""
    mount(place, target, flags=BIND)
    given = os.statvfs(target).f_flag
    flags = REMOUNT | BIND | READ_ONLY | NO_DEVICES | NO_SETUID
    for told, flag in _KEPT_FLAGS:
        flags |= flag if given & told else 0
    mount("none", target, flags=flags)


def _make_proc(target: str) -> None:
    Path(target).mkdir()
    mount("proc", target, "proc", NO_SETUID | NO_DEVICES | NO_PROGRAMS)
    # Root may write to the kernel's own entries in any namespace.
    for entry in Path(target).iterdir():
        if not entry.name.isdigit() and not entry.is_symlink():
            bind_to_read(str(entry), str(entry))


def _make_devices(target: str, bytes_in_memory: int) -> None:
    folder = Path(target)
    folder.mkdir()
    for name in _DEVICES:
        (folder / name).touch()
        mount(f"/dev/{name}", str(folder / name), flags=BIND)
    for name, link in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (folder / name).symlink_to(f"/proc/self/fd{link}")
    (folder / "shm").mkdir()
    mount("shm", str(folder / "shm"), "tmpfs", NO_SETUID | NO_DEVICES, f"size={bytes_in_memory // 4},mode=1777")
    (folder / "pts").mkdir()
    with contextlib.suppress(OSError):  # few scripts ask for a terminal
        mount("devpts", str(folder / "pts"), "devpts", NO_SETUID | NO_PROGRAMS, "newinstance,ptmxmode=0666,mode=620")
        (folder / "ptmx").symlink_to("pts/ptmx")


def _option(text: str) -> str:
    """Return a path as an option of an overlay."""
    return re.sub(r"([\\:,])", r"\\\1", text)


def written(root: NewRoot, *, without: str, most: int) -> list[str]:
    """Return the names of what was written in the room that is entered, without those below one folder."""
    found = root.added(most)
    for layer in root.layers:
        found += layer.changes(most + 1_000)
    return sorted(name for name in found if not name.lstrip("-").startswith(f"{without}/"))[:most]


def _names_below(path: str, most: int) -> list[str]:
    """Return the files below a path, or the path itself, which ends in a slash if it is an empty folder."""
    if os.path.islink(path) or not os.path.isdir(path):  # noqa: PTH112, PTH114 # texts
        return [path]
    found = [f"{folder}/{name}" for folder, _, names in os.walk(path) for name in sorted(names)]
    return found[:most] or [f"{path}/"]
