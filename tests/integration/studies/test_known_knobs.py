"""Flags, variables and keys of known knobs, read by the frameworks' own parsers."""

import os

import pytest

from benchmarks.judges.known_knobs import main, measure
from benchmarks.support.framework_parsers import KNOB_PARSERS, Refused

COUNT = int(os.environ.get("MESHTUNE_EXPORTS", "15"))
"""Configurations of each framework; 500 are what is promised."""

pytestmark = pytest.mark.slow


@pytest.fixture(params=sorted(KNOB_PARSERS))
def target(request):
    """Each framework whose parser is installed."""
    try:
        KNOB_PARSERS[request.param]()
    except ImportError as error:
        pytest.skip(f"{error} (make frameworks)")
    return request.param


def test_random_values_are_accepted(target):
    """The framework accepts random layouts with random values of all knobs that suit the model."""
    row = measure(target, COUNT, 1, KNOB_PARSERS[target](), only_recommended=False)

    assert row["refused"] == 0, row["wrong"]
    assert row["knobs"] > 5


def test_a_refusal_is_counted(target):
    """What the framework refuses is counted and told with the values of the knobs."""

    def refusing(*_):
        raise Refused("no")

    row = measure(target, 3, 1, refusing, only_recommended=True)

    assert row["refused"] == 3
    assert all(line.endswith(": no") for line in row["wrong"])


def test_the_benchmark_tells_an_unknown_framework(capsys):
    """A misspelt target is answered with the nearest, and status 2."""
    assert main(["--target", "torchtitam"]) == 2
    assert "torchtitan" in capsys.readouterr().err
