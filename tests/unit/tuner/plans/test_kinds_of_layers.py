"""Plans of layers of every kind of block: never slower than by hand, and the optimum where that is known."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels.blocks.experts import Experts
from costmodels.job.layer_change import PLANNED_BLOCKS
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import cost_of, violations
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.graphs.kinds_of_blocks import KINDS, model_of
from tuner.planners.engine.outcome import ROUNDING, Known
from tuner.planners.sharding.axis_descent import descend
from tuner.planners.sharding.recursive import recursive_plan, whole
from tuner.planners.sharding.sharding_milp import shard_by_milp
from tuner.planners.sharding.sharding_terms import ShardingTerms
from tuner.plans.layer_planning import LayerPlanning
from tuner.plans.layer_plans import plan_layer
from tuner.plans.layer_tasks import LayerTask

CLUSTER = find_cluster("dgx-h100")


def job_of(*kinds, layers=2):
    """Layers of these kinds of blocks."""
    model = model_of(*(KINDS[kind] for kind in kinds), layers=layers)
    return TrainingJob(model=model, sequence_length=2048, global_batch_size=64, zero_stage=1)


def planned(job, **degrees):
    """What is planned for a shape of a job with four micro-batches."""
    planning = LayerPlanning(name="descent")
    config = ParallelConfig(**degrees)
    return plan_layer(LayerTask(job=job, cluster=CLUSTER, config=config, num_micro_batches=4, planning=planning))


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_is_planned_worse_than_by_hand(kind):
    """The plan runs, is as fast by the plans' own cost, and needs no more memory."""
    degrees = {"tp": 2, "ep": 4, "expert_tp": 1} if isinstance(KINDS[kind], Experts) else {"cp": 2, "tp": 2}
    found = planned(job_of(kind), **degrees)

    assert violations(found.found) == violations(found.by_hand) == ()
    assert found.cost.step_time_s <= found.by_hand_cost.step_time_s
    assert found.cost.peak_memory_bytes <= found.by_hand_cost.peak_memory_bytes * (1 + ROUNDING)


@pytest.mark.parametrize("kind", KINDS)
def test_one_axis_of_every_kind_ends_with_the_optimum(kind):
    """On one axis the integer program, which knows no search, finds nothing better in a layer.

    Of latent experts the descent finds it, too, but does not say so.
    """
    graph = transformer_graph(job_of(kind, layers=1), micro_batch_size=1)
    mesh, levels = whole(DeviceMesh(names=("cp",), sizes=(4,), cluster=CLUSTER))
    found = descend(recursive_plan(graph, mesh, levels), ShardingTerms(graph, mesh))
    outcome = shard_by_milp(graph, mesh)

    assert found.is_optimum == (kind != "latent experts")
    assert outcome.known is Known.OPTIMAL
    assert cost_of(found.plan).step_time_s == pytest.approx(outcome.best.cost, rel=1e-6)


def test_a_change_has_a_column_for_every_kind():
    """Blocks of a layer that are no decoder's have their own figures, and are known by the cost model's names."""
    job = job_of("gated delta net", "experts", "gated", "experts")
    change = planned(job, cp=2, tp=2).change

    assert change.blocks == (*PLANNED_BLOCKS, "gated_delta_net")
    assert set(job.model.planned_names) <= set(change.blocks)
    assert np.array(change.compute).shape == (2, 6)
    assert np.array(change.added_s).shape == (2, 4, 6)


def test_attention_to_an_earlier_layers_keys_is_refused_by_name():
    """What no graph is known of is refused, with the plan by hand as the nearest choice."""
    model = model_of(replace(KINDS["attention"], kv_projections=0))
    with pytest.raises(ConfigError, match=r"keys and values of an earlier layer.*megatron"):
        planned(replace(job_of("attention"), model=model), tp=2)
