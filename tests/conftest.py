"""Fixtures of the benchmarks' tests, and how Hypothesis runs in all of them."""

import json

import pytest
from hypothesis import settings

from tests.tuner.broken_studies import rows

settings.register_profile("untimed", deadline=None)  # a busy machine may stop for a second anywhere
settings.load_profile("untimed")


@pytest.fixture
def write(tmp_path):
    """Writes a CSV file of measured runs; its path."""

    def write_rows(name, *changes):
        path = tmp_path / name
        path.write_text(rows(*changes), encoding="utf-8")
        return path

    return write_rows


@pytest.fixture
def answered(capsys):
    """Runs a program of benchmarks/ in this process with `--json`; its object."""

    def call(program, *arguments):
        status = program.main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return json.loads(captured.out)

    return call
