"""Synthetic problems with bad basins and tight memory, for judging a search on problems that it was not built on.

A problem is the forward and backward pass of a network of alike layers on a mesh of two or three axes. A strategy tells
for each axis whether it shards the rows of a tensor (the batch), its columns (the model) or nothing. Sharding rows
leaves a gradient's sum to be communicated once a layer, sharding columns a sum of activations; which of them is cheaper
changes with a layer's sizes.
A change of the sharding between neighbours costs as much as the tensor moved. So all nodes of
one chain want the same strategy, and a chain that starts with a wrong one stays with it: each node alone would pay
more for leaving it. Activations are held from the forward to the backward pass, and weights all the time, so that the
limit of memory couples all layers.

    python -m benchmarks.assignment.synthetic FOLDER [--seeds N] [--from SEED]

writes the problems of some seeds as files of the contest's form.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.random import Generator

from benchmarks.assignment.contest_file import write_problem
from benchmarks.support.timing import benchmark_parser, count_at_least, tell
from hardware.arrays import FloatArray
from tuner.planners.assignment.problem import AssignmentProblem, problem_of

_WHOLE, _ROWS, _COLUMNS = 0, 1, 2
"""Parts of a tensor that an axis may shard."""

_MESHES = ((4, 2), (8, 4), (4, 2, 2))
"""Meshes of which one is drawn: numbers of devices along their axes."""

_SPREAD = 2.0
"""Spread of the sizes of tensors around their layer's, as a standard deviation in powers of two.

A few large tensors then decide where memory suffices, and which of them to divide is a choice of some out of many.
"""

_TIGHTNESSES = (0.001, 0.005, 0.02, 0.08)
"""Places of the limit on a logarithmic scale from the leanest assignment, 0, to the largest, 1."""

_STIFFNESSES = (1.0, 10.0, 100.0)
"""Factors on the costs of moving tensors within a layer; with a large one all nodes of a layer change together."""

_TURNED = 0.25
"""Fraction of edges on which one node's rows are the other's columns.

No strategy is free of moves around a circle with an odd number of them. Bounds are then far from the optimum.
"""

_CROSSING = 0.35
"""Fraction of nodes with another edge to a node of any earlier layer, as shared masks and encodings have."""


def synthetic_problem(seed: int) -> AssignmentProblem:
    """Draw a problem of some hundred to some thousand nodes.

    Args:
        seed: Seed of all sizes, costs and of the limit.
    """
    rng = np.random.default_rng(seed)
    return _Drawing(rng).problem(f"synthetic-{seed}", tightness=float(rng.choice(_TIGHTNESSES)))


class _Drawing:
    """Nodes and edges of a problem while they are drawn.

    A node has a kind: `weight`, `product` (rows need the weight's sum, columns the activation's) or `elementwise`.
    """

    def __init__(self, rng: Generator) -> None:
        """Draw all nodes and edges."""
        self._rng = rng
        self._axes = _MESHES[int(rng.integers(len(_MESHES)))]
        self._strategies = list(itertools.product((_WHOLE, _ROWS, _COLUMNS), repeat=len(self._axes)))
        self._intervals: list[tuple[int, int]] = []
        self._bytes: list[float] = []
        self._costs: list[FloatArray] = []
        self._edges: list[tuple[int, int]] = []
        self._edge_costs: list[FloatArray] = []
        num_layers = int(rng.integers(8, 30))
        width = int(rng.integers(6, 50))
        stiffness = float(rng.choice(_STIFFNESSES))
        end = 2 * num_layers * (width + 1)
        rows, columns = 2.0 ** rng.uniform(8, 12), 2.0 ** rng.uniform(8, 12)
        stream, backward = self._node(0, end, rows * columns, "elementwise"), -1
        for layer in range(num_layers):
            begin = layer * (width + 1)
            before = stream
            # Now and then the sizes change, as they do between the levels of a U-Net.
            if rng.random() < 0.15:
                rows, columns = rows * 2.0 ** rng.integers(-1, 2), columns * 2.0 ** rng.integers(-1, 2)
            for step in range(width):
                is_product = bool(rng.random() < 0.4)
                size = rows * columns * 2.0 ** rng.normal(0.0, _SPREAD)
                now = begin + step
                there = self._node(now, end - now, size, "product" if is_product else "elementwise")
                mirrored = self._node(end - now - 1, end - now + int(rng.integers(1, 4)), size, "elementwise")
                self._edge(before, there, stiffness if step else 1.0)
                self._edge(there, mirrored, stiffness)
                if backward >= 0:
                    self._edge(mirrored, backward, stiffness if step else 1.0)
                if is_product:
                    weight = self._node(0, end, columns * columns * 2.0 ** rng.normal(0.0, _SPREAD), "weight")
                    self._edge(weight, there)
                    self._edge(weight, mirrored)
                if there > 2 * width and rng.random() < _CROSSING:
                    self._edge(int(rng.integers(there)), there)
                before, backward = there, mirrored
            # The residual stream joins what goes around the layer and what comes out of it.
            joined = self._node(begin + width, end - begin - width, rows * columns, "elementwise")
            self._edge(before, joined)
            self._edge(stream, joined)
            stream = joined

    def problem(self, name: str, *, tightness: float) -> AssignmentProblem:
        """Return the problem with a limit between the leanest and the largest assignment.

        Args:
            name: Name of the problem.
            tightness: Place of the limit on a logarithmic scale from the leanest assignment, 0, to the largest, 1.
        """
        ways = np.array([self._ways(strategy) for strategy in self._strategies])
        usages = [np.ceil(size / ways) for size in self._bytes]
        given = (self._intervals, self._costs, usages, self._edges, self._edge_costs)
        free = problem_of(*given, limit=0.0)
        leanest = free.peak_usage([int(own.argmin()) for own in usages])
        most = free.peak_usage([int(own.argmax()) for own in usages])
        return problem_of(*given, limit=float(np.ceil(leanest * (most / leanest) ** tightness)), name=name)

    def _node(self, begin: int, end: int, size: float, kind: str) -> int:
        """Add a node and return its number."""
        rng, costs = self._rng, []
        for strategy in self._strategies:
            cost = size * (0.05 if kind == "elementwise" else 0.5) / self._ways(strategy)
            for ways, part in zip(self._axes, strategy, strict=True):
                # Partial sums of a product, and those of a weight's gradient, are communicated along the axis.
                if (kind == "product" and part == _COLUMNS) or (kind == "weight" and part != _COLUMNS):
                    cost += size * 2.0 * (ways - 1) / ways * float(rng.uniform(0.8, 1.2))
            costs.append(np.rint(cost))
        self._intervals.append((begin, max(begin + 1, end)))
        self._bytes.append(size)
        self._costs.append(np.array(costs))
        return len(self._bytes) - 1

    def _edge(self, first: int, second: int, stiffness: float = 1.0) -> None:
        """Add the costs of moving the smaller of two nodes' tensors from one strategy to the other."""
        size = min(self._bytes[first], self._bytes[second])
        table = np.zeros((len(self._strategies),) * 2)
        turned = {_WHOLE: _WHOLE, _ROWS: _COLUMNS, _COLUMNS: _ROWS}
        is_turned = bool(self._rng.random() < _TURNED)
        for (one, before), (other, after) in itertools.product(enumerate(self._strategies), repeat=2):
            for ways, part, wanted in zip(self._axes, before, after, strict=True):
                part = turned[part] if is_turned else part  # noqa: PLW2901 # as the second node sees it
                # A part is cut out of a whole tensor for nothing; a gather costs more than an exchange.
                if part not in {wanted, _WHOLE}:
                    table[one, other] += size * (1.0 if wanted == _WHOLE else 1.0 / ways)
        self._edges.append((first, second))
        self._edge_costs.append(np.rint(table * stiffness * float(self._rng.uniform(0.8, 1.5))))

    def _ways(self, strategy: tuple[int, ...]) -> int:
        """Return the number of parts into which a strategy divides a tensor."""
        return int(np.prod([ways for ways, part in zip(self._axes, strategy, strict=True) if part != _WHOLE]))


def main(arguments: list[str] | None = None) -> int:
    """Write the problems and return the exit status."""
    parser = benchmark_parser("assignment.synthetic", __doc__, has_json=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files")
    parser.add_argument("--seeds", type=count_at_least(1), default=8, help="number of problems (8)")
    parser.add_argument("--from", type=count_at_least(0), default=0, dest="first", help="first seed (0)")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(given.first, given.first + given.seeds):
        problem = synthetic_problem(seed)
        path = given.folder / f"{problem.name}.json.gz"
        write_problem(problem, path)
        tell(f"{path}: {problem.num_nodes} nodes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
