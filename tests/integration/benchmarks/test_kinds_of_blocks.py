"""The judge of kinds of blocks, on published runs of a publisher to whose runs no profile was fitted."""

import json

import pytest

from benchmarks.judges.kinds_of_blocks import KIND_NAMES, KINDS_FOLDER, main

MLPERF = KINDS_FOLDER / "mlperf-6.0.csv"


def test_runs_count_in_each_kind_of_their_model(capsys):
    """A row whose model is not read, or not whole, is counted with its reason, and a median is that of the rows."""
    assert main([str(MLPERF), "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    overall, rows = result["overall"], result["rows"]
    errors = sorted(abs(row["error"]) for row in rows)
    assert list(result["by_kind"]) == list(KIND_NAMES)
    assert overall["rows"] == 7 == overall["predicted"] + sum(result["skipped"].values())
    assert {row["model"] for row in rows} >= {"deepseek-v3"}
    for kind, figures in result["by_kind"].items():
        assert figures["predicted"] == sum(kind in row["kinds"] for row in rows)
    assert errors[0] <= overall["median_ape"] <= errors[-1] < 0.6
    assert all(row["low_s"] < row["predicted_s"] < row["high_s"] for row in rows)


def test_tables_name_kinds_rows_and_what_was_skipped(capsys):
    """Each run stands in a line with its interval."""
    assert main([str(MLPERF), "--rows"]) == 0

    text = capsys.readouterr().out
    assert "latent attention" in text
    assert "mlperf-6.0.csv:2" in text
    assert "skipped 1: " in text


def test_a_model_without_kinds_is_a_mistake(tmp_path, capsys):
    """The message names the row and models.yaml."""
    text = MLPERF.read_text(encoding="utf-8").replace("../../models/deepseek-v3.json", "models/deepseek-v9.json")
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")

    assert main([str(path)]) == 2
    assert "own.csv:2" in (message := capsys.readouterr().err)
    assert "deepseek-v9" in message
    assert "models.yaml" in message


@pytest.mark.parametrize("argument", ["missing.csv"])
def test_a_missing_file_is_a_mistake(argument, capsys):
    """Status 2, with the name of the file."""
    assert main([argument]) == 2
    assert argument in capsys.readouterr().err
