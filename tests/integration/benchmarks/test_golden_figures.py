"""The program that compares figures with recorded ones to the last bit."""

import json

import pytest

from benchmarks.judges import golden_figures
from benchmarks.judges.golden_figures import differences
from benchmarks.support import golden_parts


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Folder with the figures of one simulated step."""
    monkeypatch.setattr(golden_parts, "SIMULATED", golden_parts.SIMULATED[:1])
    assert golden_figures.main(["--only", "simulations", "--write", "--folder", str(tmp_path)]) == 0
    return tmp_path


def test_the_same_version_has_equal_figures(recorded, capsys):
    """A part that is computed again equals its record, and nothing is printed."""
    assert golden_figures.main(["--only", "simulations", "--folder", str(recorded)]) == 0
    assert capsys.readouterr().out == ""


def test_a_changed_value_is_named(recorded, capsys):
    """A value that differs in its last digit, and a digest, are named with both values, and the status is 1."""
    file = recorded / "simulations.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    (figure,) = content.values()
    time_s = figure["shown"]["step_time_s"]
    figure["shown"]["step_time_s"], figure["digest"] = time_s * (1 + 2**-52), "other"
    file.write_text(json.dumps(content), encoding="utf-8")

    assert golden_figures.main(["--only", "simulations", "--folder", str(recorded)]) == 1
    digest, value = capsys.readouterr().out.splitlines()
    assert '/ digest: "other" was recorded' in digest
    assert f"/ step_time_s: {time_s * (1 + 2**-52)!r} was recorded, and now it is {time_s!r}" in value


def test_missing_new_and_reordered_values_are_named():
    """A difference of names, types, lengths or order is one as well."""
    old, new = {"a": 1, "b": [1, 2], "c": {"x": 1, "y": 2}, "d": 0}, {"a": 1.0, "b": [1], "c": {"y": 2, "x": 1}, "e": 0}

    assert list(differences(old, new)) == [
        "a: 1 was recorded, and now it is 1.0",
        "b: [1, 2] was recorded, and now it is [1]",
        "c: the keys have another order",
        "d: is missing now",
        "e: is new",
    ]


def test_every_part_is_recorded():
    """Each part has its record, and each stored study its storage."""
    for name in golden_parts.PARTS:
        assert json.loads((golden_figures.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for storage in golden_parts.STORED.values():
        assert golden_parts._packed(golden_figures.FOLDER / "stored", storage).exists()
