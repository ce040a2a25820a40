"""Trace of a user's own step, in the library that it is written in, with mistakes in the user's code as one message."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hardware.io.errors import ConfigError
from trials.own_step import OwnStep

if TYPE_CHECKING:  # most studies do without
    from costmodels.sharding.graph import Graph


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traced:
    """Traced step.

    Attributes:
        program: Trace, a `Program` of the frontend of the step's library.
        graph: Graph of the step.
    """

    program: Any
    graph: Graph


@cache
def takes_micro_batches(step: OwnStep) -> bool:
    """Return whether the factory of a step takes a number of micro-batches.

    Raises:
        ConfigError: The factory cannot be imported.
    """
    from costmodels.sharding.frontends import factories  # noqa: PLC0415 # most studies do without

    try:
        return factories.takes_micro_batches(step.factory, step.world, option=step.key, folder=step.folder)
    except ConfigError:
        raise
    except Exception as error:  # the user's own code may raise anything, and it is told as it is
        raise _failure(step, error) from error


@cache
def traced(step: OwnStep) -> Traced:
    """Return the trace of a user's step; nothing is computed.

    Raises:
        ConfigError: The factory or its step fails, or the factory returns something else than it must.
    """
    try:
        return _jax(step) if step.world == "jax" else _torch(step)
    except ConfigError as error:
        told = error if (error.key or "").startswith("model.") else error.under(step.key)
        where = "" if error.__cause__ is None else _place(error.__cause__)
        raise ConfigError(told.rule + where, key=told.key, value=told.value, nearest=told.nearest) from None
    except Exception as error:  # the user's own code may raise anything, and it is told as it is
        raise _failure(step, error) from error


def _failure(step: OwnStep, error: Exception) -> ConfigError:
    """Return the failure of a user's own code as a mistake in the study."""
    module = step.factory.partition(":")[0]
    return ConfigError(
        f"fails: {_in_words(error)}",
        key=step.key,
        value=step.factory,
        nearest=f"`python -c 'from {module} import *'` in {step.folder} shows whether it imports",
    )


def _jax(step: OwnStep) -> Traced:
    from costmodels.sharding.frontends.factories import step_of_factory  # noqa: PLC0415 # JAX may be missing

    function, arguments, donated = step_of_factory(
        step.factory, option=step.key, folder=step.folder, micro_batches=step.micro_batches
    )
    from costmodels.sharding.frontends.jax.graph import graph_of  # noqa: PLC0415 # JAX may be missing
    from costmodels.sharding.frontends.jax.program import trace_function  # noqa: PLC0415 # JAX may be missing

    program = trace_function(function, *arguments, donated=donated)
    return Traced(program=program, graph=graph_of(program))


def _torch(step: OwnStep) -> Traced:
    from costmodels.sharding.frontends.factories import torch_step_of_factory  # noqa: PLC0415 # torch may be missing

    program = torch_step_of_factory(
        step.factory, option=step.key, folder=step.folder, micro_batches=step.micro_batches
    ).trace()
    from costmodels.sharding.frontends.torch.graph import graph_of  # noqa: PLC0415 # torch may be missing

    return Traced(program=program, graph=graph_of(program, micro_batches=step.micro_batches))


def _in_words(error: Exception) -> str:
    """Return the first line of an error with the place in the user's code that raised it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}{_place(error)}"


def _place(error: BaseException) -> str:
    """Return the last line of the user's code in the traceback of an error, in words; empty if there is none."""
    last = traceback.extract_tb(error.__traceback__)
    outside = [
        frame for frame in last if "site-packages" not in frame.filename and "/costmodels/" not in frame.filename
    ]
    return f" (line {outside[-1].lineno} of {outside[-1].filename})" if outside else ""
