"""The figures of one layer speak for all: a few planned layers give what many cost."""

import pytest

from benchmarks.papers.layer_figures import layer_figures
from costmodels.job.model_catalog import find_model
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.plan import cost_of
from tests.support.graphs.named_plans import mesh_of, plan_by_names

TENSOR = ("kv_heads", "heads", "ffn", "expert_ffn", "vocabulary")
PLANS = {
    "data": [("*", ("batch",))],
    "tensor": [("*", TENSOR)],
    "experts": [
        *((f"*.moe_mlp.{role}*", ("experts",)) for role in ("up", "down", "activation")),
        ("*.update", ("hidden",)),
        ("*_moment", ("hidden",)),
        ("*", ("batch",)),
    ],
}
MESH = mesh_of(axis=8)


def planned(name, rules, num_layers):
    """A step of so many layers by hand, and its cost."""
    job = TrainingJob(model=find_model(name), sequence_length=2048, global_batch_size=8)
    graph = transformer_graph(job, micro_batch_size=8, num_layers=num_layers)
    plan = plan_by_names(graph, MESH, axis=rules)
    return plan, cost_of(plan)


CASES = [("llama3-8b", "data"), ("llama3-8b", "tensor"), ("mixtral-8x7b", "experts"), ("mixtral-8x7b", "tensor")]


@pytest.mark.parametrize(("name", "rules"), CASES)
def test_three_layers_tell_what_seven_cost(name, rules):
    """Seven times a layer and the ends once is what the step of seven takes, but for one sum of gradients.

    Behind the last layer the gradient has one part, and behind all others two that are added up. States, activations or
    gradients, and what an operator needs come to the peak of seven layers, or 10% more.
    """
    figures = layer_figures(*planned(name, PLANS[rules], 3), num_layers=3)
    _, cost = planned(name, PLANS[rules], 7)
    shares = [(7, figures.layer), (1, figures.first), (1, figures.last)]

    step_s = sum(
        count * (share.forward_s + share.backward_s + share.once_s + share.synced_s) for count, share in shares
    )
    assert step_s == pytest.approx(cost.step_time_s, rel=2e-3)
    held_bytes = sum(
        count * (share.state_bytes + max(share.kept_bytes, share.gradient_bytes)) for count, share in shares
    )
    assert cost.peak_memory_bytes * 0.98 <= held_bytes + figures.working_bytes <= cost.peak_memory_bytes * 1.1


def test_data_parallelism_syncs_once_a_step_alone():
    """Gradients are added up once a step, and neither pass of a micro-batch sends anything.

    A recomputed layer keeps what it reads: one tensor of hidden vectors, of a device's sequences.
    """
    plan, cost = planned("llama3-8b", PLANS["data"], 3)
    figures = layer_figures(plan, cost, num_layers=3)

    synced_s = figures.layer.synced_s * 3 + figures.first.synced_s + figures.last.synced_s
    assert synced_s == pytest.approx(cost.comm_s, rel=1e-3)  # the loss is a number of each micro-batch
    assert figures.entry_bytes == 2048 * 4096 * 2
