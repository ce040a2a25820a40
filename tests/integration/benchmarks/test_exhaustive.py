"""The benchmark that measures every candidate: what its figures say of the trials in its file."""

import csv
import statistics
from pathlib import Path

import pytest

from benchmarks.calibration import exhaustive

ROOT = Path(__file__).resolve().parents[3]
STUDY = ROOT / "configs" / "studies" / "cpu-gpt.yaml"
MEASURED = ROOT / "configs" / "measured" / "cpu-gpt-small-8.csv"
NUM_CANDIDATES = 8
RATIOS = {"tau", "median_error", "median_error_scaled", "regret_of_best"}


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
def test_equal_rounds_agree(judged, first_round):
    """Two rounds of equal times rank alike and differ by nothing, and the fastest and slowest are theirs."""
    told = judged(first_round + _again(first_round))

    steps_s = [float(row["step_seconds"]) for row in first_round]
    nothing = {"tau": pytest.approx(1), "median_error": 0, "median_error_scaled": 0, "regret_of_best": 0}
    assert (told["measured"], told["rounds"], told["failed"]) == (NUM_CANDIDATES, 2, 0)
    assert (told["fastest_s"], told["slowest_s"]) == (min(steps_s), max(steps_s))
    assert told["repeatability"] == told["repeatability_of_cpu_seconds"] == nothing
    assert told["clock"] == "virtual clock"
    assert told["candidates"] > NUM_CANDIDATES


@pytest.mark.usefixtures("unfitted")
def test_opposite_rounds_disagree(judged, first_round):
    """A round in which what was slow is fast ranks the other way round, and its best is the other's worst."""
    told = judged(first_round + _again(first_round, lambda seconds: 1 / seconds))

    steps_s = [float(row["step_seconds"]) for row in first_round]
    assert told["repeatability"]["tau"] == pytest.approx(-1)
    assert told["repeatability"]["regret_of_best"] == pytest.approx(max(steps_s) / min(steps_s) - 1, rel=1e-4)
    assert told["repeatability_of_cpu_seconds"]["tau"] == pytest.approx(1)


def test_one_round_says_nothing_of_repeatability(judged, first_round):
    """From one round there are the predictions' figures alone, each complete."""
    told = judged(first_round)

    assert {name for name, value in told.items() if isinstance(value, dict)} == {
        "prior",
        "fitted_on_other_half",
        "cpu_seconds",
    }
    assert all(set(told[name]) == RATIOS for name in ("prior", "fitted_on_other_half", "cpu_seconds"))
    assert all(-1 <= told[name]["tau"] <= 1 for name in ("prior", "fitted_on_other_half"))
    shares = [float(row["notes"].partition("others_cpu_share=")[2].partition(";")[0]) for row in first_round]
    assert told["median_others_cpu_share"] == statistics.median(shares)


@pytest.mark.usefixtures("unfitted")
def test_only_candidates_of_every_round_are_judged(judged, first_round):
    """A trial that failed is counted, and neither its candidate nor one that lacks a round is judged."""
    failed = first_round[0] | {"step_seconds": "", "notes": f"FAILED crashed: lost; {first_round[0]['notes']}"}

    told = judged([failed, *first_round[1:], *_again(first_round[:-1])])

    assert (told["measured"], told["failed"]) == (NUM_CANDIDATES - 2, 1)
    kept_s = [float(row["step_seconds"]) for row in first_round[1:-1]]
    assert (told["fastest_s"], told["slowest_s"]) == (min(kept_s), max(kept_s))


@pytest.mark.parametrize(
    ("study", "message"),
    [
        ("cpu-gpt.yaml", "no candidate that was measured in every round"),
        ("llama3-8b-dgx-h100.yaml", "trains nothing for real"),
    ],
)
def test_mistakes_are_one_message(study, message, tmp_path, capsys):
    """A file without trials, and a study without training, end with exit status 2 and say so."""
    status = exhaustive.main([str(STUDY.with_name(study)), "--out", str(tmp_path / "none.csv"), "--judge-only"])

    assert status == 2
    assert message in capsys.readouterr().err
