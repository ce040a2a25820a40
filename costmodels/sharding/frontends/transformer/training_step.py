"""A training step under construction: operators by pattern, the tape of their gradients, and the optimizer's update.

Whoever adds an operator of the forward pass records with it how the gradient passes through; `backward` runs these
records in reverse. Gradients of a tensor that several operators read are added up in one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from costmodels.sharding.dims import Place, Rule, rule_of
from costmodels.sharding.graph import INPUT, STATE, Graph, GraphBuilder, Tensor, TensorKind
from hardware.io.errors import ConfigError, did_you_mean

STATE_BYTES = 4
"""Of an element of a moment: optimizers keep float32, whatever the parameters are."""

MOMENTS: Mapping[str, tuple[str, ...]] = {"adam": ("first_moment", "second_moment"), "sgd": ("momentum",)}
"""What an optimizer keeps for each parameter."""

INDEX_BYTES = 4
"""Of a token's number, a row of the vocabulary (int32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What an operator writes.

    Attributes:
        label: Appended to the operator's name; empty where the tensor is called as the operator is.
        kind: What the tensor is for.
        element_bytes: Of one element; None is what the step's activations have.
    """

    label: str = ""
    kind: TensorKind = TensorKind.ACTIVATION
    element_bytes: float | None = None


PLAIN = (Result(),)


@dataclass(kw_only=True)
class TrainingStep:
    """One training step of one micro-batch under construction; tensors are named by their numbers.

    Attributes:
        name: Of the graph.
        sizes: Of every factor by its name.
        dim_names: What a dim is called whose factors are these, where it isn't the one factor's name.
        element_bytes: Of a parameter, an activation or a gradient.
    """

    name: str
    sizes: Mapping[str, int]
    dim_names: Mapping[str, str]
    element_bytes: float
    _builder: GraphBuilder = field(init=False)
    _parameters: list[int] = field(default_factory=list)
    _tape: list[Callable[[], None]] = field(default_factory=list)
    _gradients: dict[int, list[int]] = field(default_factory=dict)
    _rules: dict[tuple[object, ...], Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._builder = GraphBuilder(name=self.name)

    def parameter(self, name: str, pattern: str) -> int:
        """A tensor that the optimizer trains, with the dims of a pattern of one tensor."""
        shape, names = self._dims_of(pattern)
        tensor = self._builder.source(STATE, name, shape, self.element_bytes, TensorKind.PARAMETER, names)
        self._parameters.append(tensor)
        return tensor

    def token_numbers(self, name: str, pattern: str) -> int:
        """Data of the step: rows of the vocabulary."""
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
        """Adds an operator whose rule is a pattern over the step's sizes; returns its results."""
        key = (pattern, *blocked)
        if key not in self._rules:
            self._rules[key] = rule_of(pattern, self.sizes, blocked=blocked)
        return self._add(name, primitive, self._rules[key], operands, results, flop, precision)

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
        """Adds an operator whose every dim is a factor, the same where it is called the same; returns its results.

        Args:
            name: Of the operator.
            primitive: What it computes.
            operands: What it reads.
            like: Of each result a tensor with its dims.
            results: What they are called and for.
            blocked: Dims that it needs whole.
        """
        arrays = [self.tensor(number) for number in (*operands, *like)]
        key = (len(operands), *((array.dim_names, array.shape) for array in arrays), *blocked)
        if key not in self._rules:
            words = [" ".join(array.dim_names) for array in arrays]
            pattern = f"{', '.join(words[: len(operands)])} -> {', '.join(words[len(operands) :])}"
            sizes = {name: size for array in arrays for name, size in zip(array.dim_names, array.shape, strict=True)}
            self._rules[key] = rule_of(pattern, sizes, blocked=blocked)
        return self._add(name, primitive, self._rules[key], operands, results, 0.0, "")

    def tensor(self, number: int) -> Tensor:
        """A tensor by its number."""
        return self._builder.tensors[number]

    def on_backward(self, gradient_of: Callable[[], None]) -> None:
        """Records what the backward pass does for the operator that was added last."""
        self._tape.append(gradient_of)

    def give(self, tensor: int, gradient: int) -> None:
        """Adds a gradient to those of a tensor."""
        self._gradients.setdefault(tensor, []).append(gradient)

    def gradient(self, tensor: int) -> int:
        """The whole gradient of a tensor; all who read it must have given theirs."""
        parts = self._gradients[tensor]
        if len(parts) > 1:
            kind = self.tensor(parts[0]).kind
            name = f"{self.tensor(tensor).name}.gradient_sum"
            parts[:] = self.along(name, "add", parts, parts[:1], results=(Result(kind=kind),))
        return parts[0]

    def backward(self) -> None:
        """Writes down the backward pass of all operators so far."""
        self._builder.begin_backward()
        for gradient_of in reversed(self._tape):
            gradient_of()
        self._tape.clear()

    def update(self, optimizer: str) -> None:
        """Writes down what the optimizer makes of every parameter.

        Raises:
            ConfigError: no such optimizer is known.
        """
        if optimizer not in MOMENTS:
            raise ConfigError(
                "is not known", key="optimizer", value=optimizer, nearest=did_you_mean(optimizer, MOMENTS)
            )
        for number in self._parameters:
            array = self.tensor(number)
            moments = [
                self._builder.source(
                    STATE, f"{array.name}.{moment}", array.shape, STATE_BYTES, TensorKind.OPTIMIZER, array.dim_names
                )
                for moment in MOMENTS[optimizer]
            ]
            states = [number, *moments]
            results = (
                Result(kind=TensorKind.PARAMETER),
                *(
                    Result(label=moment, kind=TensorKind.OPTIMIZER, element_bytes=STATE_BYTES)
                    for moment in MOMENTS[optimizer]
                ),
            )
            operands = [number, self.gradient(number), *moments]
            made = self.along(f"{array.name}.update", optimizer, operands, states, results=results)
            for state, after in zip(states, made, strict=True):
                self._builder.keep(state, after)

    def done(self) -> Graph:
        """The graph."""
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
        tensors = tuple(
            self._builder.tensor(
                f"{name}.{result.label}" if result.label else name,
                rule.result_shape(slot),
                self.element_bytes if result.element_bytes is None else result.element_bytes,
                result.kind,
                self._names(rule, rule.results[slot]),
            )
            for slot, result in enumerate(results)
        )
        self._builder.op(name, primitive, operands, tensors, rule, flop=flop, precision=precision)
        return tensors

    def _dims_of(self, pattern: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        key = (f"-> {pattern}",)
        if key not in self._rules:
            self._rules[key] = rule_of(*key, self.sizes)
        rule = self._rules[key]
        return rule.result_shape(0), self._names(rule, rule.results[0])

    def _names(self, rule: Rule, place: Place) -> tuple[str, ...]:
        words = [" ".join(rule.factors[factor].name for factor in dim) for dim in place]
        return tuple(self.dim_names.get(word, word) for word in words)
