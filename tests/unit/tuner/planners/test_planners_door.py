"""What `tuner.planners` offers by name is loaded where it is used, and says what it needs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import tuner.planners

ROOT = Path(__file__).resolve().parents[4]


def test_the_door_loads_no_framework():
    """Importing the planners loads neither JAX nor torch, which may be missing."""
    program = "import sys, tuner.planners; print(sorted({'jax', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_names_are_sorted():
    """`__all__` is in order and holds nothing that isn't there."""
    assert tuner.planners.__all__ == sorted(tuner.planners.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'plan_tensorflow'"):
        _ = tuner.planners.plan_tensorflow


@pytest.mark.parametrize(("library", "word"), [("jax", "JAX"), ("torch", "torch")])
def test_a_missing_library_is_told(monkeypatch, library, word):
    """Where a library is missing, importing what needs it is an ImportError that says how to get it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else find_spec(name))

    with pytest.raises(ImportError) as caught:
        getattr(tuner.planners, f"plan_{library}")

    told = f"plan_{library} needs {word}, which is not installed here; pip install 'meshtune[{library}]'"
    assert str(caught.value) == told
