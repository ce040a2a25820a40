"""The operators of a step: gradients against those that JAX derives from the forward pass alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def errors():
    """Run the program that compares them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.programs.jax_numerics"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("model", ["gpt", "llama", "experts"])
def test_the_backward_operators_give_the_gradients_of_the_forward_pass(errors, model):
    """Every parameter's gradient equals the one that `jax.grad` derives, to float32's precision."""
    assert len(errors[model]) > 15
    assert max(errors[model].values()) < 1e-5
