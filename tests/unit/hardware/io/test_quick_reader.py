"""YAML that libyaml's parser reads for us: the same values as PyYAML's own parser makes, or none."""

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hardware.io.config_file import _READ_DIFFERENTLY, _CoreLoader, _QuickReader, _UnusualError
from hardware.io.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]
CATALOGS = sorted(path for room in ("hardware", "costmodels", "tuner") for path in (ROOT / room).rglob("*.yaml"))

PIECES = [
    *("\n", "\n", "\n  ", "\n    ", " ", ": ", ":", ", ", ",", "- ", "-", "{", "}", "[", "]", "'", '"', "\\", " #"),
    *("? ", "?", "!", "!!str ", "!a ", "!<b>", "!=", "&a ", "*a", "|", ">-\n  ", "%", "%YAML 1.2\n", "---", "..."),
    *("#", "<<: ", "a", "b?c", "d!", "é", "\u2028", "\x85", "\\x3f", "\\ud800", "\\t", "``", "@", "=", "a: ", "b: "),
    *("'a?'", '"b!"', '"?": ', "1", "-0x1", "1e-6", ".5", "1e999", ".inf", "-.INF", ".nan", "012", "1_000", "12:30"),
    *("true", "No", "~", "null", "+"),
]


def _read(text):
    """What the quick reader makes of a text, as text; None if it leaves it to the other."""
    try:
        return repr(_QuickReader(text).read())
    except (_UnusualError, ConfigError, yaml.YAMLError, ValueError):
        return None


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@example("{a: b?c}")
@example('{a: b?c, "\\x3f": 1}')
@example("a: b?c\nd: [e?]")
@example("a: {b: c\n  d!: e}")
@example("a: ?b")
@example("? a\n: b")
@example("a: |\n  b?\n  c!")
@example("a: b  # c?")
@example("a: |#b")
def test_what_is_read_quickly_is_read_alike(text):
    """PyYAML's own parser accepts it and makes the same values, of the same types and in the same order."""
    quick = _read(text)

    if quick is not None and not _READ_DIFFERENTLY.search(text):
        assert repr(_CoreLoader(text).get_single_data()) == quick


@pytest.mark.parametrize("path", CATALOGS, ids=lambda path: path.name)
def test_catalogs_are_read_quickly(path):
    """No catalog needs the slower parser, which takes a second for half a megabyte."""
    assert _read(path.read_text(encoding="utf-8")) is not None
