"""Training step of a torch module as a factory returns it: module, inputs, and perhaps a loss and an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from costmodels.sharding.frontends.torch.program import Loss, Program, trace_module
from hardware.io.errors import ConfigError


def is_module(thing: object) -> bool:
    """Return whether an object is a torch module."""
    return isinstance(thing, torch.nn.Module)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TorchStep:
    """Training step of a module.

    Attributes:
        factory: Factory that returned it, as `module:factory`.
        option: Name of the option or key that named the factory.
        module: Module on any device, also `meta`.
        inputs: Trees of tensors on any device, also `meta`.
        loss: Function called as `loss(module, *inputs)`; None if the module's result is the loss.
        optimizer: Function that makes an optimizer of the parameters; None if the factory returned none.
    """

    factory: str
    option: str
    module: torch.nn.Module
    inputs: tuple[Any, ...]
    loss: Loss | None = None
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None

    def trace(self) -> Program:
        """Return the trace of the step; nothing is allocated or computed.

        Raises:
            ConfigError: The step cannot be traced.
        """
        log = logging.getLogger("torch._subclasses.fake_tensor")
        level = log.level
        log.setLevel(logging.CRITICAL)  # its traceback would repeat the message below
        try:
            return trace_module(self.module, self.inputs, self.loss)
        except RuntimeError as error:  # torch raises it for wrong shapes and for values that are unknown while tracing
            reason = " ".join(str(error).splitlines()[0].split())
            nearest = "a module that runs on the device meta"
            rule = f"can't be traced: {reason}"
            raise ConfigError(rule, key=self.option, value=self.factory, nearest=nearest) from error
        finally:
            log.setLevel(level)
