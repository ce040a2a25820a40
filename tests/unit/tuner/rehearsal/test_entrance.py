"""Which room a program is served in, by what it imports."""

import pytest

from tuner.rehearsal.entrance import JAX, TORCH, framework_of


def framework(folder, **files):
    """Write modules, and return the framework of `train.py`."""
    for name, text in files.items():
        place = folder.joinpath(*name.split("__")).with_suffix(".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return framework_of(folder / "train.py", folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import jax.numpy as jnp", JAX),
        ("from flax import nnx", JAX),
        ("import torch", TORCH),
        ("import jax\nfrom torch.utils.data import DataLoader", JAX),
        ("import jax\nfrom torch import nn", TORCH),
        ("def main():\n    import jax", JAX),
        ("import argparse", TORCH),
        ("import (", TORCH),
    ],
)
def test_a_program_says_it_itself(tmp_path, text, expected):
    """JAX with a loader of PyTorch's is JAX; with its modules or optimizers it is PyTorch."""
    assert framework(tmp_path, train=text) == expected


def test_its_own_modules_are_followed(tmp_path):
    """The program imports a package of its folder, whose module imports JAX; other modules do not count."""
    files = {"train": "from model.layers import Block", "model__layers": "import jax", "other": "import torch.nn"}

    assert framework(tmp_path, **files) == JAX


def test_the_nearest_import_counts(tmp_path):
    """A program that imports PyTorch is of PyTorch, though a module that it uses imports JAX."""
    assert framework(tmp_path, train="import torch\nimport extra", extra="import jax") == TORCH
