"""Run of a user's command with stand-ins first on the search path, in a folder of its own and with a time limit."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trials.command.process_tree import LOOK_EVERY_S, start_supervised
from tuner.capture.launchers import ALIASES, ANSWERED, ANY, HELD_BACK, THROUGH, TRAINING
from tuner.capture.record import Record
from tuner.capture.slurm import Allocation, allocation_of, header_words, job_environment
from tuner.capture.stand_in import ALLOCATION, FOLDER, OWN, REAL_PATH

LIMIT_S = 60.0
"""Default time limit of the run [s]."""
SMALL_BYTES = 1_000_000
"""Largest file of the working directory that is copied [bytes]; larger ones are linked."""
MOST_RECORDS = 10_000
_LAST_CHARACTERS = 2_000
_READ_BYTES = 65_536
_NEVER_OF_SCRIPT = frozenset(("PATH", "PWD", "OLDPWD", "SHLVL", "_", "BASH_ENV", "LINES", "COLUMNS", *OWN))
_USUAL_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/conda/bin", "/opt/venv/bin")
_BACKGROUND_S = 5.0
"""Longest wait for commands that a script left in the background [s]."""
_PRELUDE = r"""# A command that fails here, such as one of a missing environment, does not end the script,
# nor does a variable that is not set here. An interpreter at a path that only another machine has is called by name,
# and so is a program that deletes or reaches out, at any path. A login shell has set the search path anew.
case "$PATH" in
    "$FOLDER_NAME/bin":*) ;;
    *) PATH="$FOLDER_NAME/bin:$PATH" ;;
esac
set -o functrace
trap 'set +eu; meshtune_by_path' DEBUG
meshtune_by_path() {
    local word="${BASH_COMMAND%%[[:space:]]*}"
    # variables may be set for the command alone
    if [[ $BASH_COMMAND =~ ^([A-Za-z_][A-Za-z0-9_]*=[^[:space:]\"\'\$\`\(]*[[:space:]]+)+([^[:space:]]+) ]]; then
        word="${BASH_REMATCH[2]}"
    fi
    case "$word" in
        *'$('* | *'`'* | *=*) return ;;
        \$* | '"'\$* | /* | '~'* | ./* | ../*) ;;
        *) return ;;
    esac
    eval "word=$word" 2>/dev/null
    case "$word" in
        */python | */python[0-9]* | */torchrun | */deepspeed | */accelerate)
            [ -x "$word" ] || eval "function $word { ${word##*/} \"\$@\"; }" 2>/dev/null ;;
        HELD_BACK_PATHS)
            eval "function $word { ${word##*/} \"\$@\"; }" 2>/dev/null ;;
        *)
            # a script that names a login shell would run this machine's profile first
            local first=
            [ -f "$word" ] && { IFS= read -r first < "$word"; } 2>/dev/null
            [[ $first =~ LOGIN_LINE ]] && eval "function $word { bash \"$word\" \"\$@\"; }" 2>/dev/null ;;
    esac
}
command_not_found_handle() {
    ANY_NAME "$@" && return
    echo "capture: no such command here: $1" >&2
    return 127
}
# A folder that only a container or another machine has is passed over.
cd() { builtin cd "$@" 2>/dev/null || echo "capture: no folder here: $*" >&2; }
"""
_SHELLS = ("bash", "sh")
_LOGIN_LINE = "^#!.*(bash|sh) +(-[a-z]*l|--login)"
"""First line of a script that a login shell runs."""
_SHELL = """\
#!/bin/sh
# A login shell would run this machine's profile, which sets the search path anew and may start programs.
leading=yes
for word do
    shift
    case "$leading$word" in
        yes--login | yes-l) continue ;;
        yes-[a-z]*l* | yes-l*) word=$(printf %s "$word" | tr -d l) ;;
        yes[-+]*) ;;
        *) leading= ;;
    esac
    set -- "$@" "$word"
done
exec BASH "$@"
"""
_SITE = """\
import os, sys
words = getattr(sys, "orig_argv", None)
if words is None:
    with open("/proc/self/cmdline") as file:
        words = file.read().split("\\0")[:-1]
rest = [word for word in words[1:]]
at = 0
while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-c", "-m", "-", "-V", "--version"):
    at += 2 if rest[at] in ("-W", "-X") else 1
if at < len(rest) and (rest[at] == "-m" or not rest[at].startswith("-")):
    os.execv({stand_in!r}, [{stand_in!r}, *rest])
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """Outcome of a captured run.

    Attributes:
        records: Commands that the stand-ins wrote down, in their order.
        status: Exit status of the command; None if the time limit ended it.
        output: Last lines that the command wrote to stdout and stderr.
        environment: Environment variables before the run.
        header: Words of the `#SBATCH` lines of the first script in the command that has any.
    """

    records: tuple[Record, ...]
    status: int | None
    output: str
    environment: Mapping[str, str]
    header: tuple[str, ...] = ()

    def own_environment(self, record: Record) -> dict[str, str]:
        """Return the variables of a recorded command that the script set or changed."""
        return {
            name: value
            for name, value in record.environment.items()
            if self.environment.get(name) != value
            and name not in _NEVER_OF_SCRIPT
            and not name.startswith(("SLURM", "OMPI_COMM_WORLD", "BASH_FUNC"))
        }


def capture(command: Sequence[str], *, limit_s: float = LIMIT_S) -> Capture:
    """Run a command in a scratch folder that has the content of the working directory, and return what it started.

    Small files of the working directory are copied and folders are linked, so that the script finds its files and
    writes new ones beside them into the scratch folder.

    Raises:
        OSError: the command cannot be started.
    """
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="meshtune-capture-") as name:
        # A resolved path, because its text is looked for in what the script passed on.
        folder = Path(name).resolve()
        work = folder / "work"
        _fill(work, here)
        stand_ins = _write_stand_ins(folder)
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE.format(stand_in=str(stand_ins / "python")), encoding="utf-8")
        (folder / "prelude.sh").write_text(_prelude(), encoding="utf-8")
        (folder / "records").mkdir()
        header = _header_of(command)
        environment = _environment(folder, allocation_of(header), work)
        status, output = _run(command, work, environment, limit_s)
        records = tuple(
            _at_home(Record.from_json(path.read_text(encoding="utf-8")), folder, here)
            for path in sorted((folder / "records").glob("*.json"))[:MOST_RECORDS]
        )
        before = {key: _home_text(value, folder, here) for key, value in environment.items()}
    return Capture(
        records=records,
        status=status,
        output=_home_text(output, folder, here),
        environment=before,
        header=tuple(header),
    )


def _fill(work: Path, here: Path) -> None:
    """Fill the scratch folder: small files are copied, folders and large files are linked."""
    work.mkdir()
    for entry in here.iterdir():
        target = work / entry.name
        try:
            if entry.is_file() and entry.stat().st_size <= SMALL_BYTES:
                shutil.copy(entry, target)
                continue
        except OSError:
            pass  # not readable: the link shows the same to the script
        target.symlink_to(entry)


def _prelude() -> str:
    """Return what every shell of the script runs first."""
    values = {"ANY_NAME": ANY, "FOLDER_NAME": FOLDER, "HELD_BACK_PATHS": " | ".join(f"*/{name}" for name in HELD_BACK)}
    values["LOGIN_LINE"] = _LOGIN_LINE.replace(" ", "[[:space:]]").replace("!", "\\!")
    text = _PRELUDE
    for name, value in values.items():
        text = text.replace(name, value)
    return text + _functions()


def _functions() -> str:
    """Return functions that stand in for shells by their path, and for interpreters at one of a container."""
    paths = [f"{folder}/{name}" for folder in _USUAL_FOLDERS for name in TRAINING[:5]]
    paths += [f"{folder}/{name}" for folder in ("/bin", "/usr/bin") for name in _SHELLS]
    return "".join(f'function {path} {{ {Path(path).name} "$@"; }}\n' for path in paths)


def _write_stand_ins(folder: Path) -> Path:
    """Write one small program for each name, and return their folder."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    root = str(Path(__file__).resolve().parents[2])
    start = f"import sys; sys.path.insert(0, {root!r}); from tuner.capture import stand_in; stand_in.main(sys.argv[1:])"
    versions = [f"python3.{minor}" for minor in range(6, 20)]
    for name in dict.fromkeys((*TRAINING, *ALIASES, *versions, *THROUGH, *HELD_BACK, *ANSWERED, ANY)):
        path = stand_ins / name
        words = (sys.executable, "-I", "-S", "-c", start, name)
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    if (bash := shutil.which("bash")) is not None:
        # where sh is a smaller shell, a script for bash would fail under it
        for name in _SHELLS:
            (stand_ins / name).write_text(_SHELL.replace("BASH", shlex.quote(bash)), encoding="utf-8")
            (stand_ins / name).chmod(0o755)
    return stand_ins


def _header_of(command: Sequence[str]) -> list[str]:
    """Return the words of the `#SBATCH` lines of the first script in the command that has any."""
    for word in command:
        path = Path(word)
        if path.suffix in (".py", ".json") or not path.is_file() or path.stat().st_size > SMALL_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if words := header_words(text):
            return words
    return []


def _environment(folder: Path, allocation: Allocation, work: Path) -> dict[str, str]:
    """Return the environment of the run. A script with `#SBATCH` lines gets the variables of its job."""
    environment = dict(os.environ)
    path = environment.get("PATH", os.defpath)
    environment |= {
        "PATH": os.pathsep.join((str(folder / "bin"), path)),
        "PWD": str(work),
        "BASH_ENV": str(folder / "prelude.sh"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder / "site"), environment.get("PYTHONPATH")))),
        FOLDER: str(folder),
        REAL_PATH: path,
        ALLOCATION: json.dumps(asdict(allocation)),
    }
    if allocation != Allocation():
        environment |= job_environment(allocation, str(work))
    return environment


def _run(command: Sequence[str], work: Path, environment: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run the command and return its exit status, None after the time limit, and its last output."""
    deadline_s = time.monotonic() + limit_s
    if _is_of_login_shell(work / command[0]):
        command = ("bash", *command)  # whose stand-in runs no profile
    running = start_supervised(command, environment, work, linger_s=min(limit_s, _BACKGROUND_S))
    last, status = b"", None
    try:
        while (status := running.poll()) is None and time.monotonic() < deadline_s:
            if select.select([running.output], [], [], LOOK_EVERY_S)[0]:
                read = os.read(running.output, _READ_BYTES)
                last = (last + read)[-_LAST_CHARACTERS:]
                if not read:
                    time.sleep(LOOK_EVERY_S)  # closed: what the command left behind writes elsewhere
    finally:
        # whatever the command has started ends with its life line
        os.close(running.life_line)
        if status is None:
            running.wait()
        while read := os.read(running.output, _READ_BYTES):
            last = (last + read)[-_LAST_CHARACTERS:]
        os.close(running.output)
    return status, last.decode("utf-8", errors="replace")


def _is_of_login_shell(script: Path) -> bool:
    """Return whether a file's first line has a login shell run it, which would run this machine's profile first."""
    if not script.is_file():
        return False
    with script.open("rb") as file:
        return re.match(_LOGIN_LINE, file.readline(200).decode("utf-8", errors="replace")) is not None


def _home_text(text: str, folder: Path, here: Path) -> str:
    """Replace the scratch folder in a text by the working directory, and leave the folder of stand-ins out of paths."""
    for site in (f"{folder}/site:", f":{folder}/site"):
        text = text.replace(site, "")
    return text.replace(str(folder / "work"), str(here))


def _at_home(record: Record, folder: Path, here: Path) -> Record:
    """Return the record with the working directory in place of the scratch folder."""
    return replace(
        record,
        words=tuple(_home_text(word, folder, here) for word in record.words),
        directory=_home_text(record.directory, folder, here),
        environment={name: _home_text(value, folder, here) for name, value in record.environment.items()},
        files={_home_text(name, folder, here): text for name, text in record.files.items()},
    )
