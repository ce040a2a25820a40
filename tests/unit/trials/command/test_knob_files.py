import json
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hardware.io.errors import ConfigError
from trials.command.knob_files import TrialFile, read_trial_file, write_files

KEYS = {"zero": {"stage": 1, "bucket": 5}, "lr": 0.1, "name": "x"}
TOML = '# settings\nname = "x"  # the name\nlr = 0.1\n\n[zero]\nstage = 1\nbucket = 5 # bytes\n\n[other]\nbucket = 7\n'
READ = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}


def file_of(kind):
    """The same keys in a file of one kind."""
    text = {"json": json.dumps(KEYS), "yaml": yaml.safe_dump(KEYS), "toml": TOML}[kind]
    return TrialFile(name="settings", file_name=f"settings.{kind}", text=text)


@pytest.mark.parametrize("kind", sorted(READ))
@given(
    value=st.one_of(
        st.integers(-(2**40), 2**40),
        st.booleans(),
        st.floats(-1e9, 1e9).map(lambda number: round(number, 3)),
        st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8),
    ),
    key=st.sampled_from(["zero.bucket", "lr", "zero.added"]),
)
def test_a_changed_file_has_the_value_and_all_else_as_before(kind, value, key):
    """A copy read back differs from the file in the one key alone, in each format."""
    file = file_of(kind)
    found, expected = READ[kind](file.with_values({key: value})), file.parsed()
    *parents, last = key.split(".")
    inner = expected
    for parent in parents:
        inner = inner[parent]
    inner[last] = value

    assert found == expected


@pytest.mark.parametrize("kind", sorted(READ))
def test_null_takes_a_key_away(kind):
    """A value of null leaves the key out of the copy."""
    found = READ[kind](file_of(kind).with_values({"zero.bucket": None}))

    assert "bucket" not in found["zero"]
    assert found["zero"]["stage"] == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ini", "", "is no JSON, YAML or TOML file"),
        ("a.json", "[1]", "is no mapping"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.toml", "a = = 1", "cannot be parsed"),
    ],
)
def test_files_that_hold_no_keys_are_refused(tmp_path, name, text, message):
    """A file that cannot be read as keys and values is refused when the study is read."""
    (tmp_path / name).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=message):
        read_trial_file("settings", tmp_path / name)
    with pytest.raises(ConfigError, match="no such file"):
        read_trial_file("settings", tmp_path / "missing.json")


def test_a_key_below_a_value_is_refused():
    """A key whose parent is no mapping is refused with the nearest name."""
    with pytest.raises(ConfigError, match="is no mapping in the file"):
        file_of("json").with_values({"lr.more": 1})
    with pytest.raises(ConfigError, match="is no table of the file"):
        file_of("toml").with_values({"lacking.key": 1})


def test_copies_live_as_long_as_their_trial():
    """The copies have the texts that were asked for, in folders of their own, and are gone afterwards."""
    with write_files([("one", "ds.json", "{}"), ("two", "ds.json", "[]")], {"trial": "3"}) as paths:
        assert {name: Path(path).read_text(encoding="utf-8") for name, path in paths.items()} == {
            "one": "{}",
            "two": "[]",
        }
        assert all(path.endswith("ds.json") for path in paths.values())
    assert not any(Path(path).exists() for path in paths.values())
