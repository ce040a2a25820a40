import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from costmodels.sharding.frontends.factories import takes_micro_batches
from costmodels.sharding.frontends.users_code import users_code
from hardware.io.errors import ConfigError
from tests.support.studies.command_line import assert_users_mistake, in_process
from tuner.terminal.streams import lossy_streams


class Unusual(BaseException):
    """What no `except Exception` catches."""

    def __str__(self):
        raise Unusual


def test_what_it_prints_goes_to_standard_error(capfd):
    """What Python, C, and processes print, also on the descriptor itself, goes to standard error; ours does not."""
    sys.stdout.write("before\n")
    with users_code("own:step", option="--jax"):
        sys.stdout.write("python\n")
        os.write(1, b"descriptor\n")
        ctypes.CDLL(None).puts(b"c")
        subprocess.run(["/bin/echo", "process"], check=True)
        sys.__stdout__.write("original\n")
    sys.stdout.write("after\n")

    out, err = capfd.readouterr()
    assert out == "before\nafter\n"
    assert sorted(err.split()) == ["c", "descriptor", "original", "process", "python"]


def test_what_it_changes_of_the_process_is_put_back(tmp_path, capfd):
    """Streams, descriptors, the working directory and handlers are ours again, whatever the code has made of them."""
    kept = Path.cwd(), signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr
    with users_code("own:step", option="--jax"):
        os.chdir(tmp_path)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.close()
        sys.stdout = sys.stderr = None
        os.close(1)
        os.close(2)

    assert (Path.cwd(), signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr) == kept
    os.write(1, b"out")
    os.write(2, b"err")
    assert capfd.readouterr() == ("out", "err")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(0), r"fails: it ends the interpreter \(SystemExit: 0\)"),
        (KeyboardInterrupt(), "fails: KeyboardInterrupt"),
        (GeneratorExit(), "fails: GeneratorExit"),
        (StopIteration(), "fails: StopIteration"),
        (Unusual(), "fails: Unusual"),
        (RecursionError("deep\nand long"), "fails: RecursionError: deep"),
    ],
)
def test_what_it_raises_is_one_message(error, words):
    """Whatever the code raises is a mistake that names the factory and the line."""
    told = rf"--jax = 'own:step': {words} \(line \d+ of .*test_users_code.py\)"
    with pytest.raises(ConfigError, match=told), users_code("own:step", option="--jax"):
        raise error


def test_an_interrupt_from_outside_stays_one():
    """A signal that comes while the code runs ends the command as ever."""
    with pytest.raises(KeyboardInterrupt), users_code("own:step", option="--jax"):
        signal.raise_signal(signal.SIGINT)


def test_a_forked_copy_goes_no_further(capfd):
    """A process that the code has forked and that returns from it ends there."""
    with users_code("own:step", option="--jax"):
        child = os.fork()
        sys.stdout.write("both\n")
    sys.stdout.write("one\n")
    os.waitpid(child, 0)

    assert capfd.readouterr() == ("one\n", "both\nboth\n")


def test_threads_write_into_no_answer(capfd, monkeypatch):
    """What a thread prints while the command prints its answer goes to standard error."""
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    with lossy_streams():
        sys.stdout.write("{\n")
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        with users_code("own:step", option="--jax"):
            pass
        os.write(1, b"late\n")
        sys.stdout.write("}\n")

    out, err = capfd.readouterr()
    assert (out, sorted(err.split())) == ("{\n}\n", ["late", "thread"])


@pytest.mark.slow
@pytest.mark.parametrize("world", ["jax", "torch"])
def test_a_module_that_ends_the_interpreter_is_refused(tmp_path, world):
    """A command whose user's module ends the interpreter as if all were well ends with status 2 and says so."""
    pytest.importorskip(world)
    (tmp_path / "own.py").write_text("import sys\nprint('hello')\nsys.exit(0)\n", encoding="utf-8")
    done = in_process("plan", f"--{world}", "own:step", "--mesh", "data=2,model=2", "--json", cwd=tmp_path)

    assert done.err.startswith("hello\n")
    done = type(done)(status=done.status, out=done.out, err=done.err.removeprefix("hello\n"))
    assert_users_mistake(done, f"--{world} = 'own:step'", "it ends the interpreter", "line 3 of", "own.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..own:step", "own\0:step", "\udcff:step", "builtins:print.x", "own:"])
def test_names_that_are_no_modules_are_refused(tmp_path, monkeypatch, name):
    """A factory's name that Python cannot import is refused in words."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("jax")
    with pytest.raises(ConfigError, match="--jax"):
        takes_micro_batches(name, "jax", option="--jax")
