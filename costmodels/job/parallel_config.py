"""One parallelism configuration, many of them as arrays, and the table of their further dimensions.

The eight degrees are always in the order of DEGREES. A study may open further dimensions, those of DIMENSIONS and the
assignment of uneven work. All of them together identify a configuration: two candidates may differ in their ZeRO stage
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.job.uneven_work import ASSIGNMENT_FIELDS, EVEN, Assignment, parse_assignment, parse_numbers
from hardware.arrays import IntArray
from hardware.io.errors import ConfigError, did_you_mean

DEGREES = ("pp", "tp", "dp", "cp", "up", "vpp", "ep", "mbs")
RECOMPUTE_MODES = ("none", "selective", "full")
OFFLOAD_MODES = ("none", "optimizer")
ZERO_STAGES = (0, 1, 2, 3)
HAND = "hand"
"""Plan that frameworks write by hand."""
PLANS = (HAND, "recursive", "descent", "toast")
"""Sharding plans of layers: that by hand, and those of the planners in tuner/planners/."""

MAX_DEGREE = 999_999_999
"""Largest degree, far above what any cluster has; products of two still fit an array's integers."""

Value = int | str | bool
KnobValue = int | float | str | bool | None
"""Value of a knob; None stands for a flag, variable or key that is absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """One further dimension of a configuration: the values that it can have, and their codes in integer arrays.

    Attributes:
        name: Name of the dimension in files, options and messages.
        choices: Possible values, whose positions are their codes; empty for any whole number from 0 on.
    """

    name: str
    choices: tuple[Value, ...] = ()

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers and not names."""
        return not self.choices or type(self.choices[0]) is int

    @property
    def is_switch(self) -> bool:
        """Whether the values are False and True."""
        # (0, 1) == (False, True) in Python, so the type decides
        return self.choices == (False, True) and isinstance(self.choices[0], bool)

    def check(self, value: object) -> None:
        """Refuse a value that is not of this dimension.

        Raises:
            ConfigError: the type or the value is wrong; it names the valid ones.
        """
        if not self.choices:
            _check_whole(self.name, value, least=0)
        elif type(value) is not type(self.choices[0]) or value not in self.choices:
            *others, last = map(self.show, range(len(self.choices)))
            nearest = did_you_mean(value, [*others, last]) if isinstance(value, str) and not self.is_switch else None
            raise ConfigError(f"must be {', '.join(others)} or {last}", key=self.name, value=value, nearest=nearest)

    def code_of(self, value: Value) -> int:
        """Return the integer that stands for a value in arrays."""
        return self.choices.index(value) if self.choices else int(value)

    def value_of(self, code: int) -> Value:
        """Return the value that an integer of an array stands for."""
        return self.choices[int(code)] if self.choices else int(code)

    def show(self, code: int) -> str:
        """Print the value of a code the way study files spell it."""
        value = self.value_of(code)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def parse(self, text: str, option: str) -> Value:
        """Read a value of a command line's option.

        Raises:
            ConfigError: the text has another type; `ParallelConfig` checks its value.
        """
        if self.is_number:
            return _parse_whole(self.name, text, option)
        if not self.is_switch:
            return text
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ConfigError("must be true or false", key=f"{option} {self.name}", value=text)
        return words[text.lower()]


DIMENSIONS = {
    dimension.name: dimension
    for dimension in (
        Dimension(name="recompute", choices=RECOMPUTE_MODES),
        Dimension(name="offload", choices=OFFLOAD_MODES),
        Dimension(name="zero_stage", choices=ZERO_STAGES),
        Dimension(name="sequence_parallel", choices=(False, True)),
        Dimension(name="expert_tp"),
        Dimension(name="dp_shard"),
        Dimension(name="recompute_layers"),
        Dimension(name="plan", choices=PLANS),
    )
}
"""Table of the further dimensions; tuner/space/dimensions.py says how studies search them."""
ENUMERATED_DIMENSIONS = tuple(name for name in DIMENSIONS if name != "plan")
"""Further dimensions whose values are combined with those of all others."""
PLANNED_DIMENSIONS = ("plan", "assignment")
"""Further dimensions whose values are found for combinations of the others; 0 is the code of what is usual."""
FURTHER_DIMENSIONS = (*ENUMERATED_DIMENSIONS, *PLANNED_DIMENSIONS)
"""All further dimensions."""


def _check_whole(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or not least <= value <= MAX_DEGREE:
        rule = f"at least {least}" if type(value) is not int or value < least else f"at most {MAX_DEGREE}"
        raise ConfigError(f"must be a whole number of {rule}", key=name, value=value)


def _parse_whole(name: str, text: str, option: str) -> int:
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 9:
        raise ConfigError("must be a whole number", key=f"{option} {name}", value=text)
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherValues:
    """Values of the further dimensions of DIMENSIONS, for a configuration or as a job fixes them.

    Attributes:
        recompute: Activations that the backward pass computes again: none, selective (the attention core) or full.
        offload: Training states that are kept and updated on the host: none, or those of the optimizer with its copy of
            the weights.
        zero_stage: ZeRO stage: 0 replicates the training states, 1 shards optimizer states, 2 gradients too, 3 weights
            too.
        sequence_parallel: Whether norms and residuals are split along the sequence over tp.
        expert_tp: Tensor parallel degree of the experts; 0 is that of the rest, tp.
        dp_shard: Data parallel ranks over which ZeRO shards; the others hold copies (HSDP). 0 is all of dp.
        recompute_layers: Layers of each virtual stage, its first ones, that the backward pass runs again in full; the
            others follow `recompute`.
        plan: Sharding plan of the layers, by the name of its planner; `hand` is that of frameworks.
    """

    recompute: str = "none"
    offload: str = "none"
    zero_stage: int = 1
    sequence_parallel: bool | None = None
    expert_tp: int = 0
    dp_shard: int = 0
    recompute_layers: int = 0
    plan: str = HAND


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(FurtherValues):
    """One configuration: the eight degrees, and the further dimensions that a study may open.

    Attributes:
        pp: Number of pipeline stages.
        tp: Tensor parallel degree.
        dp: Data parallel degree; `pp*tp*dp*cp*up` is the number of devices.
        cp: Context parallel degree (ring attention).
        up: Ulysses degree (all-to-all over the heads).
        vpp: Model chunks per pipeline stage (interleaved schedule); 1 is plain 1F1B.
        ep: Expert parallel degree, carved out of the data parallel ranks.
        mbs: Micro-batch size in sequences per data parallel rank.
        sequence_parallel: As in FurtherValues, never None.
        assignment: Uneven layers, micro-batches and hosts; a text is parsed.
        knobs: Names and values of knobs, settings beside the layout that no cost model knows; see trials/knobs/.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    up: int = 1
    vpp: int = 1
    ep: int = 1
    mbs: int = 1
    sequence_parallel: bool = True
    assignment: Assignment = EVEN
    knobs: tuple[tuple[str, KnobValue], ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no study could mean."""
        for name in DEGREES:
            _check_whole(name, getattr(self, name), least=1)
        if self.num_devices > MAX_DEGREE:
            rule = f"makes {self.num_devices} devices; at most {MAX_DEGREE} are supported"
            raise ConfigError(rule, key="pp*tp*dp*cp*up")
        for dimension in DIMENSIONS.values():
            dimension.check(getattr(self, dimension.name))
        if isinstance(self.assignment, str):  # storages and files hold it as text
            object.__setattr__(self, "assignment", parse_assignment(self.assignment))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Number of the first layers of each virtual stage that run again in full [pp * vpp], however many it has."""
        return self.assignment.recomputed or (self.recompute_layers,) * (self.pp * self.vpp)

    @property
    def num_devices(self) -> int:
        """Number of devices that the configuration occupies."""
        return self.pp * self.tp * self.dp * self.cp * self.up

    def values(self, dimensions: Iterable[str] = DEGREES) -> dict[str, Value]:
        """Return the values of the named dimensions and knobs, in their order; an assignment as text.

        Knobs of which the configuration has no value are left out.
        """
        knobs = dict(self.knobs)
        found: dict[str, Value] = {}
        for name in dimensions:
            if name in knobs:
                found[name] = knobs[name]  # type: ignore[assignment] # a knob's value may be a float or None too
            elif name in _VALUES:
                found[name] = str(self.assignment) if name == "assignment" else getattr(self, name)
        return found

    def __str__(self) -> str:
        """Print the form that `--config` takes, degrees of 1 included."""
        degrees = ",".join(f"{name}={getattr(self, name)}" for name in DEGREES)
        return f"{degrees},{self.assignment}" if self.assignment else degrees


_VALUES = frozenset(field.name for field in fields(ParallelConfig)) - {"knobs"}


def parse_config(text: str, defaults: Mapping[str, Value], *, option: str = "--config") -> ParallelConfig:
    """Read a configuration such as `pp=4,tp=2,zero_stage=1`.

    Args:
        text: Entries `name=value`, separated by commas.
        defaults: Values of the dimensions that the text leaves out; a degree is 1 where these leave it out too.
        option: Command-line option that gave the text, for messages.

    Raises:
        ConfigError: an entry is not `name=value`, names no dimension, or its value is out of range; it names `option`.
    """
    values: dict[str, Value] = dict(defaults)
    uneven: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals:
            raise ConfigError("must read name=value", key=option, value=entry, nearest="for example pp=4,tp=2")
        known = DEGREES + tuple(DIMENSIONS) + ASSIGNMENT_FIELDS
        if name not in known:
            nearest = did_you_mean(name, known)
            raise ConfigError("is no dimension of a configuration", key=option, value=name, nearest=nearest)
        if name in seen:
            raise ConfigError("is given twice", key=f"{option} {name}", value=value)
        seen.add(name)
        if name in ASSIGNMENT_FIELDS:
            uneven[name] = parse_numbers(value, f"{option} {name}")
        else:
            values[name] = (
                _parse_whole(name, value, option) if name in DEGREES else DIMENSIONS[name].parse(value, option)
            )
    try:
        if uneven:
            values["assignment"] = str(Assignment(**uneven))
        return ParallelConfig(**values)  # type: ignore[arg-type] # the values' types are checked by ParallelConfig
    except ConfigError as error:
        raise error.under(option) from None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfigGrid:
    """Table of n configurations: one array [n] per dimension.

    The array of a degree or of a further dimension of numbers holds the values; the array of choices holds their codes
    (`Dimension.code_of`), for example positions in RECOMPUTE_MODES. `assignment` holds positions in `assignments`,
    whose first entry is EVEN. `opened` names the further dimensions that a study searches.
    """

    pp: IntArray
    tp: IntArray
    dp: IntArray
    cp: IntArray
    up: IntArray
    vpp: IntArray
    ep: IntArray
    mbs: IntArray
    recompute: IntArray
    offload: IntArray
    zero_stage: IntArray
    sequence_parallel: NDArray[np.bool_]
    expert_tp: IntArray
    dp_shard: IntArray
    recompute_layers: IntArray
    plan: IntArray
    assignment: IntArray
    assignments: tuple[Assignment, ...] = (EVEN,)
    opened: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of configurations."""
        return len(self.pp)

    @property
    def expert_tensor(self) -> IntArray:
        """Tensor parallel degree of the experts [n]."""
        return np.where(self.expert_tp == 0, self.tp, self.expert_tp)

    @property
    def copies(self) -> IntArray:
        """Number of copies of the sharded training states [n]: dp / dp_shard; 1 where nothing is sharded (ZeRO 0)."""
        # dp_shard is 0 where it is not given, so that the division is guarded
        whole = (self.dp_shard == 0) | (self.zero_stage == 0)
        return np.where(whole, 1, self.dp // np.maximum(self.dp_shard, 1))

    @property
    def is_offloaded(self) -> NDArray[np.bool_]:
        """Whether the optimizer's states are on the host [n]."""
        return np.asarray(self.offload == OFFLOAD_MODES.index("optimizer"))

    @property
    def is_planned(self) -> NDArray[np.bool_]:
        """Whether a planner shards the layers, and not a plan by hand [n]."""
        return np.asarray(self.plan != PLANS.index(HAND))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions that identify a candidate: the eight degrees and the opened dimensions."""
        return DEGREES + self.opened

    @property
    def is_even(self) -> bool:
        """Whether all work is even in every configuration."""
        return len(self.assignments) == 1

    @property
    def has_recomputed(self) -> bool:
        """Whether some layers run again in full beside `recompute`, by their number or by an assignment."""
        if self.recompute_layers.any():
            return True
        return any(self.assignments[code].recomputed for code in np.unique(self.assignment).tolist())

    def by_host_order(self) -> list[tuple[tuple[int, ...], IntArray]]:
        """Group the configurations by their order of hosts: each order with the positions [k] that have it."""
        # several assignments may share one order of hosts, which gets one number
        orders: dict[tuple[int, ...], int] = {}
        number = np.array([orders.setdefault(one.hosts, len(orders)) for one in self.assignments])[self.assignment]
        found = [(order, np.flatnonzero(number == at)) for order, at in orders.items()]
        return [(order, at) for order, at in found if len(at)]

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> ConfigGrid:
        """Select the configurations at `index`: positions [k], or a mask [n]."""
        arrays = {name: getattr(self, name)[index] for name in _COLUMNS}
        return ConfigGrid(**arrays, assignments=self.assignments, opened=self.opened)

    def config(self, position: int) -> ParallelConfig:
        """Return the configuration at one position."""
        degrees = {name: int(getattr(self, name)[position]) for name in DEGREES}
        further = {name: one.value_of(getattr(self, name)[position]) for name, one in DIMENSIONS.items()}
        return ParallelConfig(**degrees, **further, assignment=self.assignments[self.assignment[position]])  # type: ignore[arg-type] # ParallelConfig checks types

    def values(self, position: int) -> dict[str, Value]:
        """Return the identifying dimensions of one position with their values."""
        return self.config(position).values(self.dimensions)

    def matrix(self, dimensions: Sequence[str]) -> IntArray:
        """Stack the named dimensions as integer columns [n, len(dimensions)]."""
        return np.stack([getattr(self, name).astype(np.int64) for name in dimensions], axis=1)

    def positions(self) -> dict[tuple[Value, ...], int]:
        """Return the position of each candidate, by the values of `dimensions`."""
        # codes are looked up column by column; a ParallelConfig per row would be far slower
        spellings: dict[str, Sequence[Value]] = {
            name: dimension.choices for name, dimension in DIMENSIONS.items() if dimension.choices
        }
        spellings["assignment"] = [str(assignment) for assignment in self.assignments]
        columns: list[list[Value]] = []
        for name in self.dimensions:
            column = getattr(self, name).tolist()
            columns.append([spellings[name][code] for code in column] if name in spellings else column)
        return {key: position for position, key in enumerate(zip(*columns, strict=True))}

    @classmethod
    def from_codes(
        cls,
        codes: Mapping[str, IntArray],
        *,
        assignments: tuple[Assignment, ...] = (EVEN,),
        opened: tuple[str, ...] = (),
    ) -> ConfigGrid:
        """Build a grid from one integer column [n] per dimension; left-out ones of PLANNED_DIMENSIONS are 0."""
        num_rows = len(next(iter(codes.values())))
        columns: dict[str, Any] = {name: np.zeros(num_rows, dtype=np.int64) for name in PLANNED_DIMENSIONS} | dict(
            codes
        )
        for name, dimension in DIMENSIONS.items():
            if dimension.is_switch:
                columns[name] = columns[name].astype(np.bool_)
        return cls(**columns, assignments=assignments, opened=opened)

    @classmethod
    def from_configs(cls, configs: Sequence[ParallelConfig], opened: tuple[str, ...] = ()) -> ConfigGrid:
        """Build the grid of the given configurations, in their order."""
        numbers = {EVEN: 0}  # EVEN is always the first assignment, also where no configuration has it
        codes = {name: [getattr(config, name) for config in configs] for name in DEGREES}
        codes |= {name: [one.code_of(getattr(c, name)) for c in configs] for name, one in DIMENSIONS.items()}
        codes["assignment"] = [numbers.setdefault(config.assignment, len(numbers)) for config in configs]
        columns = {name: np.array(column, dtype=np.int64) for name, column in codes.items()}
        return cls.from_codes(columns, assignments=tuple(numbers), opened=opened)


_COLUMNS = tuple(field.name for field in fields(ConfigGrid) if field.name not in ("assignments", "opened"))


def concatenate(grids: Sequence[ConfigGrid]) -> ConfigGrid:
    """Join several grids that open the same dimensions, one after the other."""
    assert len({grid.opened for grid in grids}) == 1, "grids that open different dimensions are different spaces"
    arrays = {name: np.concatenate([getattr(grid, name) for grid in grids]) for name in _COLUMNS}
    # each grid numbers its own assignments, so that their codes are counted anew over all grids
    numbers = {EVEN: 0}
    codes = [np.array([numbers.setdefault(one, len(numbers)) for one in grid.assignments]) for grid in grids]
    arrays["assignment"] = np.concatenate([code[grid.assignment] for code, grid in zip(codes, grids, strict=True)])
    return ConfigGrid(**arrays, assignments=tuple(numbers), opened=grids[0].opened)
