"""What a planned step takes by blocks, and what plans of several micro-batches add up once."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.job.layer_change import PLANNED_BLOCKS
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.proxy_job import with_layers
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.block_figures import block_figures, kept_bytes, ratios, runs_once
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.plan import cost_of
from costmodels.step.breakdown import EXPOSED_PARTS
from hardware.cluster_file import find_cluster
from tuner.planners.sharding.hand_made import hand_made
from tuner.planners.sharding.layer_axes import layer_axes

ATTENTION, DENSE, MOE, EMBEDDING, HEAD = map(
    PLANNED_BLOCKS.index, ("attention", "dense_mlp", "moe_mlp", "embedding", "head")
)


def planned(model, *, layers=2, micro_batches=1, **degrees):
    """The plan by hand of a few layers and micro-batches, and what it costs."""
    config = ParallelConfig(**degrees)
    axes = layer_axes(config)
    job = TrainingJob(model=with_layers(find_model(model), layers), sequence_length=2048, global_batch_size=64)
    graph = transformer_graph(job, micro_batch_size=axes.get("dp", 1))
    ops = tuple(
        op if runs_once(graph, number) else replace(op, times=micro_batches) for number, op in enumerate(graph.ops)
    )
    graph = replace(graph, ops=ops)
    mesh = DeviceMesh(names=tuple(axes), sizes=tuple(axes.values()), cluster=find_cluster("dgx-h100", hosts=2))
    plan = hand_made(graph, mesh, config)
    return plan, cost_of(plan)


@pytest.mark.parametrize(
    ("model", "layers", "degrees"),
    [("llama3-8b", 2, {"tp": 2, "cp": 2}), ("mixtral-8x7b", 2, {"tp": 2, "ep": 4}), ("deepseek-v3", 2, {"up": 2})],
)
def test_blocks_add_up_to_the_step(model, layers, degrees):
    """The figures of all blocks, each as often as layers have it, are the step's but for the updates' compute."""
    plan, cost = planned(model, layers=layers, **degrees)
    figures = block_figures(plan, cost)

    model = find_model(model)
    num_dense = layers if not model.is_moe else min(model.plain.num_dense_layers, layers // 2)
    counts = np.zeros(len(PLANNED_BLOCKS))
    counts[[ATTENTION, DENSE, MOE, EMBEDDING, HEAD]] = layers, num_dense, layers - num_dense, 1, 1
    updates_s = sum(seconds for number, seconds in enumerate(cost.compute_s.tolist()) if runs_once(plan.graph, number))
    together_s = figures.compute_s.sum(axis=0) + figures.exposed_s.sum(axis=(0, 1)) + figures.once_s
    assert updates_s > 0
    assert float(counts @ together_s) + updates_s == pytest.approx(cost.step_time_s)


def test_more_micro_batches_cost_each_as_much_and_the_weights_once():
    """Figures are of one micro-batch, however many there are, and those of the weights of the step."""
    degrees = {"tp": 2, "cp": 2}
    one, eight = (block_figures(*planned("llama3-8b", micro_batches=count, **degrees)) for count in (1, 8))

    for name in ("compute_s", "exposed_s", "once_s"):
        assert getattr(eight, name) == pytest.approx(getattr(one, name))
    assert one.once_s.sum() > 0


def test_layers_that_are_alike_count_as_one():
    """Three layers have the figures of two, but for a sum that the last one's gradient does not need."""
    two, three = (block_figures(*planned("llama3-8b", layers=layers, tp=4)) for layers in (2, 3))

    assert three.compute_s[0] == pytest.approx(two.compute_s[0])
    assert three.compute_s[1] == pytest.approx(two.compute_s[1], rel=1e-2)
    assert three.exposed_s.sum(axis=0)[0, DENSE] == pytest.approx(two.exposed_s.sum(axis=0)[0, DENSE], rel=0.1)


def test_parts_are_called_after_the_axes():
    """What goes along tp is tp's, a ring's is cp's, and experts' exchanges are ep's, whichever axes they go along."""
    part = EXPOSED_PARTS.index
    dense = block_figures(*planned("llama3-8b", tp=2, cp=2)).exposed_s.sum(axis=0)
    for degrees in ({"tp": 2, "ep": 4}, {"tp": 4, "ep": 4, "expert_tp": 1}, {"cp": 4, "ep": 4}):
        experts = block_figures(*planned("mixtral-8x7b", **degrees)).exposed_s.sum(axis=0)
        assert experts[part("ep"), MOE] > 0
        assert experts[part("cp"), MOE] == 0
        assert experts[part("ep"), ATTENTION] == 0

    assert dense[part("tp"), [ATTENTION, DENSE, EMBEDDING, HEAD]].min() > 0
    assert dense[part("cp"), ATTENTION] > 0
    assert dense[part("cp"), DENSE] == 0
    assert not dense[[part("up"), part("ep")]].any()


def test_ratios_of_nothing_are_one():
    """Where there is nothing to compare with, nothing is changed."""
    assert ratios(np.array([[1.0, 3.0, 0.0]]), np.array([[2.0, 0.0, 0.0]])).tolist() == [[0.5, 1.0, 1.0]]


# What several micro-batches add up once


def test_gradients_of_all_micro_batches_are_added_up_once():
    """Partial sums of gradients wait for the update, which reads them once; those of activations are wanted at once.

    Sums run as often as they are made or read, whichever is less; who reads nothing, as a loss, as often as it is made.
    """
    plan, cost = planned("llama3-8b", micro_batches=8, cp=2, tp=2)
    graph = plan.graph
    sums = {tensor.name: count for tensor, count in zip(graph.tensors, graph.sums, strict=True)}
    times = {}
    for each in cost.collectives:
        times.setdefault(graph.tensors[each.tensor].kind, set()).add(each.times)

    assert times == {TensorKind.GRADIENT: {1}, TensorKind.ACTIVATION: {8}, TensorKind.PARAMETER: {1}}
    assert sums["layers.0.dense_mlp.up.weight_gradient"] == sums["layers.0.dense_mlp.up.weight"] == 1
    assert sums["layers.0.dense_mlp.down"] == sums["head.cross_entropy"] == 8


def test_what_is_kept_is_what_the_backward_pass_reads():
    """Sequence parallelism cuts what norms and residuals keep, and a layer's input, which is all that it hands on."""
    figures = [
        block_figures(*planned("llama3-8b", layers=3, tp=4, sequence_parallel=is_parallel))
        for is_parallel in (False, True)
    ]
    plan, _ = planned("llama3-8b", layers=3, tp=4)
    whole_bytes = 2048 * find_model("llama3-8b").hidden_size * 2

    assert figures[0].entry_bytes == whole_bytes
    assert figures[1].entry_bytes == whole_bytes / 4
    assert (figures[1].kept_bytes[[ATTENTION, DENSE]] < 0.9 * figures[0].kept_bytes[[ATTENTION, DENSE]]).all()
    assert kept_bytes(plan).sum() < cost_of(plan).peak_memory_bytes
    assert not kept_bytes(plan)[plan.graph.first_backward :].any()
