"""The benchmark that measures every candidate: what its figures say of the trials in its file."""

import csv
from pathlib import Path

import pytest

from benchmarks.calibration import exhaustive

ROOT = Path(__file__).resolve().parents[3]
STUDY = ROOT / "configs" / "studies" / "cpu-gpt.yaml"
MEASURED = ROOT / "configs" / "measured" / "cpu-gpt-small-8.csv"
NUM_CANDIDATES = 8


@pytest.fixture
def first_round():
    """Some candidates' trials of one round, fast and slow ones."""
    with MEASURED.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if "round=0" in row["notes"]]
    return rows[:NUM_CANDIDATES]


@pytest.fixture
def judged(answered, tmp_path):
    """Writes rows and lets the benchmark judge them without measuring anything; its object."""

    def judge(rows):
        return answered(exhaustive, STUDY, "--out", _written(tmp_path, rows), "--judge-only")

    return judge


@pytest.fixture
def unfitted(monkeypatch):
    """Saves the time of the fits where a test does not look at them."""
    monkeypatch.setattr(exhaustive, "_cross_validate", lambda *_: {})


def _written(folder, rows):
    path = folder / "trials.csv"
    with path.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, exhaustive.COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _again(rows, change=lambda seconds: seconds):
    """Return copies of trials as a second round, with changed step times."""
    return [
        row
        | {
            "step_seconds": f"{change(float(row['step_seconds'])):.6g}",
            "notes": row["notes"].replace("round=0", "round=1"),
        }
        for row in rows
    ]


@pytest.mark.usefixtures("unfitted")
def test_opposite_rounds_disagree(judged, first_round):
    """A round in which what was slow is fast ranks the other way round, and its best is the other's worst."""
    told = judged(first_round + _again(first_round, lambda seconds: 1 / seconds))

    steps_s = [float(row["step_seconds"]) for row in first_round]
    assert told["repeatability"]["tau"] == pytest.approx(-1)
    assert told["repeatability"]["regret_of_best"] == pytest.approx(max(steps_s) / min(steps_s) - 1, rel=1e-4)
    assert told["repeatability_of_cpu_seconds"]["tau"] == pytest.approx(1)


@pytest.mark.usefixtures("unfitted")
def test_only_candidates_of_every_round_are_judged(judged, first_round):
    """A trial that failed is counted, and neither its candidate nor one that lacks a round is judged."""
    failed = first_round[0] | {"step_seconds": "", "notes": f"FAILED crashed: lost; {first_round[0]['notes']}"}

    told = judged([failed, *first_round[1:], *_again(first_round[:-1])])

    assert (told["measured"], told["failed"]) == (NUM_CANDIDATES - 2, 1)
    kept_s = [float(row["step_seconds"]) for row in first_round[1:-1]]
    assert (told["fastest_s"], told["slowest_s"]) == (min(kept_s), max(kept_s))
