"""The registry of backends, and what every entry promises to the study file."""

import json
from pathlib import Path
from typing import get_args

import pytest

from costmodels.job.runtime import find_runtime, other_runtimes
from trials.backend import TrialAbility
from trials.own_step import World
from trials.registry import DEFAULT_TRIAL, SHIPPED, shipped_keys
from trials.trial_keys import AbstractTrialKeys
from tuner.study_file.config import load_study

STUDIES = Path(__file__).resolve().parents[3] / "configs" / "studies"
KEYS = [shipped_keys(name) for name in SHIPPED]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys.__name__)
def test_every_backend_brings_keys_of_its_own(keys):
    """Keys stand in the folder of their backend, name it, and have the two keys that all studies may set."""
    (name,) = get_args(keys.model_fields["backend"].annotation)

    assert issubclass(keys, AbstractTrialKeys)
    assert keys.__module__.startswith(f"trials.{name}")
    assert keys.__module__.endswith(".keys")
    assert {"time_limit", "proxy"} <= set(keys.model_fields)


def test_limits_do_not_change_the_meaning_of_trials():
    """A study may resume with another time limit; its seed may not change."""
    limited = DEFAULT_TRIAL.model_copy(update={"time_limit": 5.0})
    seeded = DEFAULT_TRIAL.model_copy(update={"seed": 1})

    assert limited.meaning() == DEFAULT_TRIAL.meaning()
    assert seeded.meaning() != DEFAULT_TRIAL.meaning()


def test_a_replay_restricts_the_candidates_and_a_simulation_does_not():
    """Only measured configurations can be replayed, and its rows are part of its meaning."""
    replay = load_study(STUDIES / "ultrascale-llama-8b-128.yaml").trials.backend
    simulated = load_study(STUDIES / "llama3-8b-dgx-h100.yaml").trials.backend

    assert len(replay.candidates(("zero_stage",))) == 176
    assert simulated.candidates(()) is None
    assert json.dumps(replay.describe()).count("sha256") == 1
    assert simulated.describe() == {}


@pytest.mark.parametrize(
    ("study", "expected"),
    [
        ("ultrascale-llama-8b-128", set()),
        ("llama3-8b-dgx-h100", set(TrialAbility) - {TrialAbility.TRAINING}),
        ("cpu-jax", {TrialAbility.TRAINING, TrialAbility.PLANS, TrialAbility.PROXIES}),
        ("cpu-gpt", {TrialAbility.TRAINING, TrialAbility.PROXIES, TrialAbility.LAYERS}),
        ("cpu-torch-planned", {TrialAbility.TRAINING, TrialAbility.PLANS}),
    ],
)
def test_backends_say_what_their_trials_can_do(study, expected):
    """Trials in torch run plans with runtime torch-planned, and the trainer shards layers as Megatron does."""
    assert load_study(STUDIES / f"{study}.yaml").trials.backend.abilities == expected


@pytest.mark.parametrize("name", ["jax-reference", "torch-planned"])
def test_no_cluster_is_compared_with_rehearsals(name):
    """The profile of steps that plans describe is a guess about processors, and no hypothesis of another study."""
    assert name not in {other.name for other in other_runtimes(find_runtime("megatron-core"))}


@pytest.mark.parametrize("world", get_args(World))
def test_own_steps_are_run_by_the_backend_of_their_library_and_simulated(world):
    """A user's step in each library is run by the backend of its name, by the user's command, and in a world."""
    found = {get_args(keys.model_fields["backend"].annotation)[0] for keys in KEYS if world in keys.OWN_STEPS}

    assert found == {world, "command", "simulated"}
