import os
import stat
from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from hardware.io.output_file import new_file, write_output


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


def test_devices_and_pipes_are_written_to(capfd):
    """What is no file is written to and stays what it is."""
    write_output(Path("/dev/stdout"), "told\n")

    assert capfd.readouterr().out == "told\n"


def test_unwritable_place_is_told(tmp_path):
    """A folder that is not there, or is the output itself, ends in one message."""
    for out in (tmp_path / "none" / "r.html", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_output(out, "x")
