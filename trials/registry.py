"""Registry of backends: the keys of every backend that a study's `trial:` section may name.

A new backend is a folder in `trials/` and its entry here; packages add theirs as docs/extending.md says. A backend is
loaded when a study names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, Union

from pydantic import Field, GetJsonSchemaHandler, SerializeAsAny, TypeAdapter, WrapValidator
from pydantic_core import CoreSchema

from hardware.io.config_file import validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.plugins import load_plugin, plugins, refused
from trials.simulated.keys import SimulatedKeys
from trials.trial_keys import AbstractTrialKeys

SHIPPED = {
    "replay": ("replay", "ReplayKeys"),
    "simulated": ("simulated", "SimulatedKeys"),
    "torch": ("torch_training", "TorchKeys"),
    "jax": ("jax_training", "JaxKeys"),
    "command": ("command", "CommandKeys"),
}
"""Folder of each backend of Meshtune's own, and the class of its keys in `keys.py` there."""


def shipped_keys(name: str) -> type[AbstractTrialKeys]:
    """Return the keys of a backend of Meshtune's own."""
    folder, found = SHIPPED[name]
    keys: type[AbstractTrialKeys] = getattr(import_module(f"trials.{folder}.keys"), found)
    return keys


def _by_backend(value: Any, validate: Callable[[Any], AbstractTrialKeys]) -> AbstractTrialKeys:
    """Validate the keys of a backend by its class, which may be an installed package's.

    Raises:
        ConfigError: No backend of that name is known, a package's class cannot be used, or the keys have a mistake.
    """
    if not isinstance(value, Mapping):
        return validate(value)  # keys already, or a mistake
    if "backend" not in value:
        raise ConfigError("is required and missing", key="trial.backend")
    name = value["backend"]
    try:
        is_shipped = isinstance(name, str) and name in SHIPPED
        return validate_mapping(shipped_keys(name) if is_shipped else _package_keys(name), value)
    except ConfigError as error:
        raise error.under("trial") from None


def _package_keys(name: Any) -> type[AbstractTrialKeys]:
    """Return the keys of an installed package's backend."""
    known = plugins("backends")
    if not isinstance(name, str) or name not in known:
        nearest = did_you_mean(str(name), (*SHIPPED, *known))
        raise ConfigError("is no backend", key="backend", value=name, nearest=nearest)
    keys = load_plugin("backends", name)
    if not (isinstance(keys, type) and issubclass(keys, AbstractTrialKeys)):
        raise refused("backends", name, "is no subclass of trials.trial_keys.AbstractTrialKeys")
    return keys


class _SchemaOfAll:
    """JSON schema of the keys of all backends of Meshtune's own."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        every: Any = Union[tuple(map(shipped_keys, SHIPPED))]  # noqa: UP007 # their number is not written here
        of_all: TypeAdapter[Any] = TypeAdapter(Annotated[every, Field(discriminator="backend")])
        return handler(of_all.core_schema)


TrialKeys = Annotated[AbstractTrialKeys, _SchemaOfAll, WrapValidator(_by_backend), SerializeAsAny()]
"""Keys of a `trial:` section, of the class that its key `backend` names."""

DEFAULT_TRIAL = SimulatedKeys(backend="simulated")
"""Keys of a study without a `trial:` section."""
