"""Package deep_ep (DeepEP and HybridEP), which sends tokens to experts, as the tensors that it makes.

Shapes follow deep_ep/buffer.py and deep_ep/hybrid_ep_buffer.py of deepseek-ai's DeepEP. Its own buffers are allocated
beside PyTorch and are not counted. The router is balanced: the experts of a token lie on as many ranks as can be, and
all get as many tokens.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist

from tuner.rehearsal.torch_room.known_values import shared_numbers
from tuner.rehearsal.torch_room.watch import Watch


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """What a dispatch leaves for its way back.

    Attributes:
        sent: Number of tokens of this rank.
        received: Number of rows that it got.
        of_each: Number of tokens of each local expert.
        held: Tensors that say where tokens come from.
    """

    sent: int
    received: int
    of_each: int
    held: tuple[torch.Tensor, ...]


class _Event:
    """Stands for an event of a stream."""

    def __init__(self, *_: Any) -> None: ...

    def current_stream_wait(self) -> None: ...


class _Sizes:
    """Stands for the configuration of a buffer, which lies outside of PyTorch."""

    def get_nvl_buffer_size_hint(self, *_: Any) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def stand_in_for_deep_ep(watch: Watch) -> None:
    """Let programs import deep_ep where it is not installed."""
    if importlib.util.find_spec("deep_ep") is not None:
        return
    module, utils = (ModuleType(name) for name in ("deep_ep", "deep_ep.utils"))
    vars(module).update(Buffer=_buffer_class(watch), HybridEPBuffer=_hybrid_class(watch), utils=utils, __path__=[])
    vars(utils).update(EventHandle=_Event, EventOverlap=_Event)
    sys.modules.update({"deep_ep": module, "deep_ep.utils": utils})


def _buffer_class(watch: Watch) -> type:
    class Buffer:
        """Stands for DeepEP's buffer of a group."""

        num_sms = 20

        def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **_: Any) -> None:
            self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

        @staticmethod
        def set_num_sms(_: int) -> None: ...

        @staticmethod
        def get_dispatch_config(_: int) -> _Sizes:
            return _Sizes()

        get_combine_config = get_dispatch_config

        def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
            """Return how many tokens go to each rank and expert, and which tokens to which rank."""
            ranks = self.group.size()
            counts = [torch.empty((number,), dtype=torch.int32) for number in (ranks, num_experts)]
            return counts[0], None, counts[1], torch.empty((topk_idx.shape[0], ranks), dtype=torch.bool), _Event()

        def dispatch(
            self,
            x: torch.Tensor,
            handle: _Handle | None = None,
            topk_idx: torch.Tensor | None = None,
            topk_weights: torch.Tensor | None = None,
            is_token_in_rank: torch.Tensor | None = None,
            num_tokens_per_expert: torch.Tensor | None = None,
            **_: Any,
        ) -> tuple[Any, ...]:
            """Return the rows that this rank gets, with the experts and weights of each."""
            if handle is not None:
                watch.note("deep_ep.dispatch", tuple(x.shape))
                return x.new_empty((handle.received, x.shape[1])), None, None, None, None, _Event()
            assert topk_idx is not None, "the first dispatch names the experts"
            assert topk_weights is not None, "it has their weights"
            assert num_tokens_per_expert is not None, "it has the layout"
            _tell(watch)
            watch.note("deep_ep.dispatch", tuple(x.shape))
            (sent, top), ranks = topk_idx.shape, self.group.size()
            experts = num_tokens_per_expert.shape[0]
            received, of_each = sent * min(top, ranks), sent * top * ranks // experts
            source, heads = (torch.empty(size, dtype=torch.int32) for size in ((received,), (sent, ranks)))
            held = (source, heads) if is_token_in_rank is None else (source, heads, is_token_in_rank)
            made = x.new_empty((received, x.shape[1]))
            chosen = topk_idx.new_empty((received, top)), topk_weights.new_empty((received, top))
            counts = [of_each] * (experts // ranks)
            return made, *chosen, counts, _Handle(sent, received, of_each, held), _Event()

        def combine(
            self, x: torch.Tensor, handle: _Handle, topk_weights: torch.Tensor | None = None, **_: Any
        ) -> tuple[Any, ...]:
            """Return the sums of what other ranks made of this rank's tokens."""
            watch.note("deep_ep.combine", tuple(x.shape))
            weights = None if topk_weights is None else topk_weights.new_empty((handle.sent, topk_weights.shape[1]))
            return x.new_empty((handle.sent, x.shape[1])), weights, _Event()

    return Buffer


def _hybrid_class(watch: Watch) -> type:
    class HybridEPBuffer:
        """Stands for HybridEP's buffer of a group."""

        def __init__(self, group: Any, **_: Any) -> None:
            self._ranks = dist.get_world_size(group)

        def dispatch_with_permute(
            self,
            *,
            hidden: torch.Tensor,
            routing_map: torch.Tensor | None = None,
            probs: torch.Tensor | None = None,
            handle: _Handle | None = None,
            num_of_experts_per_rank: int = 1,
            num_permuted_tokens: int | None = None,
            **_: Any,
        ) -> tuple[Any, ...]:
            """Return the rows of this rank's experts, sorted by expert, and their weights."""
            watch.note("hybrid_ep.dispatch", tuple(hidden.shape))
            if handle is None:
                assert routing_map is not None, "the first dispatch has the routing map"
                _tell(watch)
                sent, experts = routing_map.shape
                # the router's choice is known to the framework alone, which tells it here
                of_each = sent * HybridEPBuffer.top * self._ranks // experts
                received = num_permuted_tokens or of_each * num_of_experts_per_rank
                held = (routing_map, torch.empty((sent * self._ranks, num_of_experts_per_rank), dtype=torch.int32))
                handle = _Handle(sent, received, of_each, held)
            weights = None if probs is None else probs.new_empty((handle.received,))
            counts = shared_numbers((num_of_experts_per_rank,), handle.received)
            return hidden.new_empty((handle.received, hidden.shape[-1])), weights, None, counts, handle

        def combine_with_unpermute(
            self, *, hidden: torch.Tensor, handle: _Handle, probs: torch.Tensor | None = None, **_: Any
        ) -> tuple[Any, ...]:
            """Return the sums of what the experts made of this rank's tokens."""
            watch.note("hybrid_ep.combine", tuple(hidden.shape))
            experts = handle.held[0].shape[-1]
            weights = None if probs is None else probs.new_empty((handle.sent, experts))
            return hidden.new_empty((handle.sent, hidden.shape[-1])), weights

        top = 1

    return HybridEPBuffer


def _tell(watch: Watch) -> None:
    watch.invented["deep_ep, which is not installed here: as many tokens for each expert as for any other"] += 1
