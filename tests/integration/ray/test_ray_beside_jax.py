"""Ray on this machine, started by a program that has used JAX."""

import subprocess
import sys

import pytest

from tests.support.benchmark_runs import ROOT

pytest.importorskip("jax", reason="needs JAX: pip install 'meshtune[jax]'")

PROGRAM = """
import jax
jax.devices()
from trials.on_ray.local import import_ray, start_local_ray, stop_local_ray
print(start_local_ray(1))
stop_local_ray(import_ray())
"""


def test_no_warning_of_forks_alarms_anybody():
    """JAX's warning of forks, which Ray's start would raise, is left out; Ray's children run other programs at once."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert "fork" not in done.stderr
