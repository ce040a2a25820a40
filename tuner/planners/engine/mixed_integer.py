"""Mixed integer linear programs, written row by row and solved by HiGHS through SciPy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tuner.planners.engine.outcome import ROUNDING, Incumbent, Known, Limits, Outcome, Progress, Stop

Solution = TypeVar("Solution")

Term = tuple[Any, float]
"""Number of a variable, which NumPy returns as one of its integers, and its coefficient."""

Terms = list[Term]
"""A linear expression."""

_OPTIMAL, _LIMIT, _INFEASIBLE = 0, 1, 2  # scipy.optimize.milp's `status`
_OTHER, _LIMIT_WORDS = 4, "limit reached"  # HiGHS's limit of nodes, of which SciPy 1.17 gives only the message


class MixedInteger:
    """Linear cost to minimise over variables that are never negative."""

    def __init__(self) -> None:
        """Begin without variables and constraints."""
        self._upper: list[float] = []
        self._is_integer: list[bool] = []
        self._cost: Terms = []
        self._rows: list[Terms] = []
        self._sides: list[tuple[float, float]] = []

    def variables(self, shape: Sequence[int], *, upper: ArrayLike = np.inf, integer: bool = False) -> NDArray[np.int64]:
        """Add variables, and return their numbers in an array of this shape.

        Args:
            shape: Shape of the array.
            upper: Upper limit of each variable; broadcast to the shape.
            integer: Whether they are whole numbers.
        """
        limits = np.broadcast_to(np.asarray(upper, dtype=np.float64), tuple(shape))
        first = len(self._upper)
        self._upper.extend(limits.ravel().tolist())
        self._is_integer.extend([integer] * limits.size)
        return np.arange(first, first + limits.size).reshape(tuple(shape))

    def add(self, terms: Iterable[Term], *, at_least: float = -np.inf, at_most: float = np.inf) -> None:
        """Add a constraint on a linear expression."""
        self._rows.append(list(terms))
        self._sides.append((at_least, at_most))

    def cost(self, terms: Iterable[Term]) -> None:
        """Add a linear expression to the objective."""
        self._cost.extend(terms)

    def solve(
        self, limits: Limits, read: Callable[[NDArray[np.float64]], tuple[float, Solution]], *, unit: float = 1.0
    ) -> Outcome[Solution]:
        """Find the optimum, or what is known of it when a limit is reached.

        Args:
            limits: Limits of time, nodes of HiGHS's tree, and its relative gap.
            read: Function from the values of all variables to the cost and the solution that they stand for.
            unit: Value of one unit of the program's cost in the unit of `read`.
        """
        size = len(self._upper)
        start_s = time.perf_counter()
        # HiGHS's default gap is 1e-4, far above what counts as proof here.
        options: dict[str, float | int] = {"mip_rel_gap": max(limits.gap, ROUNDING)}
        if math.isfinite(limits.time_s):
            options["time_limit"] = limits.time_s
        if math.isfinite(limits.nodes):
            options["node_limit"] = int(limits.nodes)
        cost = np.zeros(size)
        # Several terms may name the same variable, so that their coefficients add up.
        np.add.at(cost, [var for var, _ in self._cost], [factor for _, factor in self._cost])
        lower, upper = np.array(self._sides).T
        found = milp(
            cost,
            integrality=np.array(self._is_integer, dtype=np.int64),
            bounds=Bounds(0.0, np.array(self._upper)),
            constraints=LinearConstraint(self._matrix(size), lower, upper),
            options=options,
        )
        seconds = time.perf_counter() - start_s
        status = int(found.status)
        if status == _OTHER and _LIMIT_WORDS in found.message:
            status = _LIMIT
        assert status in {_OPTIMAL, _LIMIT, _INFEASIBLE}, f"HiGHS is at a loss: {found.message}"
        best = None
        if found.x is not None:
            value, solution = read(found.x)
            best = Incumbent(cost=value, solution=solution)
        bound = math.inf if status == _INFEASIBLE else float(found.mip_dual_bound or 0.0) * unit
        nodes = int(found.mip_node_count or 0)
        # HiGHS also reports an optimum when it stops at a wider gap that was asked for.
        is_proven = status == _OPTIMAL and limits.gap <= ROUNDING
        return Outcome(
            known=_known(status, has_solution=best is not None, is_proven=is_proven),
            stop=_stop(status, seconds, limits),
            best=best,
            bound=bound,
            nodes=nodes,
            dominated=0,
            seconds=seconds,
            trace=(Progress(seconds=seconds, nodes=nodes, cost=math.inf if best is None else best.cost, bound=bound),),
        )

    def _matrix(self, size: int) -> csr_array:
        """Return the coefficients of all constraints as a sparse matrix [rows, size]."""
        rows = [row for row, terms in enumerate(self._rows) for _ in terms]
        columns = [var for terms in self._rows for var, _ in terms]
        factors = [factor for terms in self._rows for _, factor in terms]
        return csr_array((factors, (rows, columns)), shape=(len(self._rows), size))


def _known(status: int, *, has_solution: bool, is_proven: bool) -> Known:
    if has_solution:
        return Known.OPTIMAL if is_proven else Known.FEASIBLE
    return Known.INFEASIBLE if status == _INFEASIBLE else Known.UNKNOWN


def _stop(status: int, seconds: float, limits: Limits) -> Stop:
    if status == _LIMIT:
        return Stop.TIME if seconds >= limits.time_s else Stop.NODES
    return Stop.GAP if status == _OPTIMAL and limits.gap > 0 else Stop.EXHAUSTED
