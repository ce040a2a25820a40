"""Fixtures of the benchmarks' tests, and how Hypothesis runs in all of them."""

import json

import pytest
from hypothesis import settings

from tests.tuner.broken_studies import rows

LONG = (
    "tests/tuner/test_resume.py",
    "tests/chaos/test_chaos.py",
    "tests/test_newcomer.py",
    "tests/tuner/test_ray_job.py",
    "tests/test_lost_node.py",
    "tests/tuner/test_shared_study.py",
    "tests/tuner/test_password.py",
    "tests/costmodels/jax_frontend/test_rules_by_halves.py",
    "tests/trials/torch_training/test_ray_hosts.py",
    "tests/trials/test_placement.py",
    "tests/tuner/planners/jax_plans/test_plan_jax.py",
    "tests/test_referee.py",
    "tests/test_rank_faults.py",
    "tests/test_documented_commands.py",
)
"""Files with tests that take longest: they begin, so that no process is left alone with one of them at the end."""

settings.register_profile("untimed", deadline=None)  # a busy machine may stop for a second anywhere
settings.load_profile("untimed")


def pytest_collection_modifyitems(items):
    """Puts the files with long tests first."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in LONG)


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
