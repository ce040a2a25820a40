"""Optimizers that a job may have: the states of each, and its names in training frameworks.

What an optimizer's update computes stands with the library that runs it: `trials/torch_training/optimizers.py` and
`trials/jax_training/model/optimizers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adam", "sgd"]
"""Names in study files, which are the keys of `OPTIMIZERS`."""
DEFAULT_OPTIMIZER: OptimizerName = "adam"
"""Optimizer of a job that names none; frameworks have the same default."""
MOMENT_BYTES = 4
"""Size of an element of a moment [bytes]: float32, whatever the precision of the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Optimizer by its states and names.

    Attributes:
        moments: Names of the moments that it keeps for each parameter.
        spellings: Names in each framework. Exporters write the first, importers read all.
        sharded_by: Frameworks that can shard its states, and offload them.
    """

    moments: tuple[str, ...]
    spellings: Mapping[str, tuple[str, ...]]
    sharded_by: tuple[str, ...] = ()


# Sources: Megatron-LM megatron/core/optimizer/__init__.py and distrib_optimizer.py (Adam only), DeepSpeed
# runtime/config.py, GPT-NeoX megatron/training.py, nanotron config/config.py, torchtitan components/optimizer.py.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adam": Optimizer(
        moments=("first_moment", "second_moment"),
        spellings={
            "megatron": ("adam", "adamw", "fusedadam", "fused_adam"),
            "deepspeed": ("adam", "adamw", "fusedadam"),
            "gpt-neox": ("adam", "adamw", "cpu_adam", "cpu_torch_adam", "fusedadam"),
            "nanotron": ("adam", "adamw"),
            "torchtitan": ("adam", "adamw"),
        },
        sharded_by=("megatron", "mindspeed"),
    ),
    "sgd": Optimizer(
        moments=("momentum",),
        spellings=dict.fromkeys(("megatron", "deepspeed", "gpt-neox", "nanotron", "torchtitan"), ("sgd",)),
    ),
}


def optimizers_of(framework: str) -> dict[str, str]:
    """Return the optimizers that a framework has, by all of its names for them."""
    return {text: name for name, one in OPTIMIZERS.items() for text in one.spellings.get(framework, ())}
