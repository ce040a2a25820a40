"""Training step under construction: operators, the tape of their gradients, and the optimizer's update.

Patterns of factor names describe the operators. Every function that adds a forward operator also records how its
gradient is computed. `backward` runs these records in reverse. Gradients of a tensor with several readers are added up
by one operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache

from costmodels.optimizers.contract import MOMENT_BYTES
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.sharding.dims import Place, Rule, rule_of
from costmodels.sharding.graph import INPUT, STATE, Graph, GraphBuilder, Tensor, TensorKind
from hardware.io.errors import ConfigError, did_you_mean

MASTER = "master"
"""Name of the float32 copy of a narrower parameter, which an optimizer updates in its place."""

INDEX_BYTES = 4
"""Size of a token's index into the vocabulary (int32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Description of one result of an operator.

    Attributes:
        label: Suffix of the tensor's name; empty if the tensor has the operator's name.
        kind: Purpose of the tensor.
        element_bytes: Size of one element [bytes]; None for that of the step's activations.
    """

    label: str = ""
    kind: TensorKind = TensorKind.ACTIVATION
    element_bytes: float | None = None


PLAIN = (Result(),)


@dataclass(kw_only=True)
class TrainingStep:
    """Training step of one micro-batch under construction; tensors are identified by their numbers.

    Attributes:
        name: Name of the graph.
        sizes: Size of each factor by its name.
        dim_names: Name of a dim by the names of its factors, where both differ.
        element_bytes: Size of one element of a parameter, an activation or a gradient [bytes].
        has_masters: Whether the optimizer works in float32: on float32 gradients of the parameters, and on a float32
            copy of each parameter, beside its moments.
    """

    name: str
    sizes: Mapping[str, int]
    dim_names: Mapping[str, str]
    element_bytes: float
    has_masters: bool = False
    _builder: GraphBuilder = field(init=False)
    _parameters: list[int] = field(default_factory=list)
    _tape: list[Callable[[], None]] = field(default_factory=list)
    _gradients: dict[int, list[int]] = field(default_factory=dict)
    _rules: dict[tuple[object, ...], Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._builder = GraphBuilder(name=self.name)

    def sized(self, sizes: Mapping[str, int]) -> TrainingStep:
        """Return the same step, in which patterns know further sizes, or other ones."""
        other = copy(self)
        other.sizes = {**self.sizes, **sizes}
        return other

    def parameter(self, name: str, pattern: str) -> int:
        """Add a trained parameter, with the dims of a pattern, and return its number."""
        shape, names = self._dims_of(pattern)
        tensor = self._builder.source(STATE, name, shape, self.element_bytes, TensorKind.PARAMETER, names)
        self._parameters.append(tensor)
        return tensor

    def token_numbers(self, name: str, pattern: str) -> int:
        """Add data of the step that holds indices into the vocabulary, and return its number."""
        shape, names = self._dims_of(pattern)
        return self._builder.source(INPUT, name, shape, INDEX_BYTES, TensorKind.DATA, names)

    def op(
        self,
        name: str,
        primitive: str,
        pattern: str,
        operands: Sequence[int],
        *,
        results: Sequence[Result] = PLAIN,
        blocked: Sequence[str] = (),
        flop: float = 0.0,
        precision: str = "",
    ) -> tuple[int, ...]:
        """Add an operator whose rule is a pattern over the step's sizes, and return its results."""
        return self._add(name, primitive, self._rule(pattern, tuple(blocked)), operands, results, flop, precision)

    def along(
        self,
        name: str,
        primitive: str,
        operands: Sequence[int],
        like: Sequence[int],
        *,
        results: Sequence[Result] = PLAIN,
        blocked: Sequence[str] = (),
    ) -> tuple[int, ...]:
        """Add an operator whose rule has one factor per dim name, and return its results.

        Dims of the same name are one factor in all tensors of the operator.

        Args:
            name: Name of the operator.
            primitive: Name of the computation.
            operands: Numbers of the tensors that it reads.
            like: Existing tensor with the same dims, for each result.
            results: Names and purposes of the results.
            blocked: Names of dims that the operator needs whole.
        """
        arrays = [self.tensor(number) for number in (*operands, *like)]
        key = (len(operands), *((array.dim_names, array.shape) for array in arrays), *blocked)
        if key not in self._rules:
            # Write a pattern from the dims' names, with one factor per name.
            words = [" ".join(array.dim_names) for array in arrays]
            pattern = f"{', '.join(words[: len(operands)])} -> {', '.join(words[len(operands) :])}"
            sizes = {name: size for array in arrays for name, size in zip(array.dim_names, array.shape, strict=True)}
            self._rules[key] = rule_of(pattern, sizes, blocked=blocked)
        return self._add(name, primitive, self._rules[key], operands, results, 0.0, "")

    def tensor(self, number: int) -> Tensor:
        """Return a tensor by its number."""
        return self._builder.tensors[number]

    def on_backward(self, gradient_of: Callable[[], None]) -> None:
        """Record the work of the backward pass for the operator that was added last."""
        self._tape.append(gradient_of)

    def on_backward_of(
        self,
        made: int,
        add: Callable[[list[int]], tuple[int, ...]],
        operands: Sequence[int | None],
        tensors: Sequence[int],
    ) -> None:
        """Record one operator of the backward pass that computes the gradients of the tensors that an operator reads.

        Args:
            made: Tensor that the forward operator writes.
            add: Function that adds the operator of the backward pass on its operands, and returns its results.
            operands: Operands of that operator; None stands for the gradient of `made`.
            tensors: Tensors whose gradients are its results, in their order.
        """

        def gradients() -> None:
            found = add([self.gradient(made) if operand is None else operand for operand in operands])
            for tensor, gradient in zip(tensors, found, strict=True):
                self.give(tensor, gradient)

        self.on_backward(gradients)

    def give(self, tensor: int, gradient: int) -> None:
        """Add one contribution to the gradient of a tensor."""
        self._gradients.setdefault(tensor, []).append(gradient)

    def gradient(self, tensor: int) -> int:
        """Return the whole gradient of a tensor, after all of its readers have given their contributions."""
        parts = self._gradients[tensor]
        if len(parts) > 1:
            kind = self.tensor(parts[0]).kind
            name = f"{self.tensor(tensor).name}.gradient_sum"
            # Replace the contributions by their sum, so that a second call adds nothing.
            parts[:] = self.along(name, "add", parts, parts[:1], results=(Result(kind=kind),))
        return parts[0]

    def backward(self) -> None:
        """Add the backward pass of all operators so far."""
        self._builder.begin_backward()
        # Reverse order: every reader of a tensor has given its gradient before its writer asks for it.
        for gradient_of in reversed(self._tape):
            gradient_of()
        self._tape.clear()

    def update(self, optimizer: str) -> None:
        """Add the optimizer's update of every parameter.

        Raises:
            ConfigError: The optimizer is unknown.
        """
        if optimizer not in OPTIMIZERS:
            raise ConfigError(
                "is not known", key="optimizer", value=optimizer, nearest=did_you_mean(optimizer, OPTIMIZERS)
            )
        labels = (*OPTIMIZERS[optimizer].moments, *((MASTER,) if self.has_masters else ()))
        for number in self._parameters:
            array = self.tensor(number)
            moments = [
                self._builder.source(
                    STATE, f"{array.name}.{label}", array.shape, MOMENT_BYTES, TensorKind.OPTIMIZER, array.dim_names
                )
                for label in labels
            ]
            states = [number, *moments]
            results = (
                Result(kind=TensorKind.PARAMETER),
                *(Result(label=label, kind=TensorKind.OPTIMIZER, element_bytes=MOMENT_BYTES) for label in labels),
            )
            # One fused operator per parameter reads the parameter, its gradient, its moments and its copy.
            operands = [number, self.gradient(number), *moments]
            made = self.along(f"{array.name}.update", optimizer, operands, states, results=results)
            for state, after in zip(states, made, strict=True):
                self._builder.keep(state, after)

    def done(self) -> Graph:
        """Return the finished graph."""
        return self._builder.done()

    def _add(
        self,
        name: str,
        primitive: str,
        rule: Rule,
        operands: Sequence[int],
        results: Sequence[Result],
        flop: float,
        precision: str,
    ) -> tuple[int, ...]:
        """Add an operator and its results, whose shapes follow from the rule."""
        tensors = tuple(
            self._builder.tensor(
                f"{name}.{result.label}" if result.label else name,
                rule.result_shape(slot),
                self._element_bytes(result),
                result.kind,
                self._names(rule, rule.results[slot]),
            )
            for slot, result in enumerate(results)
        )
        self._builder.op(name, primitive, operands, tensors, rule, flop=flop, precision=precision)
        return tensors

    def _element_bytes(self, result: Result) -> float:
        if result.element_bytes is not None:
            return result.element_bytes
        return MOMENT_BYTES if self.has_masters and result.kind is TensorKind.GRADIENT else self.element_bytes

    def _dims_of(self, pattern: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        rule = self._rule(f"-> {pattern}")
        return rule.result_shape(0), self._names(rule, rule.results[0])

    def _rule(self, pattern: str, blocked: tuple[str, ...] = ()) -> Rule:
        """Return the rule of a pattern, which is one object for all blocks whose factors have the same sizes."""
        key = (pattern, blocked, *(self.sizes[name] for name in _factors_of(pattern)))
        if key not in self._rules:
            self._rules[key] = rule_of(pattern, self.sizes, blocked=blocked)
        return self._rules[key]

    def _names(self, rule: Rule, place: Place) -> tuple[str, ...]:
        words = tuple(" ".join(rule.factors[factor].name for factor in dim) for dim in place)
        names = tuple(self.dim_names.get(word, word) for word in words)
        # dims of one tensor that would have the same name keep those of their factors
        return names if len(set(names)) == len(names) else words


@cache
def _factors_of(pattern: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.findall(r"[a-z_]+", pattern)))
