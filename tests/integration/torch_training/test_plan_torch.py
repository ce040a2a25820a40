"""Modules distributed as `plan_torch` says compute what they did, on real ranks."""

import math

import pytest
import torch

from hardware.io.errors import ConfigError
from tests.support.programs import planned_ranks
from tuner.planners import plan_torch

BATCH = ({"op": "0.addmm", "dim": "result.0", "axis": "data"}, {"op": "2.addmm", "dim": "result.0", "axis": "data"})


@pytest.mark.parametrize(
    ("mesh", "pins", "share"),
    [({"model": 2}, (), 0.6), ({"data": 2, "model": 2}, (), 0.4), ({"data": 2, "model": 2}, BATCH, 0.6)],
    ids=["one axis", "two axes", "batch pinned"],
)
def test_a_distributed_module_computes_the_same(on_ranks, mesh, pins, share):
    """Loss and gradients differ by less than 1e-5, and each rank holds its share of the parameters, placed as planned.

    What ranks but the first had before doesn't matter, and a parameter in two places stays one.
    """
    for (found,) in on_ranks(math.prod(mesh.values()), planned_ranks.planned_step, mesh, pins):
        assert found["error"] < 1e-5
        assert found["local"] < share * found["whole"]
        assert found["is_planned"]
        assert found["is_tied"]
        assert found["is_dtensor"]


def test_what_does_not_belong_to_the_plan_is_refused(on_ranks):
    """Other numbers of ranks, meshes, modules and inputs than the plan's are told with what it has."""
    for told in on_ranks(2, planned_ranks.other_mesh):
        assert told[0] == "mesh = 'model=4': needs 4 ranks; 2 are here"
        assert told[1] == "device_mesh = {'data': 2}: is not the plan's; that is {'model': 4}"
        assert "is not in both, the module and the plan, with one shape" in told[2]
        assert told[3] == "inputs: must be trees like those that were planned"


def test_operators_without_a_rule_are_told_by_name():
    """An operator that no rule describes is warned of by its name, or refused if that is asked for."""

    class Second(torch.nn.Module):
        """A product, of which the second smallest element of each row is taken."""

        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)

        def forward(self, x):
            return torch.kthvalue(self.inner(x), 2)[0].sum()

    given = torch.zeros(8, 16)

    with pytest.warns(UserWarning, match="no sharding rule is known for .*kthvalue"):
        plan_torch(Second(), given, mesh="data=2")
    with pytest.raises(ConfigError, match="has operators without a sharding rule"):
        plan_torch(Second(), given, mesh="data=2", strict=True)
