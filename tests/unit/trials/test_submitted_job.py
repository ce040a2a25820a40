from pathlib import Path

import pytest

from hardware.io.errors import ConfigError
from tests.support.programs.small_commands import backend_of
from trials.submitted_job import check_outlives_job

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")  # noqa: S108 # as Ray names it


@pytest.fixture
def in_a_job(monkeypatch):
    """The environment of what `ray job submit` starts."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")


def check(path):
    """Whether the path may be written to."""
    try:
        check_outlives_job(Path(path), key="--out", value=str(path), nearest="elsewhere")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("report.html", False),
        ("", False),
        (COPY / "report.html", False),
        (COPY / "studies" / ".." / "report.html", False),
        (COPY / ".." / ".." / ".." / "report.html", True),
        ("/data/report.html", True),
        ("/data/working_dir_files/report.html", True),
    ],
)
@pytest.mark.usefixtures("in_a_job")
def test_what_lies_in_the_copy_is_refused(path, is_kept):
    """A job writes to absolute paths outside the directory that Ray has unpacked for it, and nowhere else."""
    assert check(path) == is_kept


@pytest.mark.usefixtures("in_a_job")
def test_logs_outlive_the_job(tmp_path):
    """A command's logs are refused where they would be lost."""
    backend_of(logs=tmp_path / "logs").check()
    with pytest.raises(ConfigError, match=r"trial\.logs = .*an absolute path that every host can write to"):
        backend_of(logs=COPY / "logs").check()
