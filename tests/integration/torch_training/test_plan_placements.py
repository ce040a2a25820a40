"""Exported DTensor placements deal out what the plan's layouts say, on real ranks."""

import math

import numpy as np
import pytest

from costmodels.job.training_job import TrainingJob
from costmodels.sharding.exports.torch_placements import torch_placements
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.layouts import PARTIAL
from tests.support.graphs.named_plans import mesh_of
from tests.support.graphs.shared_factors import served_together
from tests.support.programs import placement_ranks
from tests.support.programs.training_ranks import LLAMA

SPREAD = tuple((pattern, ("hidden",)) for pattern in ("*.weight", "*.update", "*_moment"))
TENSOR = ("kv_heads", "heads", "ffn", "vocabulary")


def graph():
    """A layer of a tiny model, whose vocabulary four can share."""
    model = LLAMA.changed(vocab_size=256)
    job = TrainingJob(model=model, sequence_length=16, global_batch_size=8, precision="fp32")
    return transformer_graph(job, micro_batch_size=4, num_layers=1)


def held(plan, tensor, rank):
    """The numbers of the elements that a rank holds: each dim dealt out by a digit for each axis that cuts it.

    An index of the dim is written with these digits first, in the mesh's order, and the place in a part last.
    """
    sizes, shape = plan.mesh.sizes, plan.graph.tensors[tensor].shape
    place = np.unravel_index(rank, sizes)
    kept = np.arange(math.prod(shape)).reshape(shape)
    for dim, size in enumerate(shape):
        axes = [axis for axis, cut in enumerate(plan.layout(tensor)) if cut == dim]
        ways = [sizes[axis] for axis in axes]
        digits = np.unravel_index(np.arange(size), (*ways, size // math.prod(ways)))
        mine = np.ones(size, dtype=bool)
        for axis, digit in zip(axes, digits, strict=False):
            mine &= digit == place[axis]
        kept = np.compress(mine, kept, axis=dim)
    return kept


@pytest.mark.parametrize(
    ("mesh", "axes", "name"),
    [
        ({"model": 2}, {"model": [("*", TENSOR)]}, "layers.0.dense_mlp.up.weight"),
        ({"data": 2}, {"data": [*SPREAD, ("*", ("batch",))]}, "layers.0.attention.out.weight"),
        (
            {"data": 2, "model": 2},
            {"data": [*SPREAD, ("*", ("batch",))], "model": [("*", TENSOR)]},
            "layers.0.attention.qkv.query_weight",
        ),
        ({"data": 2, "model": 2}, {"data": [*SPREAD], "model": [*SPREAD]}, "layers.0.dense_mlp.down.weight"),
        ({"data": 2, "model": 2}, {"data": [("*", ("batch",))], "model": [("*", ("batch",))]}, "tokens"),
    ],
)
def test_ranks_hold_what_the_layout_says(on_ranks, mesh, axes, name):
    """Every rank's local shard is the slice that the plan's layout gives its place, two axes on a dim too."""
    plan = served_together(graph(), _mesh(mesh), **axes)
    placements = torch_placements(plan)
    number = next(number for number, tensor in enumerate(plan.graph.tensors) if tensor.name == name)
    assert any(dim >= 0 for dim in plan.layout(number))

    shape, count = plan.graph.tensors[number].shape, math.prod(mesh.values())
    told = on_ranks(count, placement_ranks.distribute, placements.mesh, shape, placements.arguments[name])

    for rank, (local, is_whole) in enumerate(told):
        expected = held(plan, number, rank)
        assert local == (expected.shape, expected.flatten().tolist())
        assert is_whole


def _mesh(axes):
    """A mesh on some of eight devices."""
    whole = mesh_of(outside=8 // math.prod(axes.values()), **axes)
    return type(whole)(names=tuple(axes), sizes=tuple(axes.values()), cluster=whole.cluster)


def test_relayouts_are_redistributions():
    """Each change of a layout is told with its operator, from what was written or lies to what is wanted."""
    plan = served_together(
        graph(), _mesh({"data": 2, "model": 2}), data=[*SPREAD, ("*", ("batch",))], model=[("*", TENSOR)]
    )
    told = {(each.op, each.at, each.slot): each for each in torch_placements(plan).redistributions}

    gathered = told["layers.0.dense_mlp.down", "use", 1]
    assert (gathered.before, gathered.after) == (("Shard(1)", "Shard(0)"), ("Replicate()", "Shard(0)"))
    summed = told["layers.0.dense_mlp.down", "def", 0]
    assert (summed.before, summed.after) == (("Shard(0)", "Partial()"), ("Shard(0)", "Replicate()"))
    scattered = told["layers.0.dense_mlp.down.weight_gradient", "def", 0]
    assert (scattered.before, scattered.after) == (("Partial()", "Shard(0)"), ("Shard(1)", "Shard(0)"))


def test_nothing_is_left_partial():
    """What a tensor becomes is never a partial sum, and nothing is told that doesn't change."""
    plan = served_together(graph(), _mesh({"model": 4}), model=[("*", TENSOR)])

    for each in torch_placements(plan).redistributions:
        assert "Partial()" not in each.after
        assert each.before != each.after
    assert PARTIAL not in {dim for number in range(len(plan.graph.tensors)) for dim in plan.layout(number)}
