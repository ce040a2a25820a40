"""Choose the next trials, run the study, and hold everything that a user touches.

Begin with `cli/main.py` for the commands and `run/loop.py` for the loop of one study. `search/sampler.py` is the Optuna
sampler that chooses the trials.

Python users import from here; docs/python.md shows how:

    from tuner import ThompsonSampler, load_study, make_sampler, place_models, predict, rank, run_study
    from tuner import for_titan, for_trainer, load_plan, parallelize_as, pin_layouts, plan_jax, plan_torch, titan_step

Each name is loaded, with its libraries, when it is first used. `import tuner` alone loads nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; nothing is loaded at import time
    from tuner.answers.predictions import predict, rank
    from tuner.answers.results import Prediction, RankedCandidate
    from tuner.place.placing import place_models
    from tuner.planners.jax_pinned import pin_layouts
    from tuner.planners.jax_plans import plan_jax
    from tuner.planners.loaded_plan import load_plan
    from tuner.planners.torch_plans import plan_torch
    from tuner.planners.torch_served import parallelize_as
    from tuner.planners.torch_titan import for_titan, titan_step
    from tuner.planners.torch_transformers import for_trainer
    from tuner.run.loop import run_study
    from tuner.run.studies import make_sampler
    from tuner.search.sampler import ThompsonSampler
    from tuner.study_file.config import load_study

__all__ = [
    "Prediction",
    "RankedCandidate",
    "ThompsonSampler",
    "for_titan",
    "for_trainer",
    "load_plan",
    "load_study",
    "make_sampler",
    "parallelize_as",
    "pin_layouts",
    "place_models",
    "plan_jax",
    "plan_torch",
    "predict",
    "rank",
    "run_study",
    "titan_step",
]

_MODULES = {
    "Prediction": "answers.results",
    "RankedCandidate": "answers.results",
    "ThompsonSampler": "search.sampler",
    "load_plan": "planners.loaded_plan",
    "load_study": "study_file.config",
    "make_sampler": "run.studies",
    "plan_jax": "planners",  # its own lazy door, which says what to install where JAX or torch is missing
    "plan_torch": "planners",
    "for_titan": "planners",
    "for_trainer": "planners",
    "parallelize_as": "planners",
    "pin_layouts": "planners",
    "titan_step": "planners",
    "place_models": "place.placing",
    "predict": "answers.predictions",
    "rank": "answers.predictions",
    "run_study": "run.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
