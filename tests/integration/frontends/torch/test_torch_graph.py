"""Graphs of torch modules: what is traced, left out, kept from step to step, and what a plan of one costs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody calls it
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.torch_modules import FACTORIES, LLAMA_3_8B, SMALL, Decoder, decoder_program, next_token_loss
from costmodels.job.model_catalog import find_model
from costmodels.job.training_job import TrainingJob
from costmodels.sharding.device_mesh import mesh_of
from costmodels.sharding.frontends.transformer.model_graph import transformer_graph
from costmodels.sharding.graph import CONSTANT, INPUT, STATE, TensorKind
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.graphs.torch_graphs import graph_of_torch
from tests.support.graphs.torch_variants import VARIANTS, Varied
from tuner.planners.planning import PlannerOptions, plan_graph


def computed(graph, *, backward=False):
    """Return the primitives of the operators of a pass, in order."""
    ops = graph.ops[graph.first_backward :] if backward else graph.ops[: graph.first_backward]
    return [op.primitive for op in ops if not op.is_source]


def named(graph, name):
    """The operator of a name."""
    return next(op for op in graph.ops if op.name == name)


def total_flop(graph):
    """Return the FLOPs of a whole step."""
    return sum(op.flop * op.times for op in graph.ops)


def parameter_bytes(graph):
    """Return the size of all parameters that a step keeps [bytes]."""
    kept = [graph.tensors[op.results[0]] for op in graph.ops if op.primitive == STATE]
    return sum(tensor.num_bytes for tensor in kept if tensor.kind == TensorKind.PARAMETER)


@pytest.mark.parametrize("name", [name for name in FACTORIES if "small" in name])
def test_modules_of_the_zoo_are_known_whole(name):
    """Every operator has a rule, every name is unique and the same each time, and every parameter has two moments."""
    module, *rest = FACTORIES[name]()
    graph = graph_of_torch(module, *rest)
    again = graph_of_torch(*FACTORIES[name]())

    assert graph.unknown == ()
    assert [op.name for op in graph.ops] == [op.name for op in again.ops]
    states = {op.name: op for op in graph.ops if op.primitive == STATE}
    parameters = [name for name, _ in module.named_parameters()]
    assert states.keys() >= {f"{name}{end}" for name in parameters for end in ("", ".mean", ".square")}
    assert all(op.operands for op in states.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_operators_of_the_variants_are_known(name):
    """Forms that no module of the zoo has are known, too."""
    assert graph_of_torch(*VARIANTS[name]).unknown == ()


def test_a_model_that_fits_nowhere_is_traced():
    """Nothing is allocated: a decoder whose parameters and moments take terabytes has a graph."""
    sizes = replace(LLAMA_3_8B, layers=1, model=2**17, heads=1024, key_heads=1024, hidden=2**19)
    graph = graph_of_torch(*decoder_program(sizes))

    assert parameter_bytes(graph) > 500e9
    assert graph.unknown == ()


def test_fake_and_real_modules_have_the_same_graph():
    """A module has one graph, whether its parameters are on `meta`, fake tensors or in memory."""
    tokens = torch.zeros(SMALL.batch, SMALL.tokens, dtype=torch.int64)
    with FakeTensorMode():
        fake = Decoder(SMALL)
    graphs = [
        graph_of_torch(module, (tokens, tokens), next_token_loss)
        for module in (Decoder(SMALL), fake, decoder_program(SMALL, dtype=torch.float32)[0])
    ]

    assert len({tuple((op.name, op.rule, op.flop) for op in graph.ops) for graph in graphs}) == 1
    assert tokens.sum() == 0


def test_names_tell_modules_and_direction():
    """Operators are named by the module that calls them, those of the backward pass begin with `grad`."""
    graph = graph_of_torch(*FACTORIES["llama_small"]())

    forward, backward = named(graph, "layers.0.mlp.up.mm"), named(graph, "grad.layers.0.mlp.up.mm")
    assert graph.tensors[forward.results[0]].kind == TensorKind.ACTIVATION
    assert graph.tensors[backward.results[0]].kind == TensorKind.GRADIENT
    assert all(
        op.name.startswith("grad.") == (number >= graph.first_backward)
        for number, op in enumerate(graph.ops)
        if not op.is_source and op.primitive != "adam"
    )
    assert graph.tensors[named(graph, "inputs.0").results[0]].kind == TensorKind.DATA


def test_what_is_computed_again_is_in_the_backward_pass():
    """A checkpointed layer's forward operators stand once before and once behind the begin of the backward pass."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False).sum()

    graph = graph_of_torch(Again(), (torch.empty(4, 8, device="meta"),))

    assert computed(graph).count("tanh") == 1
    assert computed(graph, backward=True).count("tanh") == 1
    assert "grad.inner.0.mm" in [op.name for op in graph.ops]


def test_overwritten_memory_is_no_operator():
    """An operator that works in place is counted as the one that does not."""
    graph = graph_of_torch(Varied(lambda x: (F.relu_(x * 2) + 1,), (4, 6)), ())

    assert computed(graph)[:3] == ["mul", "relu", "add"]
    assert graph.unknown == ()


def test_tied_parameters_are_one():
    """A head that shares the embedding's table adds its gradient to the table's."""
    module = Decoder(SMALL)
    module.head.weight = module.embedding.weight
    tokens = torch.zeros(SMALL.batch, SMALL.tokens, dtype=torch.int64)
    graph = graph_of_torch(module, (tokens, tokens), next_token_loss)

    states = [op.name for op in graph.ops if op.primitive == STATE]
    assert "embedding.weight" in states
    assert "head.weight" not in states
    update = named(graph, "embedding.weight.update")
    assert graph.ops[graph.maker[update.operands[1]][0]].primitive == "add"


def test_what_is_not_trained_has_no_moments():
    """A frozen parameter stays as it is, a table of a module is a constant, and running statistics live on."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)
            self.first.requires_grad_(requires_grad=False)
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("table", torch.ones(6))

        def forward(self, x):
            return self.second(self.norm(self.first(x)) * self.table).square().mean()

    graph = graph_of_torch(Frozen(), (torch.empty(12, 8),))

    found = {op.name: op for op in graph.ops if op.primitive in (STATE, INPUT, CONSTANT)}
    assert found["first.weight"].operands == ()
    assert "first.weight.mean" not in found
    assert found["norm.running_mean"].operands
    assert graph.tensors[found["norm.running_mean"].results[0]].kind == TensorKind.DATA
    assert "table" not in found
    assert [graph.tensors[op.results[0]].shape for op in graph.ops if op.primitive == CONSTANT] == [(6,)]
    assert "grad.first.mm" not in [op.name for op in graph.ops]


def test_unknown_operators_are_blocked_and_counted():
    """An operator without a rule is computed whole by every device, and the graph says so."""
    graph = graph_of_torch(Varied(lambda x: (torch.kthvalue(x, 2)[0],), (6, 6)), ())

    assert dict(graph.unknown).keys() == {"kthvalue"}
    assert named(graph, "kthvalue").rule.cuttable == ()


@pytest.mark.parametrize("loss", [lambda module, x: module(x), lambda module, x: module(x).detach().sum()])
def test_a_loss_that_is_none_is_refused(loss):
    """A loss that isn't one number, or depends on no parameter, is refused."""
    with pytest.raises(ConfigError, match="must be one number that depends on a parameter"):
        graph_of_torch(nn.Linear(4, 4), (torch.empty(2, 4),), loss)


@pytest.fixture(scope="module")
def beside_each_other():
    """Two layers of Llama 3 8B, as the transformer frontend writes them down, and as torch runs them."""
    model = find_model("llama3-8b").changed(num_layers=2)
    job = TrainingJob(model=model, sequence_length=4096, global_batch_size=8)
    return transformer_graph(job, micro_batch_size=8), graph_of_torch(*FACTORIES["llama_two_layers"]())


def test_torch_and_the_transformer_frontend_count_alike(beside_each_other):
    """Both graphs of one model have the same parameters and products, to the byte and the FLOP."""
    written, traced = beside_each_other

    assert parameter_bytes(traced) == parameter_bytes(written)
    assert total_flop(traced) == pytest.approx(total_flop(written), rel=1e-12)


@pytest.mark.parametrize("whole_axes", [True, False])
def test_torch_and_the_transformer_frontend_are_planned_alike(beside_each_other, whole_axes):
    """D-Rec's plans of both send about as much, and their products take as long.

    A quarter is what three products for queries, keys and values instead of one, and norms of several operators, can
    change of the messages; what remains of the difference is the memory traffic of operators that torch doesn't fuse.
    """
    mesh = mesh_of("data=2,model=4", find_cluster("dgx-h100"))
    costs = [
        plan_graph(graph, mesh, PlannerOptions(planner="recursive", whole_axes=whole_axes)).cost
        for graph in beside_each_other
    ]
    products_s = [
        sum(seconds for op, seconds in zip(graph.ops, cost.compute_s, strict=True) if op.flop)
        for graph, cost in zip(beside_each_other, costs, strict=True)
    ]

    assert costs[1].comm_s == pytest.approx(costs[0].comm_s, rel=0.25)
    assert products_s[1] == pytest.approx(products_s[0], rel=0.02)
    assert costs[1].step_time_s < 1.4 * costs[0].step_time_s
