import codecs
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.programs.rights import NOBODY, reachable_folder
from tuner.capture.room.enter import GUARD, NAMESPACES
from tuner.capture.room.keeper import Bounds
from tuner.capture.room.system_calls import LIBC
from tuner.capture.run_script import capture

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("bash") is None, reason="there is no Linux with a bash to run scripts with"
)
BOUNDARIES = (NAMESPACES, GUARD)

STARTED = {
    # how a script may start srun, which lies in $SITE and leaves a mark
    "search path": 'PATH="$SITE:$PATH"; srun A torchrun a.py',
    "search path of modules": 'export PATH="$SITE:/usr/bin:/bin"; sh -c "srun B torchrun a.py"',
    "search path without any site's": "PATH=/usr/bin:/bin; module load cuda; srun S torchrun a.py",
    "full path": '"$SITE"/srun C torchrun a.py',
    "variable": "RUN=$SITE/srun; $RUN D torchrun a.py",
    "env -i": 'env -i "$SITE/srun" E torchrun a.py',
    "env -i and a search path": 'env -i PATH="$SITE:/usr/bin:/bin" srun F torchrun a.py',
    "command": 'command "$SITE/srun" G torchrun a.py',
    "exec": 'exec "$SITE/srun" H torchrun a.py',
    "timeout": 'timeout 9 "$SITE/srun" I torchrun a.py',
    "nohup": 'nohup "$SITE/srun" J torchrun a.py',
    "xargs": 'echo "K torchrun a.py" | xargs "$SITE/srun"',
    "Python": 'python3 -c "import os, subprocess; '
    "subprocess.run([os.environ['SITE'] + '/srun', 'L', 'torchrun', 'a'])\"",
    "Python's exec": "python3 -c \"import os; os.execv(os.environ['SITE'] + '/srun', ['srun', 'M', 'torchrun', 'a'])\"",
    "a small shell": "printf '\"$SITE\"/srun N torchrun a.py' > n.sh; sh n.sh",
    "make": "printf 'all:\\n\\t$(SITE)/srun O torchrun a.py\\n' > Makefile; make -s",
    "find": 'find . -maxdepth 0 -exec "$SITE/srun" P torchrun a.py ";"',
    "a login shell": 'bash -lc "$SITE/srun Q torchrun a.py"',
    "a way that this machine lacks": "/no/such/folder/bin/srun R torchrun a.py",
}
"""Each with a letter that its command has, so that its record is found."""
NEEDS = {"make": "make", "xargs": "xargs", "find": "find"}
AROUND = {
    # how a script may reach something else than a program with a stand-in
    "another name": 'cp "$SITE/srun" other; ./other',
    "another shell": 'bash "$SITE/srun"; sh < "$SITE/srun"',
    "a file of the user's": 'echo lost > "$MARKS/written"; echo lost >> "$MARKS/kept"; : > "$MARKS/kept"',
    "a folder here": "echo lost > folder/log; echo lost | tee folder/log",
    "removing": 'python3 -c "import os; os.remove(os.environ[\'MARKS\'] + \'/kept\')"; mv "$MARKS/kept" "$MARKS/moved"',
    "cutting": 'truncate -s 0 "$MARKS/kept"',
    "linking": 'ln "$MARKS/kept" "$MARKS/linked"; ln -s x "$MARKS/led"',
    "a process that stays": 'setsid nohup python3 -c "import os, time; time.sleep(2); '
    "open(os.environ['MARKS'] + '/stayed', 'w')\" &",
    "a signal": 'kill -USR1 "$VICTIM"',
    "the network": 'echo hello > "/dev/tcp/127.0.0.1/$PORT"',
    "a socket of a server": 'python3 -c "import os, socket; s = socket.socket(socket.AF_UNIX); '
    "s.connect(os.environ['MARKS'] + '/socket'); s.send(b'hello')\"",
    "another process's files": 'echo lost > "/proc/$VICTIM/cwd/through"; echo lost > "/proc/1/cwd/through"',
    "a shared memory": 'echo lost > "/dev/shm/$(basename "$MARKS")"',
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory, a folder `marks` with a file of the user's, and a real srun that leaves a mark."""
    for name in ("work/folder", "marks", "site"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "marks" / "kept").write_text("measured", encoding="utf-8")
    (tmp_path / "work" / "folder" / "log").write_text("measured" * 200_000, encoding="utf-8")
    srun = tmp_path / "site" / "srun"
    srun.write_text('#!/bin/sh\necho "$1" > "$MARKS/ran-$1-$$"\n', encoding="utf-8")
    srun.chmod(0o755)
    monkeypatch.setenv("SITE", str(tmp_path / "site"))
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def marks(place):
    """The names in the folder of marks, without that of the server's socket."""
    return sorted(path.name for path in (place / "marks").iterdir() if path.name != "socket")


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_no_way_of_starting_a_program_reaches_it(place, boundary):
    """However a script starts srun, the stand-in writes its command down, and the real program leaves no mark."""
    ways = {name: way for name, way in STARTED.items() if shutil.which(NEEDS.get(name, "sh"))}
    Path("train.sh").write_text("\n".join(f"({way})" for way in ways.values()), encoding="utf-8")

    done = capture(["bash", "train.sh"], boundaries=[boundary])

    assert marks(place) == ["kept"]
    found = {outer[1] for record in done.records for outer in record.through}
    assert {name for name, way in ways.items() if not set(re.findall(r"\b[A-Z]\b", way)) & found} == set()
    assert {record.words[0] for record in done.records if not record.held_back} == {"torchrun"}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_no_way_around_the_stand_ins_leaves_anything(place, boundary):
    """Programs under other names, files, processes, signals, sockets and shared memory leave nothing outside."""
    got = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(place / "marks" / "socket"))
        for one in (server, local):
            one.listen()
            threading.Thread(target=lambda one=one: got.append(one.accept()), daemon=True).start()
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=place / "marks")
        try:
            os.environ |= {"VICTIM": str(victim.pid), "PORT": str(server.getsockname()[1])}
            Path("train.sh").write_text("\n".join(f"({way})" for way in AROUND.values()), encoding="utf-8")
            done = capture(["bash", "train.sh"], boundaries=[boundary], bounds=Bounds(seconds=0, background_s=1.0))
            is_alive = victim.poll() is None
        finally:
            victim.kill()
            victim.wait()
            del os.environ["VICTIM"], os.environ["PORT"]

    assert is_alive
    assert got == []
    assert marks(place) == ["kept"]
    assert (place / "marks" / "kept").read_text(encoding="utf-8") == "measured"
    assert Path("folder/log").stat().st_size == len("measured") * 200_000
    assert not Path("/dev/shm", "marks").exists()  # noqa: S108 # the script names it
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["folder", "train.sh"]
    assert done.status is not None


def test_without_a_boundary_a_script_meets_the_stand_ins_and_a_copy(place):
    """Where the kernel cannot help, shells still find the stand-ins, and files here and in folders here stay whole."""
    names = ("search path", "search path of modules", "search path without any site's", "full path", "variable")
    names += ("command", "timeout")
    ways = [*(STARTED[name] for name in names), AROUND["a folder here"]]
    Path("train.sh").write_text("\n".join(f"({way})" for way in ways), encoding="utf-8")

    done = capture(["bash", "train.sh"], boundaries=[], unconfined=True)

    through = [outer for record in done.records for outer in record.through]
    assert {outer[1] for outer in through if outer[0] != "timeout"} == set("ABSCDI")
    assert marks(place) == ["kept", *(mark for mark in marks(place) if mark.startswith("ran-G"))]
    assert Path("folder/log").stat().st_size == len("measured") * 200_000
    assert done.boundary == ""
    assert [Path(name).name for name in done.written] == ["log"]


LACKING = """
import ctypes, errno, os, platform, sys
from tuner.capture.room.system_calls import LIBC, drop_privileges, filter_program, number_of, system_call
drop_privileges()
fail = (0x06, 0, 0, 0x00050000 | errno.ENOSYS)
found = [(0x20, 0, 0, 0)]
for name in sys.argv[1].split(","):
    found += [(0x15, 0, 1, number_of(name)), fail]
code, program = filter_program([*found, (0x06, 0, 0, 0x7FFF0000)])
system_call("seccomp", 1, 0, ctypes.create_string_buffer(program))
os.execv(sys.executable, [sys.executable, "-m", "tuner", *sys.argv[2:]])
"""
"""A program that starts Meshtune on a kernel without some system calls."""


@pytest.fixture
def lacking(place):
    """Runs `meshtune init --capture` on a script with a launch of Megatron-LM, where system calls are missing."""
    assert place == Path.cwd().parent
    flags = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    flags += " --micro-batch-size 1 --global-batch-size 8 --vocab-size 512 --bf16"
    Path("train.sh").write_text(
        f"echo x > log\ntorchrun --nproc-per-node 8 pretrain_gpt.py {flags}\n", encoding="utf-8"
    )
    root = str(Path(__file__).resolve().parents[4])

    def run(missing, *options):
        words = ["init", "--capture", "--cluster", "dgx-h100", "--json", *options, "--", "bash", "train.sh"]
        command = [sys.executable, "-c", LACKING, missing, *words]
        environment = os.environ | {"PYTHONPATH": root}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_without_namespaces_the_guard_holds(lacking):
    """Where namespaces are not allowed, the script runs under the guard, without a question."""
    done = lacking("unshare", "--yes")

    assert json.loads(done.stdout)["capture"]["boundary"] == "guard", done.stderr
    assert not Path("log").exists()


@pytest.mark.slow
def test_without_any_boundary_nothing_runs_but_with_a_word(lacking):
    """Where the kernel offers nothing, consent to a capture is not enough; `--unconfined` is."""
    refused = lacking("unshare,landlock_create_ruleset", "--yes")

    assert refused.returncode == 2
    assert "--unconfined" in refused.stderr
    assert "namespaces of its own: " in refused.stderr
    assert not Path("log").exists()
    agreed = lacking("unshare,landlock_create_ruleset", "--yes", "--unconfined")
    assert agreed.returncode == 0, agreed.stderr
    assert json.loads(agreed.stdout)["capture"]["boundary"] is None
    assert any("without a boundary" in note for note in json.loads(agreed.stdout)["notes"])
    assert not Path("log").exists()


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize(
    ("text", "bounds", "words"),
    [
        ("f() { f | f & }; f; while :; do :; done", {"processes": 40}, "more than 40 processes"),
        (
            "python3 -c 'a = bytearray(300 << 20); input()' < <(while :; do :; done)",
            {"memory_bytes": 200 << 20},
            "200 MiB of memory",
        ),
        (
            "while :; do echo 0123456789012345678901234567890123456789; done",
            {"output_bytes": 1 << 20},
            "more than 1 MiB",
        ),
        ("while :; do :; done", {}, "longer than 3 s"),
    ],
    ids=["processes", "memory", "output", "time"],
)
def test_a_script_is_held_to_its_bounds(place, boundary, text, bounds, words):
    """A script that takes too many processes, too much memory, output or time is ended, and the bound is named."""
    Path("train.sh").write_text(f"torchrun a.py\n{text}\n", encoding="utf-8")

    limit_s = 30.0 if bounds else 3.0
    done = capture(
        ["bash", "train.sh"], limit_s=limit_s, boundaries=[boundary], bounds=Bounds(seconds=limit_s, **bounds)
    )

    assert words in done.stopped
    assert done.status is None
    assert [record.words for record in done.records] == [("torchrun", "a.py")]
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if _leads_below(path, place)]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_no_process_starts_beyond_the_bound(boundary):
    """However fast a script starts processes, each start waits to be counted: there are never more than it may have."""
    text = "mkfifo line\nfor number in {1..200}; do { read word < line; } & echo $number; done\n"
    Path("train.sh").write_text(text, encoding="utf-8")

    done = capture(["bash", "train.sh"], boundaries=[boundary], bounds=Bounds(seconds=20.0, processes=30))

    assert done.stopped == "it had more than 30 processes"
    assert max(int(line) for line in done.output.splitlines() if line.isdigit()) < 30


def _leads_below(link, folder):
    """Whether the working directory of another process lies below a folder."""
    try:
        return str(link.readlink()).startswith(f"{folder}/") and link.parent.name != str(os.getpid())
    except OSError:  # it has ended, or is another user's
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_a_script_fills_no_disk():
    """What a script writes is bounded too, and goes with it."""
    Path("train.sh").write_text("head -c 30000000 /dev/zero > big || torchrun full.py\n", encoding="utf-8")

    done = capture(["bash", "train.sh"], bounds=Bounds(seconds=9.0, written_bytes=20 << 20))

    assert [record.words for record in done.records] == [("torchrun", "full.py")]
    assert not Path("big").exists()


def as_nobody(run):
    """What a function prints in a process of a user without rights, or nothing if it raises."""
    read_end, write_end = os.pipe()
    codecs.lookup("ascii")  # what is loaded late may lie where that user cannot read
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            LIBC.prctl(4, 1, 0, 0, 0)  # a program of this user would be dumpable
            os.write(write_end, run().encode())
        except Exception as error:  # noqa: BLE001 # told as what it prints
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as file:
        found = file.read()
    os.waitpid(child, 0)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_rights_is_held_too(monkeypatch):
    """A user's script writes below its folder, also if that lies in root's, and nothing of it stays."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    module = Path(__file__).resolve().parents[4] / "tuner" / "__init__.py"
    if python is None or as_nobody(lambda: str(os.access(module, os.R_OK))) != "True":
        pytest.skip("another user can read no interpreter or not this checkout")
    with reachable_folder() as base:
        folder = base / "others" / "own"
        (folder / "logs").mkdir(parents=True)
        (folder / "train.sh").write_text(
            "srun torchrun $(id -u) | tee logs/log; echo lost > /usr/lost\n", encoding="utf-8"
        )
        for path in (folder, *folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(folder))

        def told():
            done = capture(["bash", "train.sh"], boundaries=[NAMESPACES])
            return "\n".join((*(" ".join(record.words) for record in done.records), *done.written))

        assert as_nobody(told).splitlines() == ["torchrun 65534", str(folder / "logs" / "log"), "/usr/lost"]
        assert list((folder / "logs").iterdir()) == []
        assert not Path("/usr/lost").exists()
        monkeypatch.undo()


KILLED = """
import sys
from tuner.capture.run_script import capture
capture(["bash", "train.sh"], boundaries=[sys.argv[1]])
"""


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_killed_capture_leaves_nothing(place, boundary):
    """If Meshtune is killed while a script runs, the script ends, and the capture's folder goes."""
    (place / "temporary").mkdir()
    Path("train.sh").write_text("(while :; do :; done) & while :; do :; done\n", encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[4]),
        "TMPDIR": str(place / "temporary"),
    }
    killed = subprocess.Popen([sys.executable, "-c", KILLED, boundary], env=environment)
    # the script's two shells
    assert eventually(lambda: len(_processes_of(b"train.sh", place)) >= 2)
    assert list((place / "temporary").iterdir())

    killed.kill()
    killed.wait()

    assert eventually(lambda: not _processes_of(b"train.sh", place))
    assert eventually(lambda: not list((place / "temporary").iterdir()))


def eventually(found):
    """Whether something becomes true within a time that is long for a busy machine."""
    end_s = time.monotonic() + 20.0
    while not (result := found()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return result


def _processes_of(word, place):
    """Other processes with that word in their command line and the place in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word in (path / "cmdline").read_bytes() and str(place).encode() in (path / "environ").read_bytes():
                found.append(path)
        except OSError:  # it has ended
            continue
    return found
