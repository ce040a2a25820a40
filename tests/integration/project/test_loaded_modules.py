"""What quick commands load: nothing that only runs, planners, trackers or files of frameworks need."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUDY = "configs/studies/llama3-8b-dgx-h100.yaml"

NEVER = {
    *("asyncio", "optuna", "ray", "rich", "scipy", "sklearn", "sqlalchemy"),
    *("costmodels.calibration.fitting", "costmodels.traced.with_torch", "trials.on_ray", "trials.command.keys"),
    *("trials.jax_training", "trials.replay", "trials.torch_training", "tuner.imports", "tuner.planners.assignment"),
    *("tuner.planners.toast", "tuner.plans.layer_plans", "tuner.rehearsal", "tuner.run.loop", "tuner.search.sampler"),
}
"""Modules that no quick command needs; each takes a tenth of such a command or more, alone or with what it loads."""

PROGRAM = """
import sys
sys.argv[0] = "meshtune"
from tuner.cli.main import main
try:
    main()
finally:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def loaded_by(*command):
    """Names of the modules that a command has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines())


@pytest.mark.parametrize(
    "command",
    [
        ("space", STUDY),
        ("space", STUDY, "--why", "tp=8"),
        ("predict", STUDY, "--config", "tp=8,dp=8"),
        ("rank", STUDY),
        ("rank", STUDY, "--json"),
    ],
    ids=" ".join,
)
def test_a_quick_command_loads_what_it_needs(command):
    """Before any trial, the predictions of a study of a catalog's model take numpy and our cost model."""
    loaded = loaded_by(*command)

    assert "costmodels.step.step_time" in loaded
    assert sorted(NEVER & loaded) == []


def test_help_loads_no_numbers():
    """It loads neither the cost model nor the libraries of numbers and of checked mappings."""
    assert {"numpy", "pydantic", "yaml", "costmodels", *NEVER} & loaded_by("--help") == set()


def test_a_study_loads_its_own_backend():
    """The backend that a study names is loaded, and no other one."""
    loaded = loaded_by("space", "configs/studies/cpu-gpt.yaml")

    assert "trials.torch_training.keys" in loaded
    assert {"trials.jax_training", "trials.command.keys", "trials.replay"} & loaded == set()
