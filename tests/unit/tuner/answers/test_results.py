import subprocess
import sys
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS
from tests.support.studies.broken_studies import study
from tests.support.studies.command_line import ROOT
from tuner import Prediction, RankedCandidate, predict, rank

CONFIG = "pp=2,tp=2,dp=2"
PROGRAM = """
from tuner import predict, rank

found = predict("study.yaml", "pp=2,tp=4,dp=4")
reveal_type(found["step_time_s"])
reveal_type(rank("study.yaml")[0]["fits"])
found["step_time"]
"""


@pytest.fixture
def path(tmp_path):
    """A study that the cost model answers, of a catalog's model or with changes."""

    def write(**changes):
        file = tmp_path / "study.yaml"
        file.write_text(study(**changes), encoding="utf-8")
        return file

    return write


def assert_is(value, kind, where=""):
    """Assert that a value is of a type, at any depth; a dictionary has the keys of its type and no others."""
    arguments = get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert kind.__required_keys__ <= value.keys() <= hints.keys(), where
        for key, inner in value.items():
            assert_is(inner, hints[key], f"{where}.{key}")
    elif get_origin(kind) is Literal:
        assert value in arguments, where
    elif get_origin(kind) in (Union, UnionType):
        (of_value,) = [one for one in arguments if one is not NoneType]
        if value is not None:
            assert_is(value, of_value, where)
    elif get_origin(kind) in (list, dict):
        assert type(value) is get_origin(kind), where
        for inner in value if isinstance(value, list) else value.values():
            assert_is(inner, arguments[-1], where)
    else:
        assert type(value) in {float: (float, int)}.get(kind, (kind,)), where


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"space": "{recompute: [none, full], zero_stage: [0, 1], sequence_parallel: [true, false]}"},
        {"objective": "cost_per_token", "cost": "{price_per_device_hour: 2.0}"},
    ],
    ids=["plain", "opened", "cost"],
)
def test_results_are_what_their_types_say(path, changes):
    """Every key that is returned has the type that it is declared with, and no required key is missing."""
    file = path(**changes)

    assert_is(predict(file, CONFIG), Prediction)
    assert_is(rank(file, top=None), list[RankedCandidate])


def test_all_dimensions_are_keys_of_a_candidate():
    """Whatever a study may search is a key of the type."""
    assert {*DEGREES, *FURTHER_DIMENSIONS} <= RankedCandidate.__annotations__.keys()


@pytest.mark.slow
def test_type_checkers_know_the_keys(tmp_path):
    """Mypy reads the types from the packages, and refuses a key that is none."""
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports", "silent", "--ignore-missing-imports", "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": "", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    told = done.stdout.replace("builtins.", "")
    assert 'note: Revealed type is "float"' in told
    assert 'note: Revealed type is "bool"' in told
    assert 'TypedDict "Prediction" has no key "step_time"' in told
