"""Plans of the layers of a study's candidates, beside the plan by hand: never slower, never larger, and as pinned."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.block_figures import block_figures, runs_once
from costmodels.sharding.graph import TensorKind
from costmodels.sharding.layouts import local_share
from costmodels.sharding.plan import violations
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tuner.planners.engine.outcome import ROUNDING
from tuner.planners.sharding.pins import Pin
from tuner.plans import layer_plans
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.layer_plans import plan_layer, plan_lines, summary_of
from tuner.plans.layer_tasks import LayerTask, layer_tasks, sharing_key

CLUSTER = find_cluster("dgx-h100")
SHAPES = {
    "tp": ("llama3-8b", ParallelConfig(tp=2)),
    "cp": ("llama3-8b", ParallelConfig(cp=2)),
    "cp and tp": ("llama3-8b", ParallelConfig(cp=2, tp=2)),
    "experts": ("mixtral-8x7b", ParallelConfig(tp=2, ep=4)),
    "experts on every rank": ("mixtral-8x7b", ParallelConfig(cp=2)),
}
UP_BY_HIDDEN = Pin(op="*.dense_mlp.up", dim="hidden", axis="tp")


def task_of(model, config, planner, pins=()):
    """The task of a shape with four micro-batches."""
    job = TrainingJob(model=find_model(model), sequence_length=4096, global_batch_size=64)
    planning = LayerPlanning(name=planner, pins=tuple(pins))
    return LayerTask(job=job, cluster=CLUSTER, config=config, num_micro_batches=4, planning=planning)


@cache
def found_for(shape, planner, pins=()):
    """What is planned for a shape, which takes up to a second."""
    return plan_layer(task_of(*SHAPES[shape], planner, pins))


def kept_bytes(plan):
    """What a device keeps of each parameter, moment and gradient from one micro-batch to the next, by name."""
    graph, sizes = plan.graph, plan.mesh.sizes
    found = {}
    for number, tensor in enumerate(graph.tensors):
        maker, slot = graph.maker[number]
        if runs_once(graph, maker):
            found[tensor.name] = tensor.num_bytes * local_share(plan.layout(number), sizes)
        elif tensor.kind is TensorKind.GRADIENT:
            found[tensor.name] = tensor.num_bytes * local_share(plan.written(maker, slot), sizes)
    return found


@pytest.mark.parametrize(("shape", "planner"), [*product(SHAPES, ["recursive", "descent"])])
def test_no_plan_is_worse_than_the_one_by_hand(shape, planner):
    """It runs, is as fast by the plans' own cost, needs no more memory, and no device keeps more of any weight."""
    planned = found_for(shape, planner)
    own, by_hand = kept_bytes(planned.found), kept_bytes(planned.by_hand)

    assert violations(planned.found) == ()
    assert planned.cost.step_time_s <= planned.by_hand_cost.step_time_s
    assert planned.cost.peak_memory_bytes <= planned.by_hand_cost.peak_memory_bytes * (1 + ROUNDING)
    assert [name for name in own if own[name] > by_hand[name] * (1 + ROUNDING)] == []
    assert (planned.change is None) == bool((planned.found.served == planned.by_hand.served).all())


def test_the_plan_by_hand_changes_nothing():
    """Under megatron nothing is changed."""
    planned = found_for("experts", "megatron")

    assert planned.change is None
    assert planned.found is planned.by_hand


def test_the_same_shape_has_the_same_plan():
    """Planned again, every operator is served alike, and the summary is the same."""
    task = task_of(*SHAPES["experts"], "descent")
    once, again = found_for("experts", "descent"), plan_layer(task)

    assert (once.found.served == again.found.served).all()
    assert summary_of(task, once) == summary_of(task, again)
    assert once.change == again.change


@pytest.mark.parametrize("shape", ["cp", "cp and tp", "experts"])
def test_a_change_tells_what_the_figures_differ_by(shape):
    """Ratios and additions make the plan's own figures of the ones by hand, in every block and part; with cp the step
    is shorter by a twentieth at least.
    """
    planned = found_for(shape, "descent")
    own, by_hand = (
        block_figures(plan, cost)
        for plan, cost in ((planned.found, planned.cost), (planned.by_hand, planned.by_hand_cost))
    )
    change = planned.change

    exposed_s = np.array(change.exposed) * by_hand.exposed_s.sum(axis=0) + np.array(change.added_s).sum(axis=0)
    assert np.array(change.compute) * by_hand.compute_s == pytest.approx(own.compute_s)
    assert exposed_s == pytest.approx(own.exposed_s.sum(axis=0))
    assert np.array(change.once_s) == pytest.approx(own.once_s - by_hand.once_s)
    assert (np.array(change.exposed) <= 1).all()
    assert (np.array(change.added_s) >= 0).all()
    assert shape == "experts" or planned.cost.step_time_s < 0.95 * planned.by_hand_cost.step_time_s


# Which shapes there are


def test_equal_shapes_are_planned_once():
    """Candidates that differ in pp, dp, vpp or recomputation have one plan; a lone device's layers have none, nor has a
    shape without a plan by hand, as with more ranks of tp than key heads.
    """
    first, other = ParallelConfig(tp=2, dp=4), ParallelConfig(tp=2, dp=2, pp=2)
    configs = [first, other, replace(other, vpp=2, recompute="full"), ParallelConfig(tp=4, dp=2)]
    configs += [replace(first, mbs=2), ParallelConfig(dp=8)]
    task = task_of(*SHAPES["tp"], "descent")
    tasks = layer_tasks(task.job, CLUSTER, ConfigGrid.from_configs(configs), task.planning)

    assert [(each.config.tp, each.config.mbs) for each in tasks] == [(2, 1), (4, 1), (2, 2)]
    assert [each.num_micro_batches for each in tasks] == [32, 32, 8]
    sixteen = replace(task_of("llama3-8b", ParallelConfig(tp=16), "descent"), cluster=CLUSTER.with_hosts(2))
    assert plan_layer(sixteen) is None


# Pins


@pytest.mark.parametrize("planner", ["recursive", "descent"])
def test_pins_hold_and_are_reported(planner):
    """The pinned operators are cut as the pin says, also where that makes the step longer, and the change says so."""
    pin = Pin(op="*.dense_mlp.*norm", dim="sequence", axis="cp")
    planned = found_for("cp", planner, (pin,))
    graph = planned.found.graph
    rows = {
        op.name: op.rule.factors[row[0]].name
        for op, row in zip(graph.ops, planned.found.served.tolist(), strict=True)
        if op.name.endswith("dense_mlp.norm")
    }

    assert rows == {f"layers.{layer}.dense_mlp.norm": "sequence" for layer in range(2)}
    assert planned.pins == ((pin, 2, 2, 2),)
    summary = summary_of(task_of(*SHAPES["cp"], planner, (pin,)), planned)
    assert summary["pins"] == [{"pin": pin.in_words, "ops": 2, "held": 2}]
    assert "  pin *.dense_mlp.*norm sequence on cp: holds at 2 of 2 operators" in plan_lines(summary)


def test_a_pin_that_costs_time_is_kept_and_counted():
    """A pinned plan that is slower than the one by hand stands, and its summary says by how much."""
    planned = found_for("tp", "descent", (UP_BY_HIDDEN,))

    assert kept_bytes(planned.found) == kept_bytes(planned.by_hand)
    assert planned.pins == ((UP_BY_HIDDEN, 2, 2, 2),)
    assert planned.cost.step_time_s > planned.by_hand_cost.step_time_s
    assert planned.change is not None
    lines = plan_lines(summary_of(task_of(*SHAPES["tp"], "descent", (UP_BY_HIDDEN,)), planned))
    assert "% more than by hand" in lines[0]
    assert any("GiB more than by hand; memory predictions count what layers keep of it" in line for line in lines)


def test_a_pin_that_keeps_more_of_a_weight_does_not_hold():
    """What a device keeps of weights is what the memory model counts: the plan by hand stands, and the pin is told."""
    whole = Pin(op="*.dense_mlp.up.weight_gradient", dim="sequence", axis="tp")
    planned = found_for("tp", "descent", (whole,))

    assert planned.change is None
    assert planned.pins == ((whole, 2, 0, 2),)


def test_a_pin_is_for_the_shapes_that_have_its_devices():
    """On a mesh without its axis, or with too few devices along it, a pin asks for nothing."""
    unpinned = found_for("cp", "descent")
    for pin in (UP_BY_HIDDEN, Pin(op="*.dense_mlp.up", dim="hidden", ways=4), replace(UP_BY_HIDDEN, ways=4)):
        planned = found_for("cp", "descent", (pin,))
        assert planned.pins == ()
        assert (planned.found.served == unpinned.found.served).all()


@pytest.mark.parametrize(
    ("pin", "key", "words"),
    [
        (Pin(op="*.mlp_up", dim="ffn", axis="tp"), "pins[1].op", "matches no operator"),
        (Pin(op="*.dense_mlp.up", dim="feet", axis="tp"), "pins[1].dim", "is no dim of layers.0.dense_mlp.up"),
        (Pin(op="*.dense_mlp.norm", dim="hidden", axis="tp"), "pins[1].dim", "can't be cut"),
        (Pin(op="*.dense_mlp.up", dim="feet", axis="cp"), "pins[1].dim", "is no dim of layers.0.dense_mlp.up"),
        (Pin(op="*.dense_mlp.up", dim="ffn", axis="tp"), "pins[1]", "no level is left"),
    ],
)
def test_impossible_pins_are_the_users_mistake(pin, key, words):
    """Each is told by its number, also where the pin before it is for other shapes, or its own axis is not there."""
    first = UP_BY_HIDDEN if pin.dim == "ffn" else replace(UP_BY_HIDDEN, axis="cp")
    with pytest.raises(ConfigError) as told:
        found_for("tp", "descent", (first, pin))

    assert told.value.key == key
    assert words in told.value.rule


def test_shapes_that_share_tables_are_planned_as_alone():
    """Meshes of the same sizes share graph, tables and the planner's own plan; each ends with the plan it has alone."""
    tasks = [
        task_of("llama3-8b", ParallelConfig(**degrees), "descent")
        for degrees in ({"cp": 2}, {"up": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"up": 2, "tp": 2}, {"cp": 2})
    ]
    assert len({sharing_key(task) for task in tasks}) == 2

    together = [plan_layer(task) for task in sorted(tasks, key=sharing_key)]
    alone = []
    for task in sorted(tasks, key=sharing_key):
        for kept in (layer_plans._graph_of, layer_plans._terms_of, layer_plans._own_plan_without_pins):
            kept.cache_clear()
        alone.append(plan_layer(task))

    for one, other in zip(together, alone, strict=True):
        assert (one.found.served == other.found.served).all()
        assert one.found.mesh.names == other.found.mesh.names
        assert one.cost.step_time_s == other.cost.step_time_s
        assert one.change == other.change


def test_a_wish_takes_the_nearest_ways_of_each_shape():
    """A soft pin whose ways do not divide a shape's devices asks for the nearest number that does, and says so."""
    wish = Pin(op="*.dense_mlp.up", dim="ffn", ways=3, weight_s=1.0)
    planned = found_for("tp", "descent", (wish,))
    summary = summary_of(task_of(*SHAPES["tp"], "descent", (wish,)), planned)

    ((_, num_ops, num_held, ways),) = planned.pins
    assert (num_ops, num_held, ways) == (2, 2, 2)
    assert summary["pins"] == [{"pin": wish.in_words, "ops": 2, "held": 2, "taken_ways": 2}]
    told = "taken as 2 ways, the nearest that divides devices and dim; holds at 2 of 2 operators"
    assert f"  pin {wish.in_words}: {told}" in plan_lines(summary)
