"""A user's step by the name of the function that makes it: `module:factory`, which takes nothing.

A JAX factory returns a function, its abstract arguments (a tuple of trees of `jax.ShapeDtypeStruct`), and perhaps the
names or numbers of the arguments whose memory the outputs take over. A torch factory returns a module, its inputs (a
tuple of trees of tensors; the device `meta` will do), and perhaps the loss as a function of the module and the inputs;
without it the module's result is the loss.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.sharding.graph import Graph
from hardware.io.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # JAX may be missing
    from costmodels.sharding.frontends.jax.program import Program

JaxStep = tuple[Callable[..., Any], tuple[Any, ...], tuple[str | int, ...]]
"""A function, its abstract arguments, and the donated ones."""

EXAMPLE = "for example my_training:step, found from the directory that the command runs in"


def graph_of_factory(name: str, *, option: str = "--jax") -> Graph:
    """The graph of the step that `module:factory` makes; see `program_of_factory`."""
    program = program_of_factory(name, option=option)
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # JAX may be missing

    return graph_of(program)


def program_of_factory(name: str, *, option: str = "--jax") -> Program:
    """The trace of the step that `module:factory` makes; see `step_of_factory`."""
    function, arguments, donated = step_of_factory(name, option=option)
    from costmodels.sharding.frontends.jax.program import traced  # noqa: PLC0415 # JAX may be missing

    return traced(function, *arguments, donated=donated)


def step_of_factory(name: str, *, option: str = "--jax") -> JaxStep:
    """The JAX step that `module:factory` makes; its module is imported, and runs as any import does.

    Raises:
        ConfigError: there is no such factory, JAX is missing, or it returns something else.
    """
    made = _made(name, option, "jax", "JAX")
    if not (_is_call(made) and callable(made[0])):
        raise ConfigError(
            "must return (function, arguments) or (function, arguments, donated)",
            key=option,
            value=name,
            nearest="arguments are a tuple of trees of jax.ShapeDtypeStruct",
        )
    return made[0], tuple(made[1]), tuple(made[2]) if len(made) == 3 else ()


def graph_of_torch_factory(name: str, *, option: str = "--torch") -> Graph:
    """The graph of the training step of the torch module that `module:factory` makes, imported as above.

    Raises:
        ConfigError: there is no such factory, torch is missing, it returns something else, or that can't be traced.
    """
    made = _made(name, option, "torch", "torch")
    from costmodels.sharding.frontends.torch.graph import graph_of_torch, is_module  # noqa: PLC0415 # torch may be missing

    if not (_is_call(made) and is_module(made[0]) and all(map(callable, made[2:]))):
        raise ConfigError(
            "must return (module, inputs) or (module, inputs, loss)",
            key=option,
            value=name,
            nearest="inputs are a tuple of trees of tensors, and loss(module, *inputs) is a scalar",
        )
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it would print the traceback of what the message below says
    try:
        return graph_of_torch(*made)
    except RuntimeError as error:  # torch's for shapes that do not fit and values that nobody has while it traces
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(
            f"can't be traced: {reason}", key=option, value=name, nearest="a module that runs on the device meta"
        ) from error
    finally:
        log.setLevel(level)


def _is_call(made: Any) -> bool:
    """Whether there is something to call, what to call it with, and perhaps a third thing."""
    return isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[1], (tuple, list))


def _made(name: str, option: str, library: str, title: str) -> Any:
    """What a factory returns, if its library is here."""
    module_name, colon, factory_name = name.partition(":")
    if not (module_name and colon and factory_name):
        raise ConfigError("must be module:factory", key=option, value=name, nearest=EXAMPLE)
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"needs {title}, which is not installed here",
            key=option,
            value=name,
            nearest=f"pip install 'meshtune[{library}]'",
        )
    factory = _factory(module_name, factory_name, name, option)
    if not callable(factory):
        raise ConfigError("is no function", key=option, value=name, nearest=EXAMPLE)
    return factory()


def _factory(module_name: str, factory_name: str, name: str, option: str) -> Any:
    """What the module calls so; modules of the working directory are found, too."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"can't be imported: {error}", key=option, value=name, nearest=EXAMPLE) from None
    if not hasattr(module, factory_name):
        able = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value)
            and f"{value.__module__}.".startswith(f"{module.__name__}.")  # a package re-exports what its modules have
            and not each.startswith("_")
        ]
        raise ConfigError(
            f"is nothing that {module_name} has", key=option, value=name, nearest=did_you_mean(factory_name, able)
        )
    return getattr(module, factory_name)
