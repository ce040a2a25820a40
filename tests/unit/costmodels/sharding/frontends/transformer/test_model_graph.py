"""The graph of a transformer's training step: what it holds, counted against the model's sizes."""

import functools
import math
from collections import Counter
from dataclasses import replace

import pytest

from costmodels.blocks.experts import slots_per_expert
from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.operators.layer_operators import step_operators
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import STATE, TensorKind
from hardware.io.errors import ConfigError
from tests.support.graphs.small_models import SMALL, small_job
from tests.support.settings.model_parts import times_of_blocks
from tests.support.settings.random_settings import grid_of

RUNTIME = replace(find_runtime("megatron-core"), vocabulary_multiple=1)


def job_of(name, sequence_length=2048, **options):
    """A job that trains a catalog model."""
    return TrainingJob(model=find_model(name), sequence_length=sequence_length, global_batch_size=8, **options)


@functools.cache
def graph_of(name, **options):
    """The graph of a catalog model with one sequence of 2,048 tokens."""
    return transformer_graph(job_of(name), micro_batch_size=1, **options)


def states(graph, kind):
    """The tensors of a kind that live from step to step."""
    kept = [graph.tensors[tensor] for op in graph.ops if op.primitive == STATE for tensor in op.results]
    return [tensor for tensor in kept if tensor.kind == kind]


@pytest.mark.parametrize("name", [*model_names(), *SMALL])
def test_the_parameters_are_the_models(name):
    """The graph of every catalog model and of any variant has exactly its parameters, and two moments for each."""
    graph = transformer_graph(small_job(name), micro_batch_size=2) if name in SMALL else graph_of(name)
    count = (SMALL[name] if name in SMALL else find_model(name)).num_parameters

    assert sum(math.prod(tensor.shape) for tensor in states(graph, TensorKind.PARAMETER)) == count
    assert sum(math.prod(tensor.shape) for tensor in states(graph, TensorKind.OPTIMIZER)) == 2 * count


@pytest.mark.parametrize("name", model_names())
def test_flops_are_the_cost_models(name):
    """All operators together have the FLOPs that the cost model counts for its own, prediction modules left out."""
    job = job_of(name)
    counts = times_of_blocks(job.model, with_prediction=False)
    operators = step_operators(job, RUNTIME, grid_of(ParallelConfig()))

    flop = sum(op.flop for op in graph_of(name).ops)

    assert flop == pytest.approx(sum(counts[op.block] * float(op.flop[0]) for op in operators), rel=1e-12)


def test_the_first_layers_alone():
    """A graph may have the first layers only; of DeepSeek-V3 three are dense, and the fourth has experts.

    A rule is the same object in all layers, so that what a planner finds out about it holds for all of them.
    """
    graph = graph_of("deepseek-v3", num_layers=4)
    few, many = graph_of("llama3-70b", num_layers=2), graph_of("llama3-70b")

    cores = [op.name for op in graph.ops if op.primitive == "attention"]
    experts = [op.name for op in graph.ops if op.primitive == "batch_matmul"]
    assert cores == [f"layers.{number}.attention.core" for number in range(4)]
    assert experts == ["layers.3.moe_mlp.up", "layers.3.moe_mlp.down"]
    assert len({id(op.rule) for op in few.ops}) == len({id(op.rule) for op in many.ops})
    assert len(many.ops) > 30 * len(few.ops)


def test_every_dim_has_a_name():
    """Every dim of every tensor has a name that says what it is, but for the loss, which has one element."""
    known = {
        *("batch", "sequence", "hidden", "heads", "kv_heads", "head_dim", "gates", "ffn", "vocabulary"),
        *("experts", "slots", "query_rank", "latent_rank"),
    }
    for name in ("llama3-8b", "deepseek-v3"):
        graph = graph_of(name, num_layers=4)
        names = {dim for tensor in graph.tensors if tensor.shape != (1,) for dim in tensor.dim_names}

        assert names <= known
        assert all(len(set(tensor.dim_names)) == len(tensor.shape) for tensor in graph.tensors)


def test_widths_and_precisions_are_the_jobs():
    """Parameters, activations and gradients are as wide as the job stores them, moments and statistics float32."""
    graph = transformer_graph(job_of("mixtral-8x7b", precision="fp8"), micro_batch_size=1, num_layers=1)
    widths = {kind: {t.element_bytes for t in graph.tensors if t.kind == kind} for kind in TensorKind}
    precisions = Counter(op.precision for op in graph.ops if op.flop)

    assert widths[TensorKind.PARAMETER] == widths[TensorKind.GRADIENT] == {2}
    assert widths[TensorKind.OPTIMIZER] == {4}
    assert {t.name for t in graph.tensors if t.kind == "activation" and t.element_bytes == 4} == {
        "layers.0.attention.core.normaliser",
        "head.cross_entropy",
        *(f"head.cross_entropy.{part}" for part in ("maximum", "sum", "label")),
    }
    # head and router in three products each, and the core in two operators, leave the narrow type alone
    assert precisions == {"bf16": 3 + 3 + 2, "fp8": 3 * 4}


@pytest.mark.parametrize(("optimizer", "moments"), [("adam", 2), ("sgd", 1)])
def test_every_parameter_is_updated_once(optimizer, moments):
    """The step makes the next step's parameters and moments of this one's, each in one operator of its own."""
    graph = graph_of("gpt-13b", num_layers=2, optimizer=optimizer)
    parameters = states(graph, "parameter")
    updates = [op for op in graph.ops if op.primitive == optimizer]

    assert [graph.tensors[op.operands[0]].name for op in updates] == [tensor.name for tensor in parameters]
    assert all(op.operands for op in graph.ops if op.primitive == STATE)
    assert len(states(graph, "optimizer")) == moments * len(parameters)


def test_a_tied_table_has_one_gradient_of_two_parts():
    """The head's and the embedding's part of a tied table's gradient are added up before the update."""
    graph = graph_of("gpt-13b", num_layers=1)
    (total,) = (op for op in graph.ops if op.name == "embedding.weight.gradient_sum")

    assert [graph.tensors[tensor].name for tensor in total.operands] == [
        "head.logits.weight_gradient",
        "embedding.lookup.gradient",
    ]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "slots"),
    [(4096, 2, 8, 1024), (4096, 8, 256, 128), (4096, 6, 160, 160), (8, 2, 4, 4), (100, 1, 3, 36), (97, 2, 8, 25)],
)
def test_slots_are_the_balanced_share(tokens, top_k, experts, slots):
    """Slots are the balanced share, rounded up by an eighth at most, and a multiple that cuts the sequence often."""
    found = slots_per_expert(tokens, top_k=top_k, num_experts=experts)
    share = tokens * top_k / experts

    assert found == slots
    assert share <= found <= math.ceil(share) * 9 / 8


@pytest.mark.parametrize(
    ("key", "value"), [("micro_batch_size", 0), ("num_layers", 0), ("num_layers", 41), ("optimizer", "adm")]
)
def test_sizes_out_of_range_are_refused(key, value):
    """A size that cannot be is the user's mistake, and is called by its name; so is too long a sequence."""
    with pytest.raises(ConfigError, match=key):
        transformer_graph(job_of("gpt-13b"), **{"micro_batch_size": 1, key: value})
    with pytest.raises(ConfigError, match="sequence_length"):
        transformer_graph(job_of("gpt-13b", sequence_length=2**20), micro_batch_size=1)
