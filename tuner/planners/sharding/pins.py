"""Pins: choices of a user, as targets for some operators (ManuMatic, section 3.1).

A pin is a least number of parts for a dim of an operator: the dim is cut into a multiple of the pin's ways, and later
levels may cut it further. A hard pin closes the choice of its operators. At the first levels that can serve it they
take its factor and nothing else, which is the paper's binary-compatible decomposition. They are visited first, which is
the paper's infinite price. The couplings Phi between a pinned operator's tensors are expressed by their common
factor.

A soft pin adds weight * D(split, target) to the cost of an operator, with D = sum of log(target / gcd(split, target)):
zero where the target is met, and the logarithm of what is missing elsewhere. The paper prints the two arguments of D
the other way round, which would be zero for a pin that is ignored. A pin without a weight is hard. The paper marks it
by a weight of zero instead, and its text calls both kinds hard.

Ways that do not divide the devices, or the dim, are refused for a hard pin. A soft pin then takes the nearest number
that does, of two the larger: where the ways don't divide 2^T, the paper takes the nearest power of two, or its penalty.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.dims import Rule
from costmodels.sharding.graph import Graph, Op
from costmodels.sharding.plan import NONE
from hardware.io.errors import ConfigError, did_you_mean
from tuner.planners.sharding.recursive import Closed, Extra, Level
from tuner.planners.sharding.sharding_terms import Charge
from tuner.planners.sharding.table_forms import Row

KEY = "pins"
"""Key of the pins, as error messages name it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A target for the cuts of some operators.

    Attributes:
        op: Names of the operators, with `*` for any text. An argument of the step is pinned by its full name only.
        dim: Name of a factor of these operators, or of a dim of one of their tensors; without names a dim by its place,
            as `operand1.0`, the first dim of the second operand, or `result.0`.
        axis: Mesh axis that cuts the dim; None for whichever comes first.
        ways: Least number of parts; None for the number of devices along the axis.
        weight_s: Cost of missing the target by a factor of e [s], for a soft pin; None for a hard pin.
    """

    op: str
    dim: str
    axis: str | None = None
    ways: int | None = None
    weight_s: float | None = None

    @property
    def is_hard(self) -> bool:
        """Whether the pin must hold."""
        return self.weight_s is None

    @property
    def in_words(self) -> str:
        """Pin in the words of a report."""
        where = f" on {self.axis}" if self.axis else ""
        ways = f" {self.ways} ways" if self.ways else ""
        return f"{self.op} {self.dim}{ways}{where}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pinned:
    """Pins resolved to operators, factors and levels, for planners.

    Attributes:
        pins: Pins as the user gave them.
        factors: Factor of each operator that a pin matches, for each pin.
        ways: Number of parts that each pin asks for, which divides the devices; see `taken_ways`.
        served: Factor that a hard pin makes an operator take at a level, by operator and level.
        graph: Graph of the training step.
        levels: Levels of the refined mesh.
        axes: Name of the user's mesh axis that each level is a part of.
    """

    pins: tuple[Pin, ...]
    factors: tuple[Mapping[int, int], ...]
    ways: tuple[int, ...]
    served: Mapping[tuple[int, int], int]
    graph: Graph
    levels: tuple[Level, ...]
    axes: tuple[str, ...]

    @property
    def closed(self) -> Closed | None:
        """Restriction of candidates by hard pins; None if there is none."""
        return self._open_candidates if self.served else None

    def is_open(self, op: int, axis: int) -> bool:
        """Return whether hard pins leave open which factor an axis of the refined mesh serves in an operator."""
        return all((op, number) not in self.served for number, level in enumerate(self.levels) if level.axis == axis)

    @property
    def restriction(self) -> Callable[[int, int], bool] | None:
        """Restriction of a descent by hard pins; None if there is none."""
        return self.is_open if self.served else None

    @property
    def charge(self) -> Charge | None:
        """Cost that soft pins charge for a whole row; None if there is no soft pin."""
        return self._charge_s if any(not pin.is_hard for pin in self.pins) else None

    def split(self, number: int, op: int, row: Row) -> int:
        """Return the number of parts into which a row cuts the pinned factor of an operator."""
        pin, factor = self.pins[number], self.factors[number][op]
        return math.prod(
            level.ways
            for level, axis in zip(self.levels, self.axes, strict=True)
            if row[level.axis] == factor and pin.axis in (None, axis)
        )

    @property
    def extra(self) -> Extra | None:
        """Cost that soft pins charge for a candidate at a level; None if there is no soft pin."""
        return self._missing_s if any(not pin.is_hard for pin in self.pins) else None

    def _open_candidates(self, op: int, level: int, ways: Sequence[int]) -> tuple[int, ...] | None:
        """Return the candidates that hard pins leave an operator at a level; None for all.

        An earlier level must leave enough of a factor for the hard pins that are served at later levels.
        """
        if (op, level) in self.served:
            return (self.served[op, level],)
        # Parts that hard pins will still need of each factor at later levels.
        later: dict[int, int] = {}
        for further in range(level + 1, len(self.levels)):
            if (op, further) in self.served:
                factor = self.served[op, further]
                later[factor] = later.get(factor, 1) * self.levels[further].ways
        if not later:
            return None
        rule, parts = self.graph.ops[op].rule, self.levels[level].ways
        return (
            NONE,
            *(
                factor
                for factor in rule.cuttable
                if rule.factors[factor].size % (ways[factor] * parts * later.get(factor, 1)) == 0
            ),
        )

    def _charge_s(self, op: int, row: Row) -> float:
        """Return the cost of all soft pins for a row of an operator [s]."""
        return sum(
            pin.weight_s * deviation(self.split(number, op, row), self.ways[number])
            for number, pin in enumerate(self.pins)
            if pin.weight_s is not None and op in self.factors[number]
        )

    def _missing_s(self, op: int, level: int, ways: Sequence[int], candidate: int) -> float:
        """Return the cost of all soft pins for a candidate at a level [s].

        A level that can't serve a pin charges all candidates the same, which is left out.
        """
        found = 0.0
        for pin, factors, target in zip(self.pins, self.factors, self.ways, strict=True):
            if pin.weight_s is not None and op in factors and pin.axis in (None, self.axes[level]):
                factor = factors[op]
                split = ways[factor] * (self.levels[level].ways if candidate == factor else 1)
                found += pin.weight_s * deviation(split, target)
        return found


def deviation(split: int, target: int) -> float:
    """Return D(split, target) of one dim: log of the missing parts, 0 if the split is a multiple of the target."""
    return math.log(target / math.gcd(split, target))


def resolve_pins(pins: Sequence[Pin], graph: Graph, mesh: DeviceMesh, levels: Sequence[Level]) -> Pinned:
    """Check pins, and resolve them to a factor of every operator that they match.

    Args:
        pins: Pins of the user.
        graph: Graph of the training step.
        mesh: Mesh with the axes that the pins name.
        levels: Levels of the refined mesh.

    Raises:
        ConfigError: a pin matches no operator, names no dim of one or one that can't be cut, or hard pins can't hold
            together.
    """
    axes = tuple(mesh.names[level.of] for level in levels)
    factors = tuple(match_pin(number, pin, graph) for number, pin in enumerate(pins))
    sizes = [{graph.ops[op].rule.factors[factor].size for op, factor in found.items()} for found in factors]
    ways = tuple(_ways(number, pin, mesh, sizes[number]) for number, pin in enumerate(pins))
    served: dict[tuple[int, int], int] = {}
    for op in dict.fromkeys(op for found in factors for op in found):
        wishes = [
            _Wish(number=number, pin=pin, factor=factors[number][op], ways=ways[number])
            for number, pin in enumerate(pins)
            if pin.is_hard and op in factors[number]
        ]
        _check_sizes(graph.ops[op], wishes)
        chosen = _LevelChoice(graph.ops[op], wishes, levels, axes).choose()
        served.update({(op, level): factor for level, factor in chosen.items()})
    return Pinned(
        pins=tuple(pins), factors=factors, ways=ways, served=served, graph=graph, levels=tuple(levels), axes=axes
    )


def match_pin(number: int, pin: Pin, graph: Graph) -> dict[int, int]:
    """Return the factor that a pin means, for each operator that it matches.

    Raises:
        ConfigError: it matches no operator, or names no dim of one or one that it can't cut.
    """
    key = f"{KEY}[{number}]"
    found = [
        at
        for at, op in enumerate(graph.ops)
        if op.name == pin.op or (not op.is_source and fnmatch.fnmatchcase(op.name, pin.op))
    ]
    if not found:
        nearest = difflib.get_close_matches(pin.op, _general(graph), n=3, cutoff=0.0)
        raise ConfigError(
            "matches no operator", key=f"{key}.op", value=pin.op, nearest=f"the nearest are {', '.join(nearest)}"
        )
    return {at: _factor(key, pin, graph, graph.ops[at]) for at in found}


def _general(graph: Graph) -> list[str]:
    """Return the names of operators with `*` in place of numbers, each once."""
    return list(dict.fromkeys(re.sub(r"\b\d+\.", "*.", op.name) for op in graph.ops if not op.is_source))


def _factor(key: str, pin: Pin, graph: Graph, op: Op) -> int:
    """Return the factor of an operator that has the pinned name, or is the first of a dim that has it."""
    rule = op.rule
    # Factors' own names come first, then names of tensors' dims. Of equal names the first one counts.
    names = {factor.name: number for number, factor in reversed(list(enumerate(rule.factors))) if factor.name}
    for tensors, places in ((op.operands, rule.operands), (op.results, rule.results)):
        for tensor, place in zip(tensors, places, strict=True):
            for dim, own in zip(graph.tensors[tensor].dim_names, place, strict=False):
                if own:
                    names.setdefault(dim, _first(rule, own))
    places_by_word = _places(rule)
    factor = names.get(pin.dim, places_by_word.get(pin.dim))
    if factor is None:
        raise ConfigError(
            f"is no dim of {op.name}",
            key=f"{key}.dim",
            value=pin.dim,
            nearest=did_you_mean(pin.dim, names or places_by_word),
        )
    if factor not in rule.cuttable:
        able = [name for name, number in (names or places_by_word).items() if number in rule.cuttable]
        reason = "it has one element" if rule.factors[factor].size == 1 else f"{op.name} needs it whole"
        raise ConfigError(
            f"can't be cut: {reason}",
            key=f"{key}.dim",
            value=pin.dim,
            nearest=f"valid: {', '.join(able)}" if able else "no dim of it can be cut",
        )
    return factor


def words_of(rule: Rule) -> dict[int, str]:
    """Return the word that names each factor in a pin: the factor's name, or else its first place."""
    found = {number: factor.name for number, factor in enumerate(rule.factors) if factor.name}
    for word, factor in _places(rule).items():
        found.setdefault(factor, word)
    return found


def _places(rule: Rule) -> dict[str, int]:
    """Return the factor of each dim by its place; of several factors the first, which is the one that can be cut."""
    found: dict[str, int] = {}
    for side, places in (("result", rule.results), ("operand", rule.operands)):
        for number, place in enumerate(places):
            for dim, own in enumerate(place):
                if own:
                    found[f"{side}{number or ''}.{dim}"] = _first(rule, own)
    return found


def _first(rule: Rule, dim: Sequence[int]) -> int:
    """Return the slowest factor of a dim that has more than one iteration."""
    return next((factor for factor in dim if rule.factors[factor].size > 1), dim[0])


def _ways(number: int, pin: Pin, mesh: DeviceMesh, sizes: Iterable[int]) -> int:
    key = f"{KEY}[{number}]"
    if pin.axis is not None and pin.axis not in mesh.names:
        raise ConfigError(
            f"is no axis of the mesh {mesh.in_words}",
            key=f"{key}.axis",
            value=pin.axis,
            nearest=did_you_mean(pin.axis, mesh.names),
        )
    if pin.ways is None and pin.axis is None:
        raise ConfigError("names neither an axis nor ways", key=key, value=pin.in_words, nearest="ways: 2")
    along = devices_of(pin, mesh)
    ways = taken_ways(pin, along, sizes)
    if ways is None:
        raise ConfigError(
            f"does not divide the {along} devices {'of the mesh' if pin.axis is None else f'along {pin.axis}'}",
            key=f"{key}.ways",
            value=pin.ways,
            nearest=f"valid: {', '.join(map(str, _divisors(along)))}, or weight_s for a soft pin",
        )
    return ways


def devices_of(pin: Pin, mesh: DeviceMesh) -> int:
    """Return the number of devices along a pin's axis: of the whole mesh for a pin without one, 1 for an absent one."""
    return mesh.num_devices if pin.axis is None else dict(zip(mesh.names, mesh.sizes, strict=True)).get(pin.axis, 1)


def taken_ways(pin: Pin, devices: int, sizes: Iterable[int] = ()) -> int | None:
    """Return the number of parts that a pin asks for on so many devices, because levels only cut into equal parts.

    If a pin's ways don't divide the devices, a hard pin gets None. A soft pin gets the nearest number that does, and
    that divides the size of its dim in some operator, if any number does. A hard pin's sizes are checked elsewhere.
    """
    if pin.ways is None:
        return devices
    if pin.is_hard:
        return None if devices % pin.ways else pin.ways
    able = {divisor for size in sizes for divisor in _divisors(math.gcd(devices, size))}
    wanted = pin.ways
    return min(able if len(able) > 1 else _divisors(devices), key=lambda ways: (abs(math.log(ways / wanted)), -ways))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wish:
    """Request of a hard pin to an operator.

    Attributes:
        number: Index of the pin.
        pin: Pin that makes the request.
        factor: Factor of the operator to cut.
        ways: Number of parts.
    """

    number: int
    pin: Pin
    factor: int
    ways: int

    @property
    def key(self) -> str:
        return f"{KEY}[{self.number}]"


def _check_sizes(op: Op, wishes: Sequence[_Wish]) -> None:
    """Check that the hard pins of an operator divide the factors that they cut.

    Raises:
        ConfigError: a factor's size is not divisible by the parts that its pins ask for together.
    """
    by_factor: dict[int, list[_Wish]] = {}
    for wish in wishes:
        by_factor.setdefault(wish.factor, []).append(wish)
    for factor, (*others, last) in by_factor.items():
        # Parts along different axes multiply. A pin without an axis needs what the others leave over.
        needed: dict[str | None, int] = {}
        for wish in (*others, last):
            needed[wish.pin.axis] = math.lcm(needed.get(wish.pin.axis, 1), wish.ways)
        parts = math.lcm(needed.pop(None, 1), math.prod(needed.values()))
        size = op.rule.factors[factor].size
        if size % parts:
            divisors = [divisor for divisor in range(1, parts + 1) if size % divisor == 0]
            words = " and ".join(f"{other.key} ({other.pin.in_words})" for other in others)
            together_with = f"together with {words} " if others else ""
            raise ConfigError(
                f"{together_with}cuts {(*others, last)[0].pin.dim} of {op.name}, which is {size}, into {parts} parts, "
                "which do not divide it",
                key=last.key,
                value=last.pin.in_words,
                nearest=f"at most {divisors[-1]} ways, or weight_s for a soft pin",
            )


class _LevelChoice:
    """Choice of the levels at which one operator takes the factors of its hard pins."""

    def __init__(self, op: Op, wishes: Sequence[_Wish], levels: Sequence[Level], axes: Sequence[str]) -> None:
        """Sort the wishes: pins without an axis take the levels that pins with an axis leave."""
        self.op, self.levels, self.axes = op, levels, axes
        self.wishes = sorted(wishes, key=lambda wish: (wish.pin.axis is None, wish.number))
        self.sizes = {wish.factor: op.rule.factors[wish.factor].size for wish in self.wishes}
        # States from which no distribution was found, so that each is searched once.
        self.hopeless: set[tuple[object, ...]] = set()

    def choose(self) -> dict[int, int]:
        """Return the factor that each chosen level serves.

        Every pin takes the first levels that can serve it. Where that leaves a pin without levels, every other
        distribution of the levels is tried.

        Raises:
            ConfigError: no distribution of the levels satisfies all pins.
        """
        taken: dict[int, int] = {}
        for wish in self.wishes:
            for level in range(len(self.levels)):
                if level not in taken and self._helps(wish, level, taken):
                    taken[level] = wish.factor
        missed = [wish for wish in self.wishes if self._missing(wish, taken) > 1]
        if not missed:
            return taken
        found = self._distribute({}, 0)
        if found is None:
            raise self._refuse(missed[0])
        return found

    def _parts(self, factor: int, taken: Mapping[int, int]) -> int:
        """Return the parts into which the taken levels cut a factor."""
        return math.prod(self.levels[level].ways for level, other in taken.items() if other == factor)

    def _missing(self, wish: _Wish, taken: Mapping[int, int]) -> int:
        """Return the parts that a wish still misses; 1 if it is met."""
        axis = wish.pin.axis
        own = {level: factor for level, factor in taken.items() if axis in (None, self.axes[level])}
        return wish.ways // math.gcd(self._parts(wish.factor, own), wish.ways)

    def _helps(self, wish: _Wish, level: int, taken: Mapping[int, int]) -> bool:
        """Return whether a level brings a wish nearer; it may cut further than needed where that divides."""
        if wish.pin.axis not in (None, self.axes[level]):
            return False
        ways = self.levels[level].ways
        divides = self.sizes[wish.factor] % (self._parts(wish.factor, taken) * ways) == 0
        return divides and math.gcd(ways, self._missing(wish, taken)) > 1

    def _distribute(self, taken: dict[int, int], level: int) -> dict[int, int] | None:
        """Distribute the levels from `level` on so that every wish is met; return None if that is impossible."""
        missing = tuple(self._missing(wish, taken) for wish in self.wishes)
        if max(missing) == 1:
            return taken
        state = (level, missing, *(self._parts(factor, taken) for factor in self.sizes))
        if level == len(self.levels) or state in self.hopeless:
            return None
        helped = dict.fromkeys(wish.factor for wish in self.wishes if self._helps(wish, level, taken))
        for factor in (*helped, None):
            found = self._distribute(taken if factor is None else {**taken, level: factor}, level + 1)
            if found is not None:
                return found
        self.hopeless.add(state)
        return None

    def _refuse(self, wish: _Wish) -> ConfigError:
        """Return the error for a pin that can't hold, with the pin that stands in its way."""
        others = sorted((other for other in self.wishes if other != wish), key=lambda other: other.number)
        rivals = [other for other in others if other.factor != wish.factor] or others
        name, dim, size = self.op.name, wish.pin.dim, self.sizes[wish.factor]
        rule = f"no level can cut {dim} of {name}, which is {size}, into a multiple of {wish.ways} parts"
        if rivals:
            rule = (
                f"no level is left to cut {dim} of {name} into {wish.ways} parts; "
                f"{rivals[0].key} ({rivals[0].pin.in_words}) has taken them"
            )
        return ConfigError(
            rule, key=wish.key, value=wish.pin.in_words, nearest="fewer ways, another axis, or weight_s for a soft pin"
        )
