"""Registry of backends: the keys of every backend that a study's `trial:` section may name.

A new backend is a folder in `trials/` and its entry here; packages add theirs as docs/extending.md says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args

from pydantic import Field, SerializeAsAny, WrapValidator

from hardware.io.config_file import validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.plugins import load_plugin, plugins, refused
from trials.command.keys import CommandKeys
from trials.jax_training.keys import JaxKeys
from trials.replay.keys import ReplayKeys
from trials.simulated.keys import SimulatedKeys
from trials.torch_training.keys import TorchKeys
from trials.trial_keys import AbstractTrialKeys

_Shipped = ReplayKeys | SimulatedKeys | TorchKeys | JaxKeys | CommandKeys


def _with_packages(value: Any, validate: Callable[[Any], AbstractTrialKeys]) -> AbstractTrialKeys:
    """Validate the keys of a backend of an installed package by its class, and all others by those of Meshtune's own.

    Raises:
        ConfigError: A package's class cannot be used, or its keys have a mistake.
    """
    name = value.get("backend") if isinstance(value, Mapping) else None
    shipped = {get_args(keys.model_fields["backend"].annotation)[0] for keys in get_args(_Shipped)}
    if not isinstance(name, str) or name in shipped:
        return validate(value)
    if name not in plugins("backends"):
        nearest = did_you_mean(name, (*shipped, *plugins("backends")))
        raise ConfigError("is no backend", key="trial.backend", value=name, nearest=nearest)
    keys = load_plugin("backends", name)
    if not (isinstance(keys, type) and issubclass(keys, AbstractTrialKeys) and "proxy" in keys.model_fields):
        raise refused("backends", name, "is no subclass of trials.trial_keys.AbstractTrialKeys with a field `proxy`")
    try:
        return validate_mapping(keys, value)
    except ConfigError as error:
        raise error.under("trial") from None


TrialKeys = Annotated[_Shipped, Field(discriminator="backend"), WrapValidator(_with_packages), SerializeAsAny()]
"""Keys of a `trial:` section. Each class is chosen by the name that its field `backend` admits."""

DEFAULT_TRIAL = SimulatedKeys(backend="simulated")
"""Keys of a study without a `trial:` section."""
