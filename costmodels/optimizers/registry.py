"""Table of the optimizers that a job may have, by their names in study files.

Sources: megatron-core 0.19.2 core/optimizer/__init__.py, emerging_optimizers.py and training/arguments.py; DeepSpeed
0.19.8 runtime/engine.py (_configure_basic_optimizer, which takes any class of torch.optim); GPT-NeoX
megatron/training.py; nanotron config/config.py; torchtitan 0.3.0 components/optimizer/optimizer.py; MaxText
optimizers/optimizers.py; transformers 5 training_args.py (OptimizerNames).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from costmodels.optimizers.adafactor import Adafactor
from costmodels.optimizers.contract import AbstractOptimizer, State
from costmodels.optimizers.elementwise import FIRST, MOMENTUM, SECOND, Elementwise, eight_bit
from costmodels.optimizers.muon import Muon
from hardware.io.errors import did_you_mean

OptimizerName = Literal[
    "adam",
    "sgd",
    "plain_sgd",
    "lion",
    "muon",
    "adaptive_muon",
    "adafactor",
    "adam_8bit",
    "lion_8bit",
    "ademamix",
    "adagrad",
    "rmsprop",
    "lamb",
]
"""Names in study files, which are the keys of `OPTIMIZERS`."""
DEFAULT_OPTIMIZER: OptimizerName = "adam"
"""Optimizer of a job that names none; frameworks have the same default."""

_SLOW = State(name="slow_moment", width=4.0)
_TRUST_BYTES = 8
"""Norms of weight and update, which LAMB divides (You et al. 2020, algorithm 2)."""
_ADAMS = (FIRST, SECOND)
# Megatron-LM gives ranks whole parameters for every optimizer but Adam and SGD (layer_wise_optimizer.py)
_LAYER_WISE = {"megatron": (1,), "mindspeed": ()}
_NONE = {"megatron": (), "mindspeed": ()}

OPTIMIZERS: Mapping[str, AbstractOptimizer] = {
    "adam": Elementwise(
        kept=_ADAMS,
        spellings={
            "megatron": ("adam", "adamw", "fusedadam", "fused_adam"),
            "deepspeed": ("adam", "adamw", "fusedadam", "muadam", "muadamw", "nadam", "radam", "adamax"),
            "gpt-neox": ("adam", "adamw", "cpu_adam", "cpu_torch_adam", "fusedadam"),
            "nanotron": ("adam", "adamw"),
            "torchtitan": ("adam", "adamw"),
            "maxtext": ("adamw", "adam_pax"),
            "transformers": (
                *("adamw_torch_fused", "adamw_torch", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf"),
                *("adamw_apex_fused", "paged_adamw_32bit", "paged_adamw"),
            ),
        },
        sharded_by={"mindspeed": (1,)},
        offloaded_by=("megatron", "mindspeed", "deepspeed", "gpt-neox"),
    ),
    "sgd": Elementwise(
        kept=(MOMENTUM,),
        spellings={**dict.fromkeys(("megatron", "gpt-neox", "torchtitan"), ("sgd",)), "deepspeed": ("sgd", "musgd")},
        sharded_by=_NONE,
    ),
    # none of these takes a momentum (nanotron helpers.py, init_optimizer_and_grad_accumulator)
    "plain_sgd": Elementwise(
        kept=(), spellings=dict.fromkeys(("nanotron", "maxtext", "transformers"), ("sgd",)), sharded_by=_NONE
    ),
    "lion": Elementwise(
        kept=(FIRST,),
        spellings={
            "megatron": ("lion",),
            "deepspeed": ("lion", "fusedlion"),
            "gpt-neox": ("lion",),
            "torchtitan": ("lion",),
            "transformers": ("lion_32bit", "paged_lion_32bit"),
        },
        sharded_by=_LAYER_WISE,
    ),
    "muon": Muon(
        spellings={
            "megatron": ("muon", "dist_muon"),
            "deepspeed": ("muon",),
            "torchtitan": ("distmuon", "muon"),
            "maxtext": ("muon",),
        },
        sharded_by=_LAYER_WISE,
    ),
    "adaptive_muon": Muon(spellings={"megatron": ("adaptive_muon",)}, sharded_by=_LAYER_WISE, beside=(SECOND,)),
    "adafactor": Adafactor(
        spellings={"deepspeed": ("adafactor",), "transformers": ("adafactor",)}, sharded_by=_NONE, offloaded_by=()
    ),
    # transformers' Trainer leaves the embedding in 32 bits (trainer_optimizer.py, register_module_override)
    "adam_8bit": Elementwise(
        kept=(eight_bit("first_moment"), eight_bit("second_moment")),
        kept_instead={"embedding": _ADAMS, "vector": _ADAMS},
        spellings={
            "deepspeed": ("adamw8bit",),
            "torchtitan": ("adamw8bit", "adam8bit"),
            "transformers": ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
        },
        sharded_by=_NONE,
        offloaded_by=(),
    ),
    "lion_8bit": Elementwise(
        kept=(eight_bit("first_moment"),),
        kept_instead={"embedding": (FIRST,), "vector": (FIRST,)},
        spellings={"transformers": ("lion_8bit", "paged_lion_8bit")},
        sharded_by=_NONE,
        offloaded_by=(),
    ),
    "ademamix": Elementwise(
        kept=(FIRST, SECOND, _SLOW),
        spellings={"transformers": ("ademamix", "paged_ademamix_32bit")},
        sharded_by=_NONE,
        offloaded_by=(),
    ),
    "adagrad": Elementwise(
        kept=(SECOND,), spellings={"deepspeed": ("adagrad",), "transformers": ("adagrad",)}, sharded_by=_NONE
    ),
    "rmsprop": Elementwise(
        kept=(SECOND,),
        spellings={"deepspeed": ("rmsprop",), "transformers": ("rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit")},
        sharded_by=_NONE,
        offloaded_by=(),
    ),
    "lamb": Elementwise(
        kept=_ADAMS,
        rereads=_TRUST_BYTES,
        spellings={"deepspeed": ("lamb", "fusedlamb")},
        sharded_by=_NONE,
        offloaded_by=(),
    ),
}

NOT_MODELLED: Mapping[str, str] = {
    "soap": "decomposes matrices (QR), of which no time is known",
    "onebitadam": "sends compressed gradients",
    "zerooneadam": "sends compressed gradients",
    "onebitlamb": "sends compressed gradients",
    "galore_adamw": "decomposes gradients (SVD), of which no time is known",
    "apollo_adamw": "projects gradients, which is not modelled",
    "lomo": "updates weights during the backward pass",
    "adalomo": "updates weights during the backward pass",
    "adamw_anyprecision": "keeps states as wide as its own options say",
}
"""Optimizers of frameworks that have no entry, with the reason."""


def optimizers_of(framework: str) -> dict[str, str]:
    """Return the optimizers that a framework has, by all of its names for them."""
    return {text: name for name, one in OPTIMIZERS.items() for text in one.spellings.get(framework, ())}


def why_unknown(text: str, known: Iterable[str]) -> str:
    """Return why an optimizer of a file has no model, with the nearest of those that have one."""
    reason = NOT_MODELLED.get(text.lower(), "is no optimizer that Meshtune knows")
    return f"{text} {reason}; {did_you_mean(text.lower(), tuple(known))}"
