import os
import stat
import sys
from pathlib import Path

import pytest

from costmodels.sharding.frontends.users_code import users_code
from hardware.io.errors import ConfigError
from hardware.io.output_file import new_file, write_output
from tuner.terminal.streams import lossy_streams


@pytest.fixture
def victim(tmp_path):
    """A file that no output names."""
    file = tmp_path / "elsewhere" / "victim"
    file.parent.mkdir()
    file.write_text("mine")
    return file


@pytest.mark.parametrize("content", ["new\n", b"new\n"], ids=["text", "bytes"])
def test_output_replaces_a_link_and_not_what_it_leads_to(tmp_path, victim, content):
    """A link with the output's name is replaced, and the file behind it stays as it was."""
    out = tmp_path / "report.html"
    out.symlink_to(victim)

    write_output(out, content)

    assert victim.read_text() == "mine"
    assert not out.is_symlink()
    assert out.read_text() == "new\n"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"], "nothing else is left"


def test_new_file_replaces_links_and_files_of_its_name(tmp_path, victim):
    """Neither a symbolic nor a hard link lets a new file's content into another file."""
    soft, hard = tmp_path / "soft.log", tmp_path / "hard.log"
    soft.symlink_to(victim)
    hard.hardlink_to(victim)

    for path in (soft, hard):
        with os.fdopen(new_file(path), "wb") as file:
            file.write(b"new")
        assert path.read_bytes() == b"new"

    assert victim.read_text() == "mine"


def test_file_is_readable_as_the_users_mask_says(tmp_path):
    """An output has the permissions of any new file."""
    before = os.umask(0o022)
    try:
        write_output(tmp_path / "best.json", "{}")
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == 0o644


def test_the_process_own_descriptors_are_written_to(capfd):
    """Standard output, pipes that a shell passes, and /dev/null take an output as it is."""
    read, write = os.pipe()
    write_output(Path("/dev/stdout"), "told\n")
    write_output(Path("/dev/stderr"), "warned\n")
    write_output(Path(f"/dev/fd/{write}"), "passed\n")
    write_output(Path("/dev/null"), "nothing\n")

    assert capfd.readouterr() == ("told\n", "warned\n")
    assert os.read(read, 100) == b"passed\n"


def test_the_answers_own_stream_is_standard_output(capfd, monkeypatch):
    """An output to /dev/stdout stands in its place in the answer, also once descriptor 1 belongs to others."""
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    with lossy_streams():
        sys.stdout.write("one\n")
        with users_code("own:step", option="--jax"):
            pass
        sys.stdout.flush()
        write_output(Path("/dev/stdout"), "two\n")
        sys.stdout.write("three\n")

    assert capfd.readouterr() == ("one\ntwo\nthree\n", "")


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "/dev/zero", "/dev/ptmx", "\0"])
def test_other_pipes_and_devices_are_refused(tmp_path, kind):
    """A pipe whose reader may never come is refused at once, as are devices, and what is no path."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to a pipe").symlink_to("pipe")

    with pytest.raises(ConfigError, match=r"--trace = .*(not a file|no path of a file)"):
        write_output(tmp_path / kind, "x", option="--trace")


def test_a_name_that_is_no_text_is_written_as_an_escape(tmp_path):
    """Bytes of a file's name that are no UTF-8 end no output that quotes it."""
    write_output(tmp_path / "report.html", "of \udcff.yaml")

    assert (tmp_path / "report.html").read_text() == "of \\udcff.yaml"


def test_unwritable_place_is_told(tmp_path):
    """A folder that is not there, or is the output itself, ends in one message."""
    for out in (tmp_path / "none" / "r.html", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_output(out, "x")
