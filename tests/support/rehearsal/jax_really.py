"""Run `jax_train.py` with data on virtual processors, and print XLA's memory analysis of its step as JSON."""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv.pop(1)}"
sys.path.insert(0, str(Path(__file__).parent))

import jax_train

step = jax_train.train_step


def run(state, batch):
    """Run a step, and print what its compiled program needs."""
    found = step.lower(state, batch).compile().memory_analysis()
    names = ("argument", "output", "alias", "temp")
    sys.stdout.write(json.dumps({name: getattr(found, f"{name}_size_in_bytes") for name in names}) + "\n")
    return step(state, batch)


jax_train.train_step = run
jax_train.main()
