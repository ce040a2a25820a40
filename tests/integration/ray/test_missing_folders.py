"""Ray on a machine without the folders that it keeps files in, as in many containers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.disk import SmallDisk, why_no_disk

PROGRAM = """
import os
from trials.on_ray.local import import_ray, start_local_ray, stop_local_ray
started = start_local_ray(1)
ray = import_ray()
print(started, ray.get(ray.remote(lambda: 5).remote()), "RAY_AUTH_TOKEN" in os.environ)
stop_local_ray(ray)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only in /proc no folder can be made")


def run(**changes):
    """Run the program in an environment with these changes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3]), **changes}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)


def test_ray_starts_without_a_home_folder():
    """Ray, which keeps its token in the home folder, is given one, and the driver's environment is as it was."""
    told = run(HOME="/proc/nobody")

    assert told.stdout.split() == ["True", "5", "False"], told.stderr


def test_a_folder_for_rays_files_is_asked_for():
    """Without a folder for temporary files Ray cannot start, and the message names the variable that gives it one."""
    told = run(RAY_TMPDIR="/proc/nowhere")

    assert "/proc/nowhere" in told.stderr
    assert "set RAY_TMPDIR to a folder with a short path that Ray can write to" in told.stderr


@pytest.mark.skipif(bool(why_no_disk()), reason="needs a small disk")
@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_full_folder_for_rays_files_is_told_at_once(tmp_path, variable):
    """Where Ray would wait for its processes for more than a minute, the message names the full folder and its room."""
    disk = SmallDisk(tmp_path / "disk")
    try:
        disk.fill()
        began_s = time.monotonic()
        told = run(**{variable: str(disk.folder)})
    finally:
        disk.close()

    assert f"{variable} = '{disk.folder}': has no room for Ray's logs and sockets (0.0 MiB are free)" in told.stderr
    assert time.monotonic() - began_s < 45
