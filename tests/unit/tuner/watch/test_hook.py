"""Hooks of a watch, and signals that come while they run."""

import signal
from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from tuner.watch.hook import call_hook, check_hook

PAYLOAD = {"decision": "stay", "forced": False, "pays": False, "flags": None, "best": None, "in_training": None}


def test_a_failed_hook_is_told():
    """The reason names the status of the program, or why it could not be started."""
    assert call_hook("true", PAYLOAD) == ""
    assert call_hook("sh -c 'exit 3'", PAYLOAD) == "the hook ended with status 3"
    assert "could not be started" in call_hook("./no-such-program", PAYLOAD)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "names no program"),
        (" \t", "names no program"),
        ("'' x", "names no program"),
        ("sh -c 'exit", "cannot be parted into words"),
        ("/", "cannot be executed"),
        ("./" + "x" * 5000, "does not exist"),
        (str(Path(__file__).resolve()), "cannot be executed"),
        ("./no-such-program", "does not exist"),
        ("no-such-program", "is no program on the PATH"),
        ("\udcff", "is no program on the PATH"),
    ],
)
def test_a_hook_that_cannot_start_is_refused(command, words):
    """A command that names no program is refused before the watch begins."""
    with pytest.raises(ConfigError, match=f"--hook = .*{words}"):
        check_hook(command)
    check_hook("sh -c 'exit 3'")


@pytest.mark.parametrize("after_ms", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
def test_an_interrupt_is_passed_on(after_ms):
    """An interrupt comes out as itself, also if the hook has ended by then."""
    is_inside = False

    def interrupt(_number, _frame):
        if is_inside:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(5):
            try:
                is_inside = True
                signal.setitimer(signal.ITIMER_REAL, after_ms / 1e3)
                assert call_hook("true", PAYLOAD) == ""
                is_inside = False
            except KeyboardInterrupt:
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
