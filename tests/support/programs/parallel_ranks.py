"""Functions that ranks run in the tests of modules that train as planned; ranks import them from here."""

STEPS = 3

CAUSAL = "AutoModelForCausalLM"
SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}
OF_TRANSFORMERS = {
    "llama": ("Llama", {"intermediate_size": 64, "num_key_value_heads": 2}),
    "gpt2": ("GPT2", {"n_positions": 16}),
    "bert": ("Bert", {"intermediate_size": 64, "max_position_embeddings": 16}),
    "t5": ("T5", {"d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0}),
    "mixtral": (
        "Mixtral",
        {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "moe_intermediate_size": 32,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Models of transformers: the beginning of their configuration's name, and sizes beside those of all."""


def built(name):
    """Build a tiny model by name, its inputs and its loss; the same on every rank."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    ids = torch.randint(0, 64, (8, 16))
    if name == "convolutions":
        # no biases before a norm: their gradients are rounding errors, which Adam would blow up
        module = nn.Sequential(
            *(
                nn.Conv2d(4, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.2),
            ),
            *(nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)),
        )
        return module, (torch.randn(8, 4, 8, 8), torch.randint(0, 8, (8,))), classified
    if name == "perceptron":
        module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.LayerNorm(16))
        return module, (torch.randn(8, 16), torch.randn(8, 16)), squared
    if name == "attention":
        return attention(), (ids,), lambda module, ids: (module(ids) ** 2).mean()
    return of_transformers(name), (ids,), labelled


def of_transformers(name):
    """Build a tiny model of transformers by name."""
    import transformers

    kind, further = OF_TRANSFORMERS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **further)
    auto = getattr(transformers, {"Bert": "AutoModelForMaskedLM", "T5": "AutoModelForSeq2SeqLM"}.get(kind, CAUSAL))
    return auto.from_config(config, dtype="float32").train()


def attention():
    """Build recomputed attention under a mask, with a bias that is drawn for each step."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.inner, self.outer = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 32)
            self.register_buffer("seen", torch.ones(16, 16).tril().bool(), persistent=False)

        def attend(self, x):
            parts = (one.unflatten(-1, (4, 8)).transpose(1, 2) for one in self.inner(x).chunk(3, dim=-1))
            found = nn.functional.scaled_dot_product_attention(*parts, attn_mask=self.seen)
            return self.outer(found.transpose(1, 2).flatten(2))

        def forward(self, ids):
            x = self.table(ids)
            return x + checkpoint(self.attend, x, use_reentrant=False) + torch.bernoulli(torch.full((32,), 0.5))

    return Attention()


def classified(module, images, labels):
    """Compute the cross entropy of labels."""
    import torch

    return torch.nn.functional.cross_entropy(module(images), labels)


def squared(module, x, y):
    """Compute the mean squared error."""
    return ((module(x) - y) ** 2).mean()


def labelled(module, ids):
    """Compute the loss of a model of transformers."""
    return module(input_ids=ids, labels=ids).loss


def planned(module, inputs, loss, mesh, seed=None):
    """Plan a module quickly; with a seed, draw any valid plan, which serves all factors that can be cut."""
    from dataclasses import replace

    from tuner.planners import torch_plans
    from tuner.planners.planning import PlannerOptions, plan_graph

    options = PlannerOptions(whole_axes=True, planner="recursive", order="topological")
    if seed is None:
        return torch_plans.plan_torch(module, *inputs, loss=loss, mesh=mesh, options=options)

    def drawn(graph, own_mesh, options):
        found = plan_graph(graph, own_mesh, options)
        return replace(found, found=replace(found.found, plan=any_plan(found.plan, seed)))

    torch_plans.plan_graph = drawn
    try:
        return torch_plans.plan_torch(module, *inputs, loss=loss, mesh=mesh, options=options)
    finally:
        torch_plans.plan_graph = plan_graph


def any_plan(plan, seed):
    """Return a valid plan that is drawn at random."""
    from dataclasses import replace

    import numpy as np

    rng = np.random.default_rng(seed)
    served = plan.served.copy()
    for number, op in enumerate(plan.graph.ops):
        left = {factor: op.rule.factors[factor].size for factor in op.rule.cuttable}
        for axis, size in enumerate(plan.mesh.sizes):
            fitting = [factor for factor, length in left.items() if length % size == 0]
            served[number, axis] = rng.choice([*fitting, -1])
            if served[number, axis] >= 0:
                left[int(served[number, axis])] //= size
    return replace(plan, served=served)


def count_sums(place, layers):
    """Report the sums over ranks of a step of many layers under data parallelism: calls, and messages that are priced.

    The plan also says what each sum alone would take, and what it takes in buckets.
    """
    from dataclasses import replace

    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from costmodels.blocks.operator import OpKind
    from costmodels.sharding.plan import cost_of
    from trials.torch_training.process_group import process_group
    from tuner.planners import torch_plans
    from tuner.planners.planning import PlannerOptions, plan_graph
    from tuner.planners.toast.by_hand import data_parallel

    def by_data(graph, own_mesh, options):
        found = plan_graph(graph, own_mesh, options)
        plan = data_parallel(graph, found.plan.mesh)
        return replace(found, found=replace(found.found, plan=plan, cost=cost_of(plan)))

    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    inputs = (torch.randn(8, 16), torch.randn(8, 16))
    torch_plans.plan_graph = by_data
    options = PlannerOptions(whole_axes=True, planner="recursive", order="topological")
    plan = torch_plans.plan_torch(module, *inputs, loss=squared, mesh={"data": 2}, options=options)
    torch_plans.plan_graph = plan_graph
    cost, mesh = plan.planned.cost, plan.planned.plan.mesh
    sums = [each for each in cost.collectives if each.move.kind is OpKind.ALL_REDUCE]
    with process_group(place, "cpu"):
        parallel = plan.parallelize(module)
        with CommDebugMode() as counted:
            parallel(*inputs).backward()
        place.tell(
            {
                "planned": len(sums),
                "calls": sum(counted.get_comm_counts().values()),
                "alone_s": sum(each.move.seconds(mesh) for each in sums),
                "priced_s": sum(each.seconds for each in sums),
                "together_s": mesh.seconds(OpKind.ALL_REDUCE, sum(each.move.message_bytes for each in sums), (0,)),
            }
        )


def losses_of(module, call, inputs):
    """Train a module with AdamW, and return the loss of each step."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    torch.manual_seed(7)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = call(*inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss))
    return found


def train(place, mesh, cases):
    """Report losses of one process and of the ranks for each (model, seed of the plan), and how much is cut."""
    import torch

    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        for name, seed in cases:
            module, inputs, loss = built(name)
            expected = losses_of(module, lambda *given, module=module, loss=loss: loss(module, *given), inputs)
            buffers = {key: value.clone() for key, value in module.named_buffers()}
            module, inputs, loss = built(name)
            plan = planned(module, inputs, loss, mesh, seed)
            parallel = plan.parallelize(module)
            if place.rank:
                torch.manual_seed(place.rank)  # the first rank's generator counts
            found = losses_of(parallel, parallel, inputs)
            place.tell(
                {
                    "case": (name, seed),
                    "expected": expected,
                    "found": found,
                    "buffers": max(
                        (
                            float((_whole(each).float() - buffers[key].float()).abs().max())
                            for key, each in parallel.named_buffers()
                        ),
                        default=0.0,
                    ),
                    "cut": float((plan.planned.plan.served >= 0).any(axis=1).mean()),
                    "names": sorted(parallel.state_dict()) == sorted(module.state_dict()),
                }
            )


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save_and_load(place, folder):
    """Report the next loss of a module whose state was saved, of the planned ones and the FSDP2 one that load it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from trials.torch_training.process_group import process_group

    with process_group(place, "cpu"):
        module, inputs, loss = built("perceptron")
        module[2].p = 0.0
        plan = planned(module, inputs, loss, "data=2", seed=1)
        parallel = plan.parallelize(module)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        parallel(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = get_state_dict(parallel, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        told = {"kinds": sorted({type(each).__name__ for each in parallel.state_dict().values()})}

        def next_losses(other, call, saved=folder):
            own = torch.optim.AdamW(other.parameters(), lr=1e-2)
            model, moments = get_state_dict(other, own)
            dcp.load({"model": model, "optimizer": moments}, checkpoint_id=saved)
            set_state_dict(other, own, model_state_dict=model, optim_state_dict=moments)
            found = []
            for _ in range(2):
                value = call(*inputs)
                value.backward()
                own.step()
                own.zero_grad()
                found.append(float(value))
            model, moments = get_state_dict(other, own)
            dcp.save({"model": model, "optimizer": moments}, checkpoint_id=f"{saved}-next")
            return found

        others = [built("perceptron")[0] for _ in range(2)]
        for other in others:
            other[2].p = 0.0
            for parameter in other.parameters():
                parameter.data.add_(1.0)
        again = planned(others[0], inputs, loss, "data=2", seed=2).parallelize(others[0])
        told["planned"] = next_losses(again, again)
        fully_shard(others[1])
        told["fsdp"] = next_losses(others[1], lambda *given: loss(others[1], *given))
        with torch.device("meta"):
            empty, described, _ = built("perceptron")
        empty[2].p = 0.0
        blank = planned(empty, described, loss, "data=2", seed=3).parallelize(empty, plan.device_mesh("cpu"))
        told["from meta"] = next_losses(blank.to_empty(device="cpu"), blank)
        told["from fsdp"] = next_losses(again, again, f"{folder}-next")[0]
        told["same"] = next_losses(parallel, parallel)
        told["then"] = float(parallel(*inputs))
        place.tell(told)


def other_calls(place):
    """Report what other shapes, modes, inputs and second backward passes do."""
    import warnings

    import torch
    from torch.distributed.tensor import DTensor, Shard

    from trials.torch_training.process_group import process_group

    told = {}
    with process_group(place, "cpu"):
        module, inputs, loss = built("convolutions")
        twin, _, _ = built("convolutions")
        twin[4].p = module[4].p = 0.0
        twin[0].weight.requires_grad_(False)
        module[0].weight.requires_grad_(False)
        plan = planned(module, inputs, loss, "data=2", seed=3)
        parallel = plan.parallelize(module)
        with torch.no_grad():
            told["no grad"] = (float(parallel(*inputs)), float(loss(twin, *inputs)))
        dealt = [DTensor.from_local(each.chunk(2)[place.rank], plan.device_mesh("cpu"), [Shard(0)]) for each in inputs]
        value, expected = parallel(*dealt), loss(twin, *inputs)
        (value / 4).backward()
        (expected / 4).backward()
        told["dealt"] = (float(value), float(expected))
        told["frozen"] = module[0].weight.grad is None
        told["gradient"] = float((_whole(module[5].weight.grad) - twin[5].weight.grad).abs().max())
        try:
            value.backward()
        except RuntimeError as error:
            told["second"] = str(error)
        fewer = [each[:4] for each in inputs]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told["fewer"] = (float(parallel(*fewer)), float(loss(twin, *fewer)))
            parallel(*fewer), loss(twin, *fewer)
        told["warnings"] = [str(each.message) for each in caught if "planned again" in str(each.message)]
        parallel.eval()
        twin.eval()
        told["eval"] = (float(parallel(*inputs)), float(loss(twin, *inputs)))
        place.tell(told)


def read_values(place):
    """Report what happens where a module's code reads other values of its inputs than when it was planned."""
    import warnings

    import torch
    from torch import nn

    from hardware.io.errors import ConfigError
    from trials.torch_training.process_group import process_group

    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x, length):
            x = self.inner(x)[:, : int(length.max())]
            return (x**2).mean() if length.any() else x.sum()

    def loss(module, x, length):
        return module(x, length)

    told = {"losses": []}
    with process_group(place, "cpu"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        module, twin, x = Padded(), Padded(), torch.randn(8, 8, 16)
        twin.load_state_dict(module.state_dict())
        plan = planned(module, (x, torch.tensor([4, 2])), loss, "data=2", seed=3)
        parallel = plan.parallelize(module)
        for most in (4, 6, 4, 6):
            inputs = x, torch.tensor([most, 2])
            told["losses"].append((float(parallel(*inputs)), float(twin(*inputs))))
        told["warnings"] = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
        try:
            for most in range(9):
                parallel(x, torch.tensor([most, 0]))
        except ConfigError as error:
            told["refused"] = str(error)
        place.tell(told)


def cast_and_refused(place):
    """Report what autocast does, and what is refused."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from hardware.io.errors import ConfigError
    from trials.torch_training.process_group import process_group

    told = {}
    with process_group(place, "cpu"):
        module, inputs, loss = built("perceptron")
        twin, _, _ = built("perceptron")
        twin[2].p = module[2].p = 0.0
        with torch.autocast("cpu", torch.bfloat16):
            parallel = planned(module, inputs, loss, "data=2", seed=4).parallelize(module)
            value, expected = parallel(*inputs), loss(twin, *inputs)
        value.backward()
        expected.backward()
        told["autocast"] = (float(value), float(expected))
        told["kept"] = str(module[0].weight.grad.dtype)
        told["autocast gradient"] = float(
            (_whole(module[0].weight.grad) - twin[0].weight.grad).abs().max() / twin[0].weight.grad.abs().max()
        )

        module, inputs, loss = built("perceptron")
        plan = planned(
            module, inputs, lambda module, x, y: (checkpoint(module, x, use_reentrant=False) - y).sum(), "data=2"
        )
        told["refused"] = []
        for refused in (lambda: plan.parallelize(module), lambda: plan.parallelize(built("perceptron")[0].eval())):
            try:
                refused()
            except ConfigError as error:
                told["refused"].append(str(error))
        try:
            parallel(inputs[0] + place.rank, inputs[1])
        except ConfigError as error:
            told["refused"].append(str(error))
        place.tell(told)


def try_variants(place, mesh, seed):
    """Report the variants of operators whose loss or gradients differ from the whole step's under a random plan."""
    import numpy as np
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from costmodels.sharding.device_mesh import mesh_from
    from costmodels.sharding.exports.torch_apply import LocalStep
    from costmodels.sharding.frontends.torch.graph import graph_of
    from costmodels.sharding.frontends.torch.program import trace_module
    from costmodels.sharding.plan import Plan
    from tests.support.graphs.torch_variants import VARIANTS
    from trials.torch_training.process_group import process_group

    wrong, primitives = [], set()
    with process_group(place, "cpu"), torch.no_grad():
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        for name, program in VARIANTS.items():
            with torch.enable_grad():
                traced = trace_module(*program)
            graph = graph_of(traced)
            whole = Plan(graph=graph, mesh=mesh_from(mesh, "dgx-a100"), served=np.full((len(graph.ops), len(mesh)), -1))
            step = LocalStep(traced, any_plan(whole, seed), device_mesh)
            torch.manual_seed(0)
            values = [_random(node.meta["val"]) for node in traced.trace.graph.find_nodes(op="placeholder")]
            torch.manual_seed(1)
            expected = traced.trace(*(value.clone() for value in values))
            torch.manual_seed(1)
            loss, _, saved = step.forward([value.clone() for value in values])
            everywhere = (-1,) * len(mesh)
            trained = {number: one.gradient for number, one in enumerate(traced.arguments) if one.gradient is not None}
            found = step.backward(saved, dict.fromkeys(trained, everywhere))
            pairs = [(loss, expected[0]), *((found[number], expected[at]) for number, at in trained.items())]
            wrong += [name] if any(not _are_close(*pair) for pair in pairs) else []
            primitives.update(op.primitive for op in graph.ops)
        place.tell({"wrong": wrong, "primitives": len(primitives)})


def _random(value):
    import torch

    if value.is_floating_point():
        return torch.rand(value.shape, dtype=value.dtype) * 0.9 + 0.1
    return torch.rand(value.shape) > 0.5 if value.dtype == torch.bool else torch.randint(0, 4, value.shape)


def _are_close(one, other):
    return bool(((one - other).abs() <= 1e-4 * other.abs() + 1e-5 * other.abs().max().clamp(min=1)).all())
