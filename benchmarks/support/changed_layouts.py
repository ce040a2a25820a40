"""What ranks send when layouts change and when planned modules train; a module of its own that ranks import by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.zoo.torch_modules import FACTORIES
from costmodels.blocks.operator import OpKind
from costmodels.sharding.exports.torch_ranks import Rank, placements_of
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout, moves
from trials.ranks.messages import Place
from trials.torch_training.planned.traffic import planned_traffic, recorded_traffic
from trials.torch_training.process_group import process_group
from trials.torch_training.profiling.recording import BACKEND, Recorder, register_recorded_backend
from tuner.planners.planning import PlannerOptions
from tuner.planners.torch_plans import plan_torch

SHAPE = (8, 8)

SMALL = ("llama_small", "mixtral_small", "perceptron_small", "unet_small")
"""Programs of `benchmarks/zoo/torch_modules.py` that ranks of one machine train."""

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Mistral": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen2": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen3": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "Gemma": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "Phi": {"intermediate_size": 64},
    "GPT2": {"n_positions": 16},
    "GPTNeoX": {"intermediate_size": 64},
    "OPT": {"ffn_dim": 64, "max_position_embeddings": 32, "word_embed_proj_dim": 32},
    "StableLm": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Cohere": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Olmo": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Granite": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Starcoder2": {"intermediate_size": 64, "num_key_value_heads": 2},
    "Mixtral": {"intermediate_size": 32, "num_key_value_heads": 2, "num_local_experts": 4},
    "Bert": {"intermediate_size": 64, "max_position_embeddings": 16},
}
"""Models of transformers by the beginning of their configuration's name, with sizes beside SIZES."""

SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32}


def changes(num_axes: int) -> Iterator[tuple[Layout, Layout]]:
    """Yield all changes of a matrix's layout on a mesh, from any layout to any without partial sums."""
    kept = (REPLICATED, 0, 1)
    for before in itertools.product((REPLICATED, PARTIAL, 0, 1), repeat=num_axes):
        for after in itertools.product(kept, repeat=num_axes):
            if before != after:
                yield before, after


@contextmanager
def _recorded(place: Place) -> Iterator[Recorder]:
    recorder = register_recorded_backend()
    with process_group(place, "cpu", backend=BACKEND):
        yield recorder


def change_all(place: Place, sizes: tuple[int, ...]) -> None:
    """Tell for each change what was sent by kind and group: by the parts of planned modules, and by DTensor."""
    with _recorded(place) as recorder:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abcd"[: len(sizes)]))
        rank = Rank.on(mesh)
        whole = torch.arange(64.0).reshape(SHAPE)
        for before, after in changes(len(sizes)):
            part = rank.cut(whole, tuple(REPLICATED if dim == PARTIAL else dim for dim in before)).contiguous()
            if any(dim == PARTIAL and rank.place[axis] for axis, dim in enumerate(before)):
                part = torch.zeros_like(part)
            sent = []
            for moved in (rank.move, partial(_redistributed, mesh)):
                recorder.start()
                found = moved(part, SHAPE, before, after) + 0
                sent.append(dict(recorded_traffic(recorder.stop())))
                assert torch.equal(found, rank.cut(whole, after)), (before, after)
            planned: Counter[tuple[OpKind, tuple[int, ...]]] = Counter()
            for move in moves(before, after, whole.nbytes, sizes):
                ranks = dist.get_process_group_ranks(rank.group(move.axes))
                planned[move.kind, tuple(ranks)] += round(move.message_bytes)
            place.tell((before, after, dict(planned), *sent))


def _redistributed(mesh: DeviceMesh, part: Tensor, shape: tuple[int, int], before: Layout, after: Layout) -> Tensor:
    """Return this rank's part in another layout, by DTensor."""
    given = DTensor.from_local(
        part, mesh, placements_of(before), run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    return given.redistribute(placements=placements_of(after)).to_local()


def programs() -> tuple[str, ...]:
    """Return the names of the programs; those of transformers where it is installed."""
    from importlib.util import find_spec  # noqa: PLC0415

    return SMALL if find_spec("transformers") is None else (*SMALL, *OF_TRANSFORMERS)


def train_all(place: Place, axes: dict[str, int], names: Sequence[str], planner: str) -> None:
    """Tell for each program what a step has sent by kind and group, what its plan counts, and how much it warns of."""
    for name in names:
        with _recorded(place) as recorder:
            module, inputs, loss = built(name)
            options = PlannerOptions(whole_axes=True, planner=planner, order="topological")  # type: ignore[arg-type]
            plan = plan_torch(module, *inputs, loss=loss, mesh=axes, options=options)
            parallel = plan.parallelize(module)
            for _ in range(2):
                recorder.start()
                parallel(*inputs).backward()
                recording = recorder.stop()
            place.tell(
                (
                    name,
                    dict(recorded_traffic(recording)),
                    dict(planned_traffic(plan.planned.plan, place.rank)),
                    len(plan.unsaid),
                )
            )


def built(name: str) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """Return a module with values, its inputs and its loss."""
    torch.manual_seed(0)
    if name in FACTORIES:
        module, inputs, *loss = FACTORIES[name]()
        module = module.to_empty(device="cpu")
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            tensor.data.zero_() if not tensor.is_floating_point() else tensor.data.normal_(std=0.02)
        given = tuple(torch.zeros_like(each, device="cpu") for each in inputs)
        return module, given, loss[0] if loss else None
    import transformers  # noqa: PLC0415

    config = getattr(transformers, f"{name}Config")(**SIZES, **OF_TRANSFORMERS[name])
    auto = transformers.AutoModelForMaskedLM if name == "Bert" else transformers.AutoModelForCausalLM
    module = auto.from_config(config, dtype="float32").train()
    return module, (torch.randint(0, 64, (8, 16)),), lambda module, ids: module(input_ids=ids, labels=ids).loss
