"""Files that are none, have no end, or hold more than anybody reads."""

import gzip
import os

import pytest

from hardware.io.config_file import MAX_DEPTH, MAX_VALUES, MAX_YAML_BYTES, parse_yaml, read_mapping
from hardware.io.errors import ConfigError
from hardware.io.input_file import read_input, unpack
from trials.command.patience import at_most


@pytest.fixture
def place(tmp_path):
    """Makes what a path may lead to; the path."""
    path = tmp_path / "study.yaml"
    makers = {
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "directory": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "nothing": lambda: None,
    }

    def make(kind):
        makers[kind]()
        return path

    return make


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("pipe", "is a pipe or a device, not a file; save it to a file"),
        ("device", "is a pipe or a device, not a file; save it to a file"),
        ("directory", "is a directory, not a file"),
        ("loop", "cannot be read (Too many levels of symbolic links)"),
        ("nothing", "no such file; check the path"),
    ],
)
def test_what_is_no_plain_file_is_refused_at_once(place, kind, words):
    """Nothing is read from what has no end, and nobody waits for a writer."""
    path = place(kind)

    with at_most(30), pytest.raises(ConfigError) as caught:
        read_input(path, most_bytes=1000)
    assert str(caught.value) == f"{path}: {words}"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_no_system_takes_for_a_path_is_refused(tmp_path, name):
    """A path from a study file may hold anything."""
    with pytest.raises(ConfigError, match="is no path of a file"):
        read_input(tmp_path / name, most_bytes=1000)


def test_as_much_is_read_as_is_allowed_and_no_more(tmp_path):
    """A file of exactly the limit is read, one byte more refused."""
    path = tmp_path / "x"
    path.write_bytes(b"x" * 2_000_000)

    assert len(read_input(path, most_bytes=2_000_000)) == 2_000_000
    with pytest.raises(ConfigError, match="is larger than 2 MB"):
        read_input(path, most_bytes=1_999_999)


def test_a_packed_file_unpacks_to_no_more_than_is_allowed(tmp_path):
    """A few bytes that unpack to gigabytes are refused when the limit is reached."""
    bomb = gzip.compress(bytes(8_000_000), mtime=0)
    path = tmp_path / "x.gz"

    assert unpack(gzip.compress(b"small", mtime=0), most_bytes=5, path=path) == b"small"
    assert unpack(b"plain", most_bytes=1, path=path) == b"plain"
    with pytest.raises(ConfigError, match="is larger than 1 MB"):
        unpack(bomb, most_bytes=1_000_000, path=path)
    with pytest.raises(ConfigError, match="is damaged: it cannot be decompressed"):
        unpack(bomb[:-9], most_bytes=10_000_000, path=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [x]\nb: *a\n", "line 2: aliases (*name) are not allowed"),
        ("a: &a [*a]\n", "line 1: aliases (*name) are not allowed"),
        ("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, f"nested deeper than {MAX_DEPTH} levels"),
        (f"a: [{'1,' * MAX_VALUES}]", f"holds more than {MAX_VALUES:,} values"),
        ("a: " + "x" * MAX_YAML_BYTES, "is larger than 1 MB"),
        ("a: " + "1" * 5000, "is not valid YAML (Exceeds the limit (4300 digits)"),
        ("a: !!bool maybe", "is not valid YAML ('maybe' is neither true nor false)"),
        ("a: !!python/object/apply:os.system [ls]", "is not valid YAML (could not determine a constructor"),
    ],
)
def test_yaml_is_loaded_safely_and_its_size_is_bounded(text, words):
    """No tag but those of the core schema, no alias, and nothing deep, large or endless gets past the parser."""
    with at_most(30), pytest.raises(ConfigError) as caught:
        parse_yaml(text)
    assert words in str(caught.value)


def test_line_ends_of_all_systems_are_read_alike(tmp_path):
    """A file from another system means the same."""
    for number, end in enumerate((b"\n", b"\r\n", b"\r")):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(end.join((b"a: 1", b"b: |", b"  x", b"  y", b"")))

        assert read_mapping(path) == {"a": 1, "b": "x\ny\n"}


def test_a_message_stays_short(tmp_path):
    """Whatever megabytes a mistake is about, its message is a few lines."""
    long = "x" * 100_000
    error = ConfigError(long, key=long, value=[long], nearest=long, file=str(tmp_path / long))

    assert 3000 < len(str(error)) < 5000


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", 'a: "\\ud800"', "line 1 = '\\\\ud800': holds half of a surrogate pair"),
        ("a.yaml", 'a:\n  ? "\\udcff"\n  : 1', "line 2"),
        ("a.json", '{"a": ["\\ud800"]}', "holds half of a surrogate pair"),
        ("a.json", '{"\\udfff": 1}', "holds half of a surrogate pair"),
        ("a.yaml", "a: 1\nb: 1e308", "line 2: 1e[+]308 is too far from 0"),
        ("a.yaml", "a: [-1e-320]", "line 1: -1e-320 is too close to 0"),
        ("a.json", '{"a": 1e-300}', "1e-300 is too close to 0"),
    ],
)
def test_what_cannot_be_written_or_reckoned_with_is_refused(tmp_path, name, text, words):
    """Halves of characters, and numbers whose products are none, go no further than the one reader."""
    (tmp_path / name).write_text(text, encoding="ascii")
    with pytest.raises(ConfigError, match=words):
        read_mapping(tmp_path / name)


def test_whole_pairs_and_numbers_are_read(tmp_path):
    """A pair of halves is the character that it stands for, and 0, -0.0 and infinities are what they are."""
    (tmp_path / "a.json").write_text('{"a": "\\ud83d\\ude00", "b": [0.0, -0.0, Infinity, 1e100]}', encoding="ascii")

    assert read_mapping(tmp_path / "a.json") == {"a": "\U0001f600", "b": [0.0, 0.0, float("inf"), 1e100]}
