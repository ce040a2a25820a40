import pytest

from tests.support.studies.command_line import ROOT, in_process
from tests.support.studies.pseudo_terminal import on_terminal, without_styles
from tuner.terminal import tables

STUDY = ROOT / "configs" / "studies" / "flexparallel" / "llama3-8b-8.yaml"

COLOUR = "\x1b[32m"
"""Control sequence of a green row."""


@pytest.fixture
def terminal(monkeypatch):
    """Standard output is a terminal of a given width."""

    def of(columns):
        monkeypatch.setattr(tables, "terminal_width", lambda: columns)

    return of


def test_a_file_gets_every_column(capsys):
    """Without a terminal a table has all of its columns, padded and without control sequences."""
    dropped = tables.print_table(["a", "long head"], [["1", "x" * 200]], spare=("long head",), styles=["green"])

    assert dropped == ()
    assert capsys.readouterr().out == f"a  {'long head'.rjust(200)}\n1  {'x' * 200}\n"


def test_spare_columns_leave_in_their_order(terminal, capsys):
    """A narrow terminal loses as many spare columns as it must, the first named first."""
    terminal(20)

    dropped = tables.print_table(["keep", "first", "second"], [["1" * 8, "2" * 8, "3" * 8]], spare=("first", "second"))

    assert dropped == ("first",)
    assert "2" not in capsys.readouterr().out


def test_numbers_are_never_cut(terminal, capsys):
    """A number that is wider than the terminal is printed whole, because a cut one would be another number."""
    terminal(10)

    tables.print_table(["one", "two"], [["123456789", "987654321"]])

    assert "123456789  987654321" in without_styles(capsys.readouterr().out)


def test_words_are_broken_over_lines(terminal, capsys):
    """A column of words that is too wide for a terminal is broken, and all of it is there."""
    terminal(40)

    tables.print_table(["n", "words"], [["1", " ".join(["word"] * 20)]], left=(1,))

    lines = without_styles(capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 40
    assert sum(line.count("word") for line in lines[1:]) == 20


def test_meanings_are_those_of_the_degrees():
    """The legend has a meaning for each degree, in their one order, and for nothing else."""
    from costmodels.job.parallel_config import DEGREES

    assert tuple(tables.MEANINGS) == DEGREES
    assert tables.degrees_in_words(("mbs", "recompute", "pp")) == "pp pipeline, mbs micro-batch"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_ranking_fits_its_terminal(tmp_path, columns):
    """At 80 and at 160 columns no line of `rank` is wider, and the wider terminal has every column."""
    written = on_terminal("rank", STUDY, cwd=tmp_path, columns=columns)

    lines = without_styles(written).splitlines()
    assert max(map(len, lines)) <= columns
    head = next(line for line in lines if line.startswith("rank "))
    for name in ("step [s]", "95%", "speed-up", "GiB", "fits", "bound by"):
        assert name in head
    assert ("tokens/s/device" in head) == (columns == 160)
    assert COLOUR in written


def test_no_colour_where_nobody_wants_it(tmp_path):
    """NO_COLOR leaves the text as it is and takes the colours; a pipe has no control sequence at all, nor has JSON."""
    plain = on_terminal("rank", STUDY, cwd=tmp_path, columns=160, NO_COLOR="1")
    coloured = on_terminal("rank", STUDY, cwd=tmp_path, columns=160)
    piped = in_process("rank", STUDY, cwd=tmp_path)
    as_json = on_terminal("rank", STUDY, "--json", cwd=tmp_path)

    assert COLOUR not in plain
    assert without_styles(plain) == without_styles(coloured)
    assert "\x1b" not in piped.out + piped.err + as_json
    table = [line.rstrip() for line in piped.out.splitlines()]
    on_screen = [line.rstrip() for line in without_styles(plain).splitlines()]
    first = on_screen.index(table[0])
    assert on_screen[first : first + len(table)] == table
