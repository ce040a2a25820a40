"""A pool grows and loses nothing."""

import csv
from dataclasses import replace

import pytest

from costmodels.calibration.measured_runs import COLUMNS
from hardware.io.errors import ConfigError
from tests.support.studies.broken_studies import ROW, rows
from tests.support.studies.training_logs import PUBLIC, TORCHTITAN_H200, dense_log
from tuner.learn.learning import gather
from tuner.learn.pool import add_rows
from tuner.study_file.answers import Added


def read(tmp_path, *texts):
    """The rows of logs, one file for each."""
    folder = tmp_path / "logs"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for number, text in enumerate(texts):
        (folder / f"rank{number}.log").write_text(text, encoding="utf-8")
    found = gather([folder], Added(cluster="H100"), source=None, models="pool-models")
    assert not found.refused
    return found.rows


def cells(pool):
    """The cells of a pool's file, row by row."""
    return list(csv.DictReader(pool.read_text(encoding="utf-8").splitlines()))


def test_the_same_log_is_kept_once(tmp_path):
    """Again, under another name, and of another rank that timed itself 1% slower, it is known already."""
    pool, text = tmp_path / "pool.csv", dense_log(4096, 2, 1, 1, 1.0)
    first = add_rows(pool, read(tmp_path, text, text, dense_log(4096, 2, 1, 1, 1.01)))
    again = add_rows(pool, read(tmp_path, text))

    assert (len(first.added), len(first.known), first.rows) == (1, 2, 1)
    assert (len(again.added), len(again.known), again.rows) == (0, 1, 1)
    assert len(cells(pool)) == 1


def test_repeats_are_kept(tmp_path):
    """Another run of a configuration has other losses, or a time that is 10% off, and other degrees are another row."""
    texts = [
        dense_log(4096, 2, 1, 1, 1.0),
        dense_log(4096, 2, 1, 1, 1.0, first_loss=10.5),
        dense_log(4096, 2, 1, 1, 1.1),
    ]
    added = add_rows(tmp_path / "pool.csv", read(tmp_path, *texts, dense_log(4096, 4, 1, 1, 1.0)))

    assert (len(added.added), len(added.known)) == (4, 0)


def test_a_log_that_went_on_renews_its_row(tmp_path):
    """With more steps the row is replaced where it stands; with fewer it stays."""
    pool = tmp_path / "pool.csv"
    add_rows(pool, read(tmp_path, dense_log(4096, 2, 1, 1, 1.0, steps=6), dense_log(4096, 4, 1, 1, 2.0)))
    renewed = add_rows(pool, read(tmp_path, dense_log(4096, 2, 1, 1, 1.01, steps=40), dense_log(4096, 4, 1, 1, 2.0)))

    assert (len(renewed.added), len(renewed.renewed), len(renewed.known)) == (0, 1, 1)
    assert [(row["tp"], row["step_seconds"]) for row in cells(pool)] == [("2", "1.01"), ("4", "2")]
    assert not add_rows(pool, read(tmp_path, dense_log(4096, 2, 1, 1, 1.0, steps=6))).renewed


def test_a_file_of_measured_runs_grows(tmp_path):
    """Rows and columns of one's own stay as they are, and missing columns are added behind."""
    pool = tmp_path / "pool.csv"
    pool.write_text(rows({"notes": "mine", "owner": "us"}, columns=(*COLUMNS, "owner")), encoding="utf-8")
    added = add_rows(pool, read(tmp_path, dense_log(4096, 2, 1, 1, 1.0)))
    mine, ours = cells(pool)

    assert (added.before, added.rows) == (1, 2)
    assert mine.items() >= {name: str(cell) for name, cell in (ROW | {"notes": "mine"}).items()}.items()
    assert (mine["owner"], mine["facts"], ours["owner"], ours["runtime"]) == ("us", "", "", "megatron-core")


def test_the_model_of_a_row_stands_beside_the_pool(tmp_path):
    """GPT-2 has biases that no column says."""
    found = gather([PUBLIC / "megatron-lm-gpt2.log"], Added(cluster="A800"), source=None, models="pool-models")
    add_rows(tmp_path / "pool.csv", found.rows)
    (row,) = cells(tmp_path / "pool.csv")

    assert row["architecture"].startswith("pool-models/gpt-24x1024-tied-")
    assert "mlp_bias: true" in (tmp_path / row["architecture"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(COLUMNS) + "\n1,2\n"])
def test_another_file_is_not_touched(tmp_path, text):
    """A CSV file of something else is refused, and stays."""
    pool = tmp_path / "pool.csv"
    pool.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError):
        add_rows(pool, read(tmp_path, TORCHTITAN_H200.replace("CUDA capacity", "none")))
    assert pool.read_text(encoding="utf-8") == text


def test_a_row_whose_results_are_equal_is_known(tmp_path):
    """Rows without an identity in their remarks, such as shared ones, are known by their figures."""
    pool = tmp_path / "pool.csv"
    (row,) = read(tmp_path, dense_log(4096, 2, 1, 1, 1.0))
    bare = replace(row, cells={**row.cells, "notes": "untied; swiglu; rms-norm; rotary", "source": "theirs"})
    add_rows(pool, [bare])

    assert len(add_rows(pool, [row]).renewed) == 1
    assert len(add_rows(pool, [bare]).known) == 1
    assert len(cells(pool)) == 1
