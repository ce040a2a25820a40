"""Every price of a plan agrees with the plan where an axis can't cut a dim evenly beside the axes that cut it already.

Six or twelve rows are summed over columns, by axes of which some cut the rows as well; the reader wants rows on others.
"""

import math

import pytest

from costmodels.sharding.dims import rule_of
from costmodels.sharding.graph import INPUT, GraphBuilder, TensorKind
from costmodels.sharding.layouts import PARTIAL, REPLICATED
from costmodels.sharding.plan import cost_of
from tests.support.graphs.random_graphs import all_plans, mesh_of
from tuner.planners.engine.outcome import Known
from tuner.planners.sharding.class_costs import ClassCosts, encode_rows
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms


def summed_rows(rows, num_readers):
    """Rows by 12 columns, the sums of the rows, and so many operators that read the sums."""
    graph = GraphBuilder(name="summed")
    source = graph.source(INPUT, "x", (rows, 12), 3e5, TensorKind.DATA, ("a", "c"))
    sums = graph.tensor("sums", (rows,), 3e5, TensorKind.ACTIVATION)
    graph.op("sum", "any", (source,), (sums,), rule_of("a c -> a", {"a": rows, "c": 12}))
    for number in range(num_readers):
        read = graph.tensor(f"read{number}", (rows,), 3e5, TensorKind.ACTIVATION)
        graph.op(f"read{number}", "any", (sums,), (read,), rule_of("a -> a", {"a": rows}))
    return graph.done()


def is_refused(plan):
    """Whether the sums of some axis are added up everywhere although all readers want the rows on it."""
    sums = next(number for number, tensor in enumerate(plan.graph.tensors) if tensor.name == "sums")
    written, lies = plan.written(*plan.graph.maker[sums]), plan.layout(sums)
    return any(
        old == PARTIAL and new == REPLICATED and {target[axis] for target in plan.targets(sums)} == {0}
        for axis, (old, new) in enumerate(zip(written, lies, strict=True))
    )


@pytest.mark.parametrize(("rows", "sizes", "num_readers"), [(6, (6, 2), 1), (6, (2, 6), 2), (12, (4, 3, 2), 1)])
def test_all_prices_of_uneven_sums_agree(rows, sizes, num_readers):
    """Tables, classes and the integer program charge what the plan does, and shares of readers never charge more."""
    graph, mesh = summed_rows(rows, num_readers), mesh_of(*sizes)
    terms, costs = ShardingTerms(graph, mesh), ClassCosts(graph, mesh, range(len(graph.ops)))
    refused = [plan for plan in all_plans(graph, mesh) if is_refused(plan)]

    assert refused
    for plan in refused[:: math.ceil(len(refused) / 40)]:
        rows_of = [tuple(row) for row in plan.served.tolist()]
        found, one_choice = cost_of(plan), [(row,) for row in rows_of]
        figures = costs.figures([encode_rows(row) for row in rows_of])
        program = shard_by_milp(
            graph,
            mesh,
            allowed=lambda op, rows_of=rows_of: [rows_of[op]],
            memory_bytes=found.peak_memory_bytes * (1 + 1e-5),
        )

        assert terms.least(one_choice, rows_of).cost_s == pytest.approx(found.step_time_s)
        assert (figures.step_time_s, figures.peak_memory_bytes) == (
            pytest.approx(found.step_time_s),
            pytest.approx(found.peak_memory_bytes),
        )
        assert program.known is Known.OPTIMAL
        assert program.bound == pytest.approx(found.step_time_s, rel=1e-6)
        shares = sum(float(term.table) for term in terms.pairwise(one_choice))
        assert shares <= found.step_time_s * (1 + 1e-9)
