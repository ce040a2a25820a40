"""What gradients still need after the backward passes: terms added up, their norm, and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trials.torch_training.model.blocks import Block
from trials.torch_training.model.experts import Experts
from trials.torch_training.model.mesh import RankMesh
from trials.torch_training.model.sharding import Sharding
from trials.torch_training.model.stage_model import Chunk

MAX_NORM = 1.0
"""Gradients are clipped to this global norm, as Megatron-LM's --clip-grad does by default."""


def finish_gradients(chunks: Iterable[Chunk], mesh: RankMesh, sharding: Sharding) -> Tensor:
    """Completes the gradients of this rank's weights and clips them; their global norm before that.

    Whole weights that meet parts of activations get their terms added up over tp, and the two copies of a tied table
    theirs over the first and the last stage.
    """
    tensor, ends = mesh.group("tp"), mesh.ends()
    held: list[tuple[Tensor, float]] = []  # gradients, and by how many ranks each is held
    for chunk in chunks:
        tied = {id(table) for table in _tied_tables(chunk)} if ends is not None else set()
        for weight, is_whole, is_partial in _weights(chunk, sharding):
            gradient = _local(weight)
            if is_partial and tensor is not None:
                dist.all_reduce(gradient, group=tensor)
            if id(weight) in tied:
                dist.all_reduce(gradient, group=ends)
            copies = mesh.size("copies") * (mesh.size("tp") if is_whole else 1) * (2 if id(weight) in tied else 1)
            held.append((gradient, copies))
        held += [(_local(weight), mesh.size("expert_copies")) for weight in _expert_weights(chunk)]
    square = torch.zeros((), device=mesh.device)
    for gradient, holders in held:
        square += gradient.float().square().sum() / holders
    dist.all_reduce(square)
    norm = square.sqrt()
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for gradient, _ in held:
        gradient.mul_(scale)
    return norm


def _weights(chunk: Chunk, sharding: Sharding) -> Iterator[tuple[nn.Parameter, bool, bool]]:
    """The weights outside of experts, whether tp ranks hold each whole, and whether they hold terms of its gradient."""
    seen: set[int] = set()
    for block in chunk.modules():
        for name, meeting in block.meetings.items() if isinstance(block, Block) else ():
            weight = getattr(block, name)
            if id(weight) not in seen:
                seen.add(id(weight))
                is_whole = sharding.weights[meeting.weight].is_replicate()
                yield weight, is_whole, sharding.has_partial_gradient(meeting.weight, meeting.activation)


def _expert_weights(chunk: Chunk) -> Iterator[nn.Parameter]:
    for part in chunk.modules():
        if isinstance(part, Experts):
            yield from part.parameters(recurse=False)


def _tied_tables(chunk: Chunk) -> Iterator[nn.Parameter]:
    """The tables of which the model has one only."""
    if chunk.is_tied:
        if chunk.embedding is not None:
            yield chunk.embedding.tokens
        if chunk.head is not None:
            yield chunk.head.table


def _local(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "every weight takes part in every step"
    return weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
