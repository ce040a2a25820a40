"""Changed inputs of every kind, as many as there is time for; benchmarks/endurance/fuzz.py reads more of them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.target import defect_of
from tests.fuzz.targets import TARGETS
from trials.command.patience import at_most

SLOW = (
    "study values",
    "study journal",
    "yaml",
    "study",
    "space",
    "cluster",
    "model",
    "placement",
    "profile",
    "override",
    "measured",
    "command line",
    "own step",
    "hook",
)
"""Those that read much YAML or many rows, or answer commands."""

LIMIT_S = 30
"""On a busy machine; a hang takes longer."""


def examples(name):
    """How many inputs of a kind there is time for."""
    return 20 if name.startswith("init") else 40 if name in SLOW else 100


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_accepted(name, tmp_path):
    """What inputs are made of is read without a word, so that changes of it get far."""
    for seed in TARGETS[name].seeds():
        TARGETS[name].read(seed, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_no_good_input_is_refused_in_words(name, tmp_path):
    """A changed input is read, or refused by the one error that its reader has for it, in a message of some lines."""
    target, seeds = TARGETS[name], TARGETS[name].seeds()

    @settings(max_examples=examples(name), derandomize=True, database=None)
    @given(chance=st.integers(0, 2**64), seed=st.sampled_from(seeds))
    def holds(chance, seed):
        rng = Random(chance)  # noqa: S311 # Hypothesis gives the seed
        data = target.pick_mutation(rng)(seed, rng, seeds)
        with at_most(LIMIT_S):
            _, defect = defect_of(target, data, tmp_path)
        assert defect is None, defect.text

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_refused_in_words(name, tmp_path):
    """So is an input that nobody made of a good one."""

    @settings(max_examples=20, derandomize=True, database=None)
    @given(st.binary() | st.text().map(lambda text: text.encode(errors="surrogatepass")))
    def holds(data):
        _, defect = defect_of(TARGETS[name], data, tmp_path)
        assert defect is None, defect.text

    holds()
