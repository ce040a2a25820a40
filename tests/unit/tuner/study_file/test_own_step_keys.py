"""Keys that a study of a training step of the user's own cannot have, each refused before its program is imported."""

import re

import pytest
import yaml

from hardware.io.errors import ConfigError
from tuner.study_file.config import load_study
from tuner.study_file.own_study_text import own_study_text

GOOD = {"name": "own", "model": {"jax": "program:step"}, "cluster": {"name": "cpu-host", "hosts": 1}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"job": {"sequence_length": 64, "global_batch_size": 8}}, "job: belongs to models of the catalog"),
        ({"runtime": "megatron-core"}, "runtime = 'megatron-core': belongs to models of the catalog"),
        ({"measured": {"step_time_s": 1.0, "source": "log"}}, "measured: belongs to models of the catalog"),
        ({"history": ["old.csv"]}, "history: cannot inform"),
        ({"planner": {"pins": [{"op": "*", "dim": "batch"}]}}, "planner.pins: cannot be given"),
        ({"space": {"pp": [1, 2]}}, "space.pp: is no choice of a step of your own; valid: dp, tp, mbs, zero_stage"),
        ({"space": {"tp": [2, 2]}}, "space.tp = .*each once"),
        ({"trial": {"backend": "torch"}}, "trial.backend = 'torch': does not run a step of your own in JAX"),
        ({"trial": {"backend": "jax", "proxy": {"hosts": 1}}}, "trial.proxy: has no smaller form"),
        ({"model": {"jaxx": "program:step"}}, "model.*jaxx: unknown key; did you mean 'jax'"),
        (
            {"model": {"jax": "program:step", "torch": "program:step"}},
            "model = .*must name one factory; jax: .* not both",
        ),
        ({"model": {}}, "model: must name one factory"),
        (
            {"model": {"torch": "program:step"}, "trial": {"backend": "jax"}},
            "trial.backend = 'jax': does not run a step of your own in torch; trial: {backend: torch}",
        ),
        ({"model": {"torch": "program:step"}, "runtime": "torch-planned"}, "leave it out: torch runs your step"),
    ],
)
def test_keys_of_the_catalog_are_refused(tmp_path, keys, message):
    """A key that only a model of the catalog can have is named, with what to write instead."""
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(GOOD | keys), encoding="utf-8")

    with pytest.raises(ConfigError, match=message):
        load_study(file)


@pytest.mark.parametrize("world", ["jax", "torch"])
def test_a_new_study_trains_where_devices_are_processors(world):
    """The written study runs real steps on a cluster of processors, and is simulated on any other."""
    here = yaml.safe_load(own_study_text(world, "program:step", cluster="cpu-host", hosts=None, devices_per_host=4))
    there = yaml.safe_load(own_study_text(world, "program:step", cluster="dgx-h100", hosts=2, devices_per_host=None))

    assert here["model"] == {world: "program:step"}
    assert here["cluster"] == {"name": "cpu-host", "hosts": 1, "devices_per_host": 4}
    assert (here["trial"], there["trial"]) == ({"backend": world}, {"backend": "simulated"})
    assert there["cluster"] == {"name": "dgx-h100", "hosts": 2}


def test_a_new_study_runs_a_command():
    """A study written with a command has its words as they are given, on any cluster."""
    words = ["torchrun", "--nproc-per-node", "{devices_per_host}", "my own.py", "--plan", "{plan}"]
    text = own_study_text("torch", "program:step", cluster="dgx-h100", hosts=None, devices_per_host=None, command=words)
    trial = yaml.safe_load(text)["trial"]

    assert (trial["backend"], trial["command"]) == ("command", words)
    assert re.search(trial["log"]["pattern"][0], "step 3 took 0.25 s").groupdict() == {
        "iteration": "3",
        "step_s": "0.25",
    }


def test_an_unknown_cluster_is_named_by_its_option():
    """A cluster that the catalog lacks is refused under the option that names it."""
    with pytest.raises(ConfigError, match="--cluster"):
        own_study_text("jax", "program:step", cluster="dgx-h10", hosts=None, devices_per_host=None)
