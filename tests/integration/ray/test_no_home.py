"""Ray on a machine whose user has no home folder, as in many containers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
from trials.ray_local import import_ray, start_local_ray, stop_local_ray
started = start_local_ray(1)
ray = import_ray()
print(started, ray.get(ray.remote(lambda: 5).remote()), "RAY_AUTH_TOKEN" in os.environ)
stop_local_ray(ray)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="in /proc no folder can be made")
def test_ray_starts_without_a_home_folder():
    """Ray, which keeps its token in the home folder, is given one, and the driver's environment is as it was."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    environment |= {"HOME": "/proc/nobody", "PYTHONPATH": str(Path(__file__).parents[3])}
    told = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)

    assert told.stdout.split() == ["True", "5", "False"], told.stderr
