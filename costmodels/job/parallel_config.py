"""One parallelism configuration, and many of them as arrays.

The eight degrees are always in the order of DEGREES. A study may open further dimensions; the identity of a
configuration is all of them together, since two candidates may differ in their ZeRO stage alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from costmodels.job.uneven_work import ASSIGNMENT_FIELDS, EVEN, Assignment, parse_assignment, parse_numbers
from hardware.arrays import IntArray
from hardware.io.errors import ConfigError, did_you_mean

DEGREES = ("pp", "tp", "dp", "cp", "up", "vpp", "ep", "mbs")
RECOMPUTE_MODES = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
ENUMERATED_DIMENSIONS = ("recompute", "zero_stage", "sequence_parallel", "expert_tp", "dp_shard")
"""Further dimensions whose values are combined with those of all others."""
FURTHER_DIMENSIONS = (*ENUMERATED_DIMENSIONS, "assignment")
"""All of them; an assignment is planned for each combination."""

MAX_DEGREE = 999_999_999
"""Far above what any cluster has; products of two still fit an array's integers."""

Value = int | str | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """One configuration: the eight degrees, and the further dimensions that a study may open.

    Attributes:
        pp: Pipeline stages.
        tp: Tensor parallel degree.
        dp: Data parallel degree; `pp*tp*dp*cp*up` is the number of devices.
        cp: Context parallel degree (ring attention).
        up: Ulysses degree (all-to-all over the heads).
        vpp: Model chunks per pipeline stage (interleaved schedule); 1 is plain 1F1B.
        ep: Expert parallel degree, carved out of the data parallel ranks.
        mbs: Micro-batch size in sequences per data parallel rank.
        recompute: What the backward pass computes again: none, selective (the attention core) or full.
        zero_stage: 0 replicated, 1 optimizer states sharded, 2 gradients too, 3 weights too.
        sequence_parallel: Whether norms and residuals are split along the sequence over tp.
        expert_tp: Tensor parallel degree of the experts; 0 is that of the rest, tp.
        dp_shard: Data parallel ranks over which ZeRO shards; the others hold copies (HSDP). 0 is all of dp.
        assignment: Uneven layers, micro-batches and hosts; as text it is read.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    up: int = 1
    vpp: int = 1
    ep: int = 1
    mbs: int = 1
    recompute: str = "none"
    zero_stage: int = 1
    sequence_parallel: bool = True
    expert_tp: int = 0
    dp_shard: int = 0
    assignment: Assignment = EVEN

    def __post_init__(self) -> None:
        """Refuses values that no study could mean."""
        for name in DEGREES:
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_DEGREE:
                rule = "at least 1" if type(value) is not int or value < 1 else f"at most {MAX_DEGREE}"
                raise ConfigError(f"must be a whole number of {rule}", key=name, value=value)
        if self.num_devices > MAX_DEGREE:
            raise ConfigError(
                f"makes {self.num_devices} devices; at most {MAX_DEGREE} are supported", key="pp*tp*dp*cp*up"
            )
        if self.recompute not in RECOMPUTE_MODES:
            raise ConfigError(
                "is not a recompute mode",
                key="recompute",
                value=self.recompute,
                nearest=did_you_mean(self.recompute, RECOMPUTE_MODES),
            )
        if type(self.zero_stage) is not int or self.zero_stage not in ZERO_STAGES:
            raise ConfigError("must be 0, 1, 2 or 3", key="zero_stage", value=self.zero_stage)
        for name in ("expert_tp", "dp_shard"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_DEGREE:
                rule = "at least 0" if type(value) is not int or value < 0 else f"at most {MAX_DEGREE}"
                raise ConfigError(f"must be a whole number of {rule}", key=name, value=value)
        if type(self.sequence_parallel) is not bool:
            raise ConfigError("must be true or false", key="sequence_parallel", value=self.sequence_parallel)
        if isinstance(self.assignment, str):  # as studies keep it
            object.__setattr__(self, "assignment", parse_assignment(self.assignment))

    @property
    def num_devices(self) -> int:
        """Devices that the configuration occupies."""
        return self.pp * self.tp * self.dp * self.cp * self.up

    def values(self, dimensions: Iterable[str] = DEGREES) -> dict[str, Value]:
        """The named dimensions and their values, in the order of `dimensions`."""
        return {name: str(self.assignment) if name == "assignment" else getattr(self, name) for name in dimensions}

    def __str__(self) -> str:
        """The form that `--config` takes, degrees of 1 included."""
        degrees = ",".join(f"{name}={getattr(self, name)}" for name in DEGREES)
        return f"{degrees},{self.assignment}" if self.assignment else degrees


def parse_config(text: str, defaults: Mapping[str, Value], *, option: str = "--config") -> ParallelConfig:
    """The configuration that `pp=4,tp=2,zero_stage=1` means; what it leaves out is 1, or comes from `defaults`.

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
        known = DEGREES + ENUMERATED_DIMENSIONS + ASSIGNMENT_FIELDS
        if name not in known:
            raise ConfigError(
                "is no dimension of a configuration", key=option, value=name, nearest=did_you_mean(name, known)
            )
        if name in seen:
            raise ConfigError("is given twice", key=f"{option} {name}", value=value)
        seen.add(name)
        if name in ASSIGNMENT_FIELDS:
            uneven[name] = parse_numbers(value, f"{option} {name}")
        else:
            values[name] = _parse_value(name, value, option)
    try:
        if uneven:
            values["assignment"] = str(Assignment(**uneven))
        return ParallelConfig(**values)  # type: ignore[arg-type] # the values' types are checked by ParallelConfig
    except ConfigError as error:
        raise error.under(option) from None


def _parse_value(name: str, text: str, option: str) -> Value:
    if name == "recompute":
        return text
    if name == "sequence_parallel":
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ConfigError("must be true or false", key=f"{option} {name}", value=text)
        return words[text.lower()]
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 9:
        raise ConfigError("must be a whole number", key=f"{option} {name}", value=text)
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfigGrid:
    """n configurations as arrays of shape [n], one per dimension.

    `recompute` holds indices into RECOMPUTE_MODES, `assignment` those into `assignments`, whose first one is EVEN.
    `opened` names the further dimensions that a study searches.
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
    zero_stage: IntArray
    sequence_parallel: NDArray[np.bool_]
    expert_tp: IntArray
    dp_shard: IntArray
    assignment: IntArray
    assignments: tuple[Assignment, ...] = (EVEN,)
    opened: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def expert_tensor(self) -> IntArray:
        """Tensor parallel degree of the experts [n]."""
        return np.where(self.expert_tp == 0, self.tp, self.expert_tp)

    @property
    def copies(self) -> IntArray:
        """Copies of the sharded training states [n]: dp over dp_shard; 1 where nothing is sharded (ZeRO 0)."""
        whole = (self.dp_shard == 0) | (self.zero_stage == 0)
        return np.where(whole, 1, self.dp // np.maximum(self.dp_shard, 1))

    @property
    def dimensions(self) -> tuple[str, ...]:
        """The names that identify a candidate: the eight degrees and the opened dimensions."""
        return DEGREES + self.opened

    @property
    def is_even(self) -> bool:
        """Whether nothing is uneven."""
        return len(self.assignments) == 1

    @property
    def has_recomputed(self) -> bool:
        """Whether some layers run again in full apart from what `recompute` says."""
        return any(self.assignments[code].recomputed for code in np.unique(self.assignment).tolist())

    def by_host_order(self) -> list[tuple[tuple[int, ...], IntArray]]:
        """The orders of hosts and the positions of the configurations that have each."""
        orders: dict[tuple[int, ...], int] = {}
        number = np.array([orders.setdefault(one.hosts, len(orders)) for one in self.assignments])[self.assignment]
        found = [(order, np.flatnonzero(number == at)) for order, at in orders.items()]
        return [(order, at) for order, at in found if len(at)]

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> ConfigGrid:
        """The configurations at `index` (positions, or a mask of shape [n])."""
        arrays = {name: getattr(self, name)[index] for name in _COLUMNS}
        return ConfigGrid(**arrays, assignments=self.assignments, opened=self.opened)

    def config(self, position: int) -> ParallelConfig:
        """The configuration at one position."""
        degrees = {name: int(getattr(self, name)[position]) for name in DEGREES}
        return ParallelConfig(
            **degrees,
            recompute=RECOMPUTE_MODES[self.recompute[position]],
            zero_stage=int(self.zero_stage[position]),
            sequence_parallel=bool(self.sequence_parallel[position]),
            expert_tp=int(self.expert_tp[position]),
            dp_shard=int(self.dp_shard[position]),
            assignment=self.assignments[self.assignment[position]],
        )

    def values(self, position: int) -> dict[str, Value]:
        """The candidate at one position by the dimensions that identify it."""
        return self.config(position).values(self.dimensions)

    def matrix(self, dimensions: Sequence[str]) -> IntArray:
        """The named dimensions as integer columns [n, len(dimensions)]."""
        return np.stack([getattr(self, name).astype(np.int64) for name in dimensions], axis=1)

    def positions(self) -> dict[tuple[Value, ...], int]:
        """Where each candidate stands, by the values of `dimensions`."""
        spellings = {"recompute": RECOMPUTE_MODES, "assignment": [str(assignment) for assignment in self.assignments]}
        columns: list[list[Value]] = []
        for name in self.dimensions:
            column = getattr(self, name).tolist()
            columns.append([spellings[name][code] for code in column] if name in spellings else column)
        return {key: position for position, key in enumerate(zip(*columns, strict=True))}

    @classmethod
    def from_configs(cls, configs: Sequence[ParallelConfig], opened: tuple[str, ...] = ()) -> ConfigGrid:
        """The grid of the given configurations, in their order."""
        degrees = {name: np.array([getattr(c, name) for c in configs], dtype=np.int64) for name in DEGREES}
        numbers = {EVEN: 0}
        return cls(
            **degrees,
            recompute=np.array([RECOMPUTE_MODES.index(c.recompute) for c in configs], dtype=np.int64),
            zero_stage=np.array([c.zero_stage for c in configs], dtype=np.int64),
            sequence_parallel=np.array([c.sequence_parallel for c in configs], dtype=np.bool_),
            expert_tp=np.array([c.expert_tp for c in configs], dtype=np.int64),
            dp_shard=np.array([c.dp_shard for c in configs], dtype=np.int64),
            assignment=np.array([numbers.setdefault(c.assignment, len(numbers)) for c in configs], dtype=np.int64),
            assignments=tuple(numbers),
            opened=opened,
        )


_COLUMNS = tuple(field.name for field in fields(ConfigGrid) if field.name not in ("assignments", "opened"))


def concatenate(grids: Sequence[ConfigGrid]) -> ConfigGrid:
    """The configurations of several grids one after the other; all open the same dimensions."""
    assert len({grid.opened for grid in grids}) == 1, "grids that open different dimensions are different spaces"
    arrays = {name: np.concatenate([getattr(grid, name) for grid in grids]) for name in _COLUMNS}
    numbers = {EVEN: 0}
    codes = [np.array([numbers.setdefault(one, len(numbers)) for one in grid.assignments]) for grid in grids]
    arrays["assignment"] = np.concatenate([code[grid.assignment] for code, grid in zip(codes, grids, strict=True)])
    return ConfigGrid(**arrays, assignments=tuple(numbers), opened=grids[0].opened)
