"""Temporary folders, and the message where there is no room for them."""

import errno

import pytest

from hardware.io.errors import ConfigError
from hardware.io.temporary import check_room, check_temporary, temporary_folder
from tests.chaos.disk import SmallDisk, why_no_disk
from tests.support.programs.rights import reachable_folder, read_only, without_roots_rights


@pytest.mark.skipif(bool(why_no_disk()), reason="needs a small disk")
def test_a_full_folder_is_named_at_once(tmp_path, monkeypatch):
    """A full TMPDIR is refused with its path and the room in it, also where it fills up later; with room it is used."""
    disk = SmallDisk(tmp_path / "disk")
    monkeypatch.setenv("TMPDIR", str(disk.folder))
    words = rf"TMPDIR = '{disk.folder}': has no room for a copy \(0.0 MiB are free\); make room there, or set TMPDIR"
    try:
        with temporary_folder("a copy") as folder:
            assert folder.parent == disk.folder
        with pytest.raises(ConfigError, match=words), temporary_folder("a copy") as folder:  # noqa: PT012 # one is filled
            disk.fill()
            (folder / "file").write_bytes(bytes(1000))
        with pytest.raises(ConfigError, match=words), temporary_folder("a copy"):
            pytest.fail("there is no room")
        with pytest.raises(
            ConfigError, match=rf"RAY_TMPDIR = '{disk.folder}/missing': has no room for Ray .*set RAY_TMPDIR"
        ):
            check_room(disk.folder / "missing", "Ray", key="RAY_TMPDIR", room_bytes=1)
    finally:
        disk.close()


def test_a_folder_that_may_not_be_written_is_named(monkeypatch):
    """A TMPDIR without the right to write is refused by that reason, and one that is missing is passed over."""
    with reachable_folder() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        with read_only(folder), without_roots_rights(), pytest.raises(ConfigError, match="cannot be written to"):
            check_temporary("a copy")
        monkeypatch.setenv("TMPDIR", str(folder / "missing"))
        assert check_temporary("a copy").is_dir()


def test_other_errors_pass():
    """What is no lack of room is no message about it."""
    with pytest.raises(FileExistsError), temporary_folder("a copy"):
        raise FileExistsError(errno.EEXIST, "there")
