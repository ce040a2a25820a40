"""Completion of gradients after the backward passes: summation of terms, global norm, and clipping."""

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
"""Global norm to which gradients are clipped, the default of Megatron-LM's --clip-grad."""


def finish_gradients(chunks: Iterable[Chunk], mesh: RankMesh, sharding: Sharding) -> Tensor:
    """Complete and clip the gradients of this rank's weights, and return their global norm before clipping.

    The gradients of whole weights that are applied to parts of activations are summed over tp. The gradients of the two
    copies of a tied table are summed over the first and last stage.
    """
    tensor, ends = mesh.group("tp"), mesh.ends()
    held: list[tuple[Tensor, float]] = []  # gradients, each with the number of ranks that hold it
    for chunk in chunks:
        tied = {id(table) for table in _tied_tables(chunk)} if ends is not None else set()
        for weight, is_whole, is_partial in _list_weights(chunk, sharding):
            gradient = _local_gradient(weight)
            # a whole weight that met a part of an activation has only a term of its gradient here
            if is_partial and tensor is not None:
                dist.all_reduce(gradient, group=tensor)
            if id(weight) in tied:
                dist.all_reduce(gradient, group=ends)
            copies = mesh.size("copies") * (mesh.size("tp") if is_whole else 1) * (2 if id(weight) in tied else 1)
            held.append((gradient, copies))
        held += [(_local_gradient(weight), mesh.size("expert_copies")) for weight in _expert_weights(chunk)]
    # A gradient that several ranks hold counts once in the norm: each holder adds its share.
    square = torch.zeros((), device=mesh.device)
    for gradient, holders in held:
        square += gradient.float().square().sum() / holders
    dist.all_reduce(square)
    norm = square.sqrt()
    # Clip as torch.nn.utils.clip_grad_norm_ does, with its epsilon.
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for gradient, _ in held:
        gradient.mul_(scale)
    return norm


def _list_weights(chunk: Chunk, sharding: Sharding) -> Iterator[tuple[nn.Parameter, bool, bool]]:
    """Yield the weights outside of experts, with two flags.

    The first says whether every tp rank holds the whole weight, the second whether ranks hold terms of its gradient.
    """
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
    """Yield the tables that embedding and head share."""
    if chunk.is_tied:
        if chunk.embedding is not None:
            yield chunk.embedding.tokens
        if chunk.head is not None:
            yield chunk.head.table


def _local_gradient(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "every weight must have a gradient after the backward passes"
    return weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
