"""The measured runs in configs/measured/runs and judged, and the tables of them in its README."""

import csv
import re
from collections import Counter

import pytest

from benchmarks.support.problems import read_runs
from benchmarks.support.shipped_runs import FOLDER, shipped_runs
from costmodels.calibration.fidelity import settings_of
from costmodels.calibration.measured_runs import read_measured_and_unstated
from costmodels.calibration.sources import is_known_source, publisher_of

JUDGED = sorted((FOLDER.parent / "judged").glob("*.csv"))
FILES = sorted([*shipped_runs(), *JUDGED], key=lambda path: path.name)
NOT_STATED = {"incomplete configuration", "incomplete architecture", "no sequence length or batch"}
NOT_MODELLED = {
    "recomputation of a kind that the cost model does not know",
    "a pipeline schedule that the cost model does not know",
}
CONTRADICTIONS = {
    ("bigscience.csv", "degrees don't multiply to the devices"): 7,
    ("megatron-bridge.csv", "ep doesn't divide the ranks of a stage"): 1,
}
"""Rows in which the publisher's own numbers contradict each other."""


def rows_of(path):
    """The cells of each row."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table():
    """Rows and usable rows that the README states, by file."""
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `([\w-]+\.csv)` \| (\d+) \| (\d+) \+ (\d+) \|", text, re.MULTILINE)
    return {name: tuple(map(int, counts)) for name, *counts in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_row_is_a_run_or_its_publisher_left_something_out(path):
    """Nothing else is skipped, every device is in the catalog, and the README counts the rows and the usable ones."""
    runs, unstated, skipped = read_measured_and_unstated([path], FOLDER)
    _, _, unknown = settings_of([*runs, *(each.run for each in unstated)], {})

    contradictory = {reason: count for (name, reason), count in CONTRADICTIONS.items() if name == path.name}
    assert unknown == Counter()
    assert {reason: n for reason, n in skipped.items() if reason not in NOT_STATED | NOT_MODELLED} == contradictory
    assert table()[path.name] == (len(rows_of(path)), len(runs), len(unstated))


def test_the_table_of_the_readme_names_every_file():
    """It names all of them and no others."""
    assert sorted(table()) == [path.name for path in FILES]


def test_what_is_kept_for_judging_is_read_by_no_fit_and_shares_no_publisher():
    """A publisher's rows stand in one of the two folders alone, and programs that fit find none of those kept."""
    fitted = {publisher_of(row["source"]) for path in shipped_runs() for row in rows_of(path)}
    kept = {publisher_of(row["source"]) for path in JUDGED for row in rows_of(path)}

    assert kept
    assert not set(JUDGED) & set(shipped_runs())
    assert not fitted & kept


def test_every_shipped_source_is_in_the_table_of_sources():
    """No runtime of a shipped row is guessed, and each row says where it was published."""
    for path in FILES:
        for row in rows_of(path):
            assert is_known_source(row["source"]), row["source"]
            assert row["source_url_or_repo_path"]


def test_no_shipped_row_is_there_twice():
    """A benchmark that reads the whole folder counts no row twice."""
    rows = Counter(tuple(row.values()) for path in FILES for row in rows_of(path))

    assert [row for row, count in rows.items() if count > 1] == []
    assert len(read_runs(FILES)[0]) == len(read_runs([path for path in FILES if "_failed" not in path.name])[0])


def test_failed_runs_stand_beside_the_runs_of_their_sweep():
    """`NAME_failed.csv` has its `NAME.csv`, and its rows alone failed without a result."""
    failed = [path for path in FILES if path.stem.endswith("_failed")]

    assert failed
    assert all(path.with_name(path.name.replace("_failed", "")) in FILES for path in failed)
    assert all(row["notes"].startswith("FAILED") for path in failed for row in rows_of(path))
