import csv
from pathlib import Path

import pytest

from costmodels.calibration.measured_runs import COLUMNS, read_measured_group
from costmodels.job.parallel_config import ParallelConfig
from hardware.io.errors import ConfigError
from tests.support.programs.backend_contract import RepeatableBackendContract
from trials.backend import Status
from trials.replay.backend import ReplayBackend

MEASURED = Path(__file__).resolve().parents[4] / "configs" / "measured"
SHIPPED = ["ultrascale-llama-8b-128.csv", "ultrascale-llama-8b-128_failed.csv"]


@pytest.fixture(scope="module")
def shipped():
    """The sweep that stands in configs/measured."""
    return ReplayBackend(group=read_measured_group(SHIPPED, {}, MEASURED))


def small_backend(folder, *rows, **fields):
    """A replay of two devices, of a file with the given rows over the defaults."""
    default = dict.fromkeys(COLUMNS, "") | {
        "source": "test", "model": "llama-tiny", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128,
        "vocab": 1000, "seq_len": 128, "gbs": 8, "mbs": 1, "devices": 2, "device": "H100-SXM-80", "tp": 1, "pp": 1,
        "dp": 2, "recompute": "none", "zero_stage": 1, "seq_parallel": 0, "precision": "bf16",
    }  # fmt: skip
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(default | row for row in rows)
    return ReplayBackend(group=read_measured_group(["runs.csv"], {}, folder), **fields)


class TestReplayBackend(RepeatableBackendContract):
    @pytest.fixture
    def backend(self, shipped):
        """The shipped sweep."""
        return shipped

    @pytest.fixture
    def grid(self, shipped):
        """All of its configurations."""
        return shipped.candidates(("zero_stage",))


def test_serves_exactly_the_shipped_rows(shipped):
    """The 116 timed and the 60 failed rows of the shipped sweep are its candidates, each once."""
    grid = shipped.candidates(("zero_stage",))
    statuses = [shipped.measure(grid.config(i), trial_number=i).status for i in range(len(grid))]

    assert len(grid) == len(grid.positions()) == 176
    assert shipped.group.skipped == 0
    assert statuses.count(Status.OK) == 116
    assert statuses.count(Status.CRASHED) == 60


def test_gives_the_published_step_time(shipped):
    """The fastest run of the sweep comes back as printed: 1.359 s and 66.9 GiB."""
    config = ParallelConfig(tp=8, dp=16, mbs=8, zero_stage=0)
    observation = shipped.measure(config, trial_number=0)

    assert observation.step_times_s == (1.359,)
    assert observation.peak_memory_bytes == round(66.9 * 2**30)


def test_a_dimension_that_varies_must_be_opened(shipped):
    """Two candidates that differ in nothing but an unopened dimension would be one; the message names it."""
    with pytest.raises(ConfigError, match=r"space\.zero_stage: must be searched"):
        shipped.candidates(())


def test_repeated_rows_are_repeated_measurements(tmp_path):
    """Three rows of one configuration are one candidate with three steps; a failed fourth is told in the reason."""
    rows = [{"step_seconds": 1.0, "peak_mem_gib": 4}, {"step_seconds": 3.0}, {"step_seconds": 1.5}]
    backend = small_backend(tmp_path, *rows, {"notes": "FAILED: lost"}, {"tp": 2, "dp": 1, "step_seconds": 9})
    grid = backend.candidates(())
    observation = backend.measure(grid.config(0), trial_number=0)

    assert len(grid) == 2
    assert observation.step_times_s == (1.0, 3.0, 1.5)
    assert observation.step_time_s == 1.5
    assert observation.peak_memory_bytes == 4 * 2**30
    assert observation.reason == "1 of 4 measured runs failed"


@pytest.mark.parametrize(
    ("note", "status"),
    [
        ("FAILED: OOM on rank 3", Status.OUT_OF_MEMORY),
        ("FAILED: out of memory", Status.OUT_OF_MEMORY),
        ("FAILED: OOM or crash", Status.CRASHED),
        ("FAILED: plotted as crashed/oom (OOM, timeout or crash not distinguished)", Status.CRASHED),
        ("FAILED", Status.CRASHED),
    ],
)
def test_only_a_clear_note_says_out_of_memory(tmp_path, note, status):
    """A failure counts as out of memory only where the source says that and nothing else."""
    backend = small_backend(tmp_path, {"notes": note}, {"tp": 2, "dp": 1, "step_seconds": 1})
    observation = backend.measure(ParallelConfig(dp=2), trial_number=0)

    assert observation.status is status
    assert observation.reason == note
    assert observation.log_tail == f"runs.csv:2: {note}"


def test_an_unmeasured_configuration_is_the_users_mistake(shipped):
    """A configuration that nobody ran is refused, with the nearest one that somebody did."""
    with pytest.raises(ConfigError, match=r"none of the 176 measured configurations; nearest: pp=1,tp=8"):
        shipped.measure(ParallelConfig(tp=8, dp=16, mbs=3, zero_stage=0), trial_number=0)


def test_a_negative_wait_is_refused(tmp_path):
    """A trial cannot take less than no time."""
    with pytest.raises(ConfigError, match="seconds_per_trial = -1"):
        small_backend(tmp_path, {"step_seconds": 1}, seconds_per_trial=-1)
