"""Load a user's training step from a factory function, named as `module:factory`.

It takes no arguments, or the number of `micro_batches` of a step. In JAX the function then runs all of them; in torch
the inputs are those of one, and each step runs the module as many times before the optimizer's update.

A JAX factory returns a function, its abstract arguments (a tuple of trees of `jax.ShapeDtypeStruct`), and optionally
the names or numbers of the arguments whose memory is donated to the outputs. A torch factory returns a module, its
inputs (a tuple of trees of tensors, for example on the device `meta`), and optionally a loss function of the module and
the inputs, and a function that makes an optimizer of the parameters. Without a loss function (or with None), the
module's result is the loss. Plans count Adam's update, whatever the optimizer.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from costmodels.sharding.frontends.users_code import users_code
from costmodels.sharding.graph import Graph
from hardware.io.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # JAX or torch may be missing
    from costmodels.sharding.frontends.jax.program import Program
    from costmodels.sharding.frontends.torch.steps import TorchStep

JaxStep = tuple[Callable[..., Any], tuple[Any, ...], tuple[str | int, ...]]
"""A function, its abstract arguments, and the names or numbers of donated arguments."""

Library = Literal["jax", "torch"]

TITLES: dict[Library, str] = {"jax": "JAX", "torch": "torch"}

MICRO_BATCHES = "micro_batches"
"""Argument of factories that can make a step of several micro-batches."""

EXAMPLE = "for example my_training:step, found from the directory that the command runs in"


def graph_of_factory(name: str, *, option: str = "--jax") -> Graph:
    """Return the graph of the JAX step that `module:factory` returns; see `program_of_factory`."""
    program = program_of_factory(name, option=option)
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # JAX may be missing

    return graph_of(program)


def program_of_factory(name: str, *, option: str = "--jax") -> Program:
    """Return the trace of the JAX step that `module:factory` returns; see `step_of_factory`."""
    with users_code(name, option=option):
        function, arguments, donated = step_of_factory(name, option=option)
        from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # JAX may be missing

        return trace_function(function, *arguments, donated=donated)


def step_of_factory(name: str, *, option: str = "--jax", folder: str | None = None, micro_batches: int = 1) -> JaxStep:
    """Return the JAX step that `module:factory` returns. Its module is imported, which runs the module's code.

    Args:
        name: Factory as `module:factory`.
        option: Name of the option or key in messages.
        folder: Folder in which the module is looked for first, before the working directory.
        micro_batches: Number of micro-batches of the step, for factories that take it.

    Raises:
        ConfigError: The factory does not exist, JAX is missing, or the factory returns something else.
    """
    made = _call_factory(name, option, "jax", folder, micro_batches)
    if not (_is_step(made) and callable(made[0]) and all(map(_are_names, made[2:]))):
        rule = "must return (function, arguments) or (function, arguments, donated)"
        nearest = "arguments are a tuple of trees of jax.ShapeDtypeStruct"
        raise ConfigError(rule, key=option, value=name, nearest=nearest)
    return made[0], tuple(made[1]), tuple(made[2]) if len(made) == 3 else ()


def graph_of_torch_factory(name: str, *, option: str = "--torch") -> Graph:
    """Return the graph of the training step of the torch module that `module:factory` returns.

    Raises:
        ConfigError: The factory does not exist, torch is missing, the factory returns something else, or its step
            cannot be traced.
    """
    with users_code(name, option=option):
        program = torch_step_of_factory(name, option=option).trace()
    from costmodels.sharding.frontends.torch.graph import graph_of  # noqa: PLC0415 # torch may be missing

    return graph_of(program)


def torch_step_of_factory(
    name: str, *, option: str = "--torch", folder: str | None = None, micro_batches: int = 1
) -> TorchStep:
    """Return the torch step that `module:factory` returns. Its module is imported, which runs the module's code.

    Args:
        name: Factory as `module:factory`.
        option: Name of the option or key in messages.
        folder: Folder in which the module is looked for first, before the working directory.
        micro_batches: Number of micro-batches of the step, for factories that take it; the inputs are those of one.

    Raises:
        ConfigError: The factory does not exist, torch is missing, or the factory returns something else.
    """
    made = _call_factory(name, option, "torch", folder, micro_batches)
    from costmodels.sharding.frontends.torch.steps import TorchStep, is_module  # noqa: PLC0415 # torch may be missing

    if not (_is_step(made, most=4) and is_module(made[0]) and all(each is None or callable(each) for each in made[2:])):
        rule = "must return (module, inputs) or (module, inputs, loss), or an optimizer as the fourth"
        nearest = (
            "inputs are a tuple of trees of tensors, loss(module, *inputs) is a scalar, and optimizer(parameters) is "
            "one of torch.optim"
        )
        raise ConfigError(rule, key=option, value=name, nearest=nearest)
    module, inputs, loss, optimizer = (*made, None, None)[:4]
    return TorchStep(factory=name, option=option, module=module, inputs=tuple(inputs), loss=loss, optimizer=optimizer)


def _is_step(made: Any, *, most: int = 3) -> bool:
    """Return whether a value looks like (callable, arguments), with or without further items."""
    return isinstance(made, tuple) and 2 <= len(made) <= most and isinstance(made[1], (tuple, list))


def _are_names(donated: Any) -> bool:
    """Return whether a value is the names or numbers of arguments."""
    return isinstance(donated, (tuple, list)) and all(isinstance(each, (str, int)) for each in donated)


def takes_micro_batches(name: str, library: Library, *, option: str, folder: str | None = None) -> bool:
    """Return whether the factory `module:factory` takes the argument `micro_batches`; its module is imported.

    Raises:
        ConfigError: The factory does not exist, or the library is missing.
    """
    with users_code(name, option=option, folder=folder):
        return MICRO_BATCHES in inspect.signature(_load_factory(name, option, library, folder)).parameters


def _call_factory(name: str, option: str, library: Library, folder: str | None, micro_batches: int) -> Any:
    """Return the factory's result, after a check that its library is installed."""
    with users_code(name, option=option, folder=folder):
        factory = _load_factory(name, option, library, folder)
        takes = MICRO_BATCHES in inspect.signature(factory).parameters
        assert takes or micro_batches == 1, f"{name} takes no number of micro-batches"
        return factory(**{MICRO_BATCHES: micro_batches}) if takes else factory()


def _load_factory(name: str, option: str, library: Library, folder: str | None) -> Callable[..., Any]:
    """Return the factory, after a check that its library is installed."""
    module_name, colon, factory_name = name.partition(":")
    if not (module_name and colon and factory_name):
        raise ConfigError("must be module:factory", key=option, value=name, nearest=EXAMPLE)
    # Without this check, the library's absence would look like an import error of the user's module.
    check_installed(library, option=option, value=name)
    for place in (str(Path.cwd()), folder):
        if place is not None and place not in sys.path:
            sys.path.insert(0, place)
    factory = _find_factory(module_name, factory_name, name, option)
    if not callable(factory):
        raise ConfigError("is not a function", key=option, value=name, nearest=EXAMPLE)
    found: Callable[..., Any] = factory
    return found


def check_installed(library: Library, *, option: str, value: str) -> None:
    """Check that a library that reads programs is installed.

    Raises:
        ConfigError: It is not.
    """
    if importlib.util.find_spec(library) is None:
        nearest = f"pip install 'meshtune[{library}]'"
        rule = f"needs {TITLES[library]}, which is not installed here"
        raise ConfigError(rule, key=option, value=value, nearest=nearest)


def _find_factory(module_name: str, factory_name: str, name: str, option: str) -> Any:
    """Return the attribute of that name in the module."""
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
        nearest = did_you_mean(factory_name, able)
        raise ConfigError(f"is not defined in {module_name}", key=option, value=name, nearest=nearest)
    return getattr(module, factory_name)
