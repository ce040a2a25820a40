"""Trace of a user's own step, in the library that it is written in, with mistakes in the user's code as one message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from costmodels.sharding.frontends.users_code import users_code
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

    return factories.takes_micro_batches(step.factory, step.world, option=step.key, folder=step.folder)


@cache
def traced(step: OwnStep) -> Traced:
    """Return the trace of a user's step; nothing is computed.

    Raises:
        ConfigError: The factory or its step fails, or the factory returns something else than it must.
    """
    try:
        with users_code(step.factory, option=step.key, folder=step.folder):
            return _jax(step) if step.world == "jax" else _torch(step)
    except ConfigError as error:
        told = error if (error.key or "").startswith("model.") else error.under(step.key)
        raise ConfigError(told.rule, key=told.key, value=told.value, nearest=told.nearest) from None


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
