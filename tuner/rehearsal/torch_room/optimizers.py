"""Steps of any program that calls an optimizer of PyTorch: from the end of one round of optimizers to the next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tuner.rehearsal.torch_room.progress import Progress
from tuner.rehearsal.torch_room.storages import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS


class Rounds:
    """Rounds of steps of a program's optimizers, one round for each step of the training.

    A program may have several optimizers, or step one for several groups of parameters. How often each steps in a round
    is learned in the first, which a backward pass ends.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._first: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._is_known = False
        self._parameters: dict[int, list[torch.Tensor]] = {}

    def follow(self) -> None:
        """Follow all optimizers that the program makes."""
        add: Any = Optimizer.add_param_group

        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            add(optimizer, group)
            self._built(optimizer)

        setattr(Optimizer, "add_param_group", add_param_group)  # noqa: B010 - mypy knows the method
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._before(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self._after(optimizer))
        graph: Any = torch.autograd.graph
        run = graph._engine_run_backward

        def run_backward(*given: Any, **named: Any) -> Any:
            self._is_known = self._is_known or bool(self._first)
            return run(*given, **named)

        torch.autograd._engine_run_backward = graph._engine_run_backward = run_backward  # type: ignore[attr-defined]

    def _built(self, optimizer: Optimizer) -> None:
        """Take the parameters of an optimizer, which a program may exchange for their parts before the first step."""
        progress = self._progress
        now = [one for group in optimizer.param_groups for one in group["params"]]
        if progress.has_own_loop or list(map(id, self._parameters.get(id(optimizer), ()))) == list(map(id, now)):
            return
        self._parameters[id(optimizer)] = now
        progress.watch.storages.assign([_held(one).detach() for one in now], WEIGHTS)
        held = {id(one): _held(one).numel() for each in self._parameters.values() for one in each}
        progress.built(sum(held.values()))
        progress.watch.storages.purpose = ACTIVATIONS

    def _before(self, optimizer: Optimizer) -> None:
        if self._progress.has_own_loop:
            return
        self._built(optimizer)
        for group in optimizer.param_groups:
            gradients = [one.grad for one in group["params"] if one.grad is not None]
            self._progress.watch.storages.assign(gradients, GRADIENTS)

    def _after(self, optimizer: Optimizer) -> None:
        progress = self._progress
        if progress.has_own_loop:
            return
        progress.watch.storages.assign([list(state.values()) for state in optimizer.state.values()], OPTIMIZER)
        if not self._is_known:
            if self._first:
                progress.begin_step()
            else:
                progress.end_step()
                progress.begin_step()
            self._first[id(optimizer)] += 1
            return
        self._now[id(optimizer)] += 1
        if self._now == self._first:
            self._now.clear()
            progress.end_step()
            progress.begin_step()


def _held(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds."""
    local: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return local
