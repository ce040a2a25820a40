"""Lines of words on a terminal and elsewhere."""

import fcntl
import os
import struct
import sys
import termios

import pytest

from tuner.terminal.console import say

LINE = "  repeated because too close to call: pp=1,tp=1,dp=32,cp=2,up=1,vpp=1,ep=1,mbs=1 takes 6.9 s"
END = "end"


@pytest.fixture
def on_terminal(monkeypatch):
    """What a terminal of that width gets."""

    def shown(line, columns):
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            say(line)
            stream.write(END)
            stream.flush()
            text = ""
            while not text.endswith(END):  # a terminal may hand over a part
                text += os.read(ours, 10_000).decode()
            monkeypatch.undo()
        os.close(ours)
        return text.split("\r\n")[:-1]

    return shown


def test_a_terminal_gets_lines_broken_between_words(on_terminal):
    """No line is wider than the terminal, and the rest of a line stands under its beginning."""
    assert on_terminal(LINE, 60) == [
        "  repeated because too close to call:",
        "    pp=1,tp=1,dp=32,cp=2,up=1,vpp=1,ep=1,mbs=1 takes 6.9 s",
    ]


@pytest.mark.parametrize("columns", [0, 20, 200])
def test_a_line_stays_whole_where_it_fits_or_nothing_would(on_terminal, columns):
    """A wide terminal has room, and one that is narrow or does not know its width breaks the line itself."""
    assert on_terminal(LINE, columns) == [LINE]


def test_a_file_gets_whole_lines(capsys):
    """What is no terminal is read by programs, a line for each message."""
    say(LINE)

    assert capsys.readouterr().out == f"{LINE}\n"
