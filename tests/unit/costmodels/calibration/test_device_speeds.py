import pytest

from benchmarks.support.shipped_runs import shipped_runs
from costmodels.calibration.device_speeds import shrink_speeds
from costmodels.calibration.measured_runs import read_measured_and_skipped


def test_one_publisher_tells_half_of_a_speed():
    """The log of a device's speed keeps m / (m + 1) of its size where m publishers have run the device."""
    files = [path for path in shipped_runs() if path.name in ("vtrain.csv", "bigscience.csv")]
    runs, _ = read_measured_and_skipped(files, files[0].parent)
    vtrain = [run for run in runs if run.source == "vtrain"]

    fitted = {"A100-SXM-80": 1.21, "H100-SXM-80": 1.21}

    assert shrink_speeds(fitted, vtrain) == pytest.approx({"A100-SXM-80": 1.1, "H100-SXM-80": 1.0})
    assert shrink_speeds(fitted, runs)["A100-SXM-80"] == pytest.approx(1.21 ** (2 / 3))
