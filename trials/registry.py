"""Registry of backends: the keys of every backend that a study's `trial:` section may name.

A new backend is a folder in `trials/` and its entry here.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trials.command.keys import CommandKeys
from trials.jax_training.keys import JaxKeys
from trials.replay.keys import ReplayKeys
from trials.simulated.keys import SimulatedKeys
from trials.torch_training.keys import TorchKeys

TrialKeys = Annotated[ReplayKeys | SimulatedKeys | TorchKeys | JaxKeys | CommandKeys, Field(discriminator="backend")]
"""Keys of a `trial:` section. Each class is chosen by the name that its field `backend` admits."""

DEFAULT_TRIAL = SimulatedKeys(backend="simulated")
"""Keys of a study without a `trial:` section."""
