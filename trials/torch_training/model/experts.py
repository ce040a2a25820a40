"""Mixture of experts in a layer: routing, dispatch to the ranks that hold the experts, their products, and the return.

It follows Megatron-Core's all-to-all dispatcher. Every rank routes the tokens of its residual, sends each copy to the
rank that holds its expert (GShard, Lepikhin et al. 2020), gathers the copies that the experts' other tensor-parallel
ranks received, and multiplies the rows of all experts in one grouped product. Without sequence parallelism, an expert
has one tensor-parallel rank.

Letters: t tokens of this rank's residual, k experts per token, e experts, n rows, h hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.nn import functional
from torch.profiler import record_function

from trials.torch_training.model.blocks import Block, FeedForward, Norm, Surroundings, Weight, apply_activation
from trials.torch_training.model.weights import Cut

Keep = Callable[[Tensor, int], Tensor]
"""Function that selects the copies [t, k] of tokens to keep, from their experts [t, k] and the number of experts."""


def keep_all(experts: Tensor, num_experts: int) -> Tensor:  # noqa: ARG001 # of the contract
    """Keep all copies."""
    return torch.ones_like(experts, dtype=torch.bool)


def keep_up_to(capacity_factor: float) -> Keep:
    """Return a selection that limits every expert to `capacity_factor` times its even share of a rank's copies.

    The first copies in order are kept. Source: Switch Transformers (Fedus et al. 2021), section 2.2; per rank, as in
    Megatron-Core.
    """

    def keep(experts: Tensor, num_experts: int) -> Tensor:
        capacity = math.ceil(experts.numel() / num_experts * capacity_factor)
        chosen = functional.one_hot(experts.flatten(), num_experts)
        # Rank of each copy among the copies for the same expert: the running count of the one-hot rows, from 0.
        place = (chosen.cumsum(dim=0) * chosen).sum(dim=1) - 1
        return (place < capacity).view_as(experts)

    return keep


class MoeMlp(Block):
    """Norm, router, experts and shared experts of a layer, without the residual's addition."""

    router: Weight

    def __init__(
        self,
        own: Surroundings,
        name: str,
        *,
        ep: dist.ProcessGroup | None,
        expert_tp: dist.ProcessGroup | None,
        keep: Keep = keep_all,
    ) -> None:
        super().__init__()
        model = own.model
        self.own, self.keep = own, keep
        self.norm = Norm(own, "norm", model.hidden_size, meets="residual")
        role = "moe.router"
        self.hold("router", own.matrix(f"{name}.router", role, model.num_experts, model.hidden_size), role, "residual")
        self.experts = Experts(own, f"{name}.experts", ep=ep, expert_tp=expert_tp)
        self.shared = (
            FeedForward(own, f"{name}.shared", model.shared_expert_ffn_size) if model.shared_expert_ffn_size else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output for x [b, s, h] in the residual's layout."""
        model = self.own.model
        with record_function("@moe_mlp.norm"):
            x = self.norm(x)
        tokens = x.flatten(0, 1)
        with record_function("@moe_mlp.router"):
            scores = functional.linear(tokens, self.router)
        # The router's weights are a softmax over the chosen experts only.
        best, experts = scores.float().topk(model.top_k, dim=1)
        share = best.softmax(dim=1)
        y: Tensor = self.experts(tokens, experts, share, self.keep(experts, model.num_experts)).view_as(x)
        return y if self.shared is None else y + self.shared(x, "moe_mlp.shared")


class Experts(nn.Module):
    """Experts that a rank holds."""

    def __init__(
        self, own: Surroundings, name: str, *, ep: dist.ProcessGroup | None, expert_tp: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        model = own.model
        self.ep, self.expert_tp = ep, expert_tp
        self.num_ranks = 1 if ep is None else ep.size()
        self.num_local = model.num_experts // self.num_ranks
        self.gates = 1 + int(model.gated_ffn)
        inner = (0, 1) if expert_tp is None else (expert_tp.rank(), expert_tp.size())
        # Dim 0 of the weights is split over expert parallel ranks, dim 2 (the inner size) over the experts' tensor
        # ranks.
        place = 0 if ep is None else ep.rank()
        cuts = (Cut(dim=0, index=place, parts=self.num_ranks), Cut(dim=2, index=inner[0], parts=inner[1]))
        up = (model.num_experts, self.gates, model.expert_ffn_size, model.hidden_size)
        down = (model.num_experts, model.hidden_size, model.expert_ffn_size)
        self.up = own.make.matrix(f"{name}.up", up, cuts)
        self.down = own.make.matrix(f"{name}.down", down, cuts)

    def forward(self, tokens: Tensor, experts: Tensor, share: Tensor, kept: Tensor) -> Tensor:
        """Return the experts' outputs [t, h], weighted by `share` [t, k].

        Copies that are not `kept` [t, k] add nothing.
        """
        with record_function("@moe_mlp.permute"):
            # Sort the kept copies by expert, so that all copies for one rank are contiguous.
            copy = kept.flatten().nonzero()[:, 0]
            copy = copy[experts.flatten()[copy].argsort(stable=True)]
            rows = tokens[copy // experts.shape[1]]
        counts = torch.bincount(experts.flatten()[copy], minlength=self.num_ranks * self.num_local)
        # `arrived` counts the rows from each sender for each local expert; without expert parallelism this rank is the
        # sender.
        arrived, sent = counts.view(self.num_ranks, self.num_local), [len(rows)]
        if self.ep is not None:
            sent = arrived.sum(dim=1).tolist()
            arrived = _exchange_counts(arrived, self.ep)
            rows = all_to_all_single_autograd(rows, arrived.sum(dim=1).tolist(), sent, self.ep)
        rows = self._compute_outputs(rows, arrived)
        if self.ep is not None:
            rows = all_to_all_single_autograd(rows, sent, arrived.sum(dim=1).tolist(), self.ep)
        with record_function("@moe_mlp.permute+"):
            weighted = rows * share.flatten()[copy, None].to(rows.dtype)
            return torch.zeros_like(tokens).index_add(0, copy // experts.shape[1], weighted)

    def _compute_outputs(self, rows: Tensor, arrived: Tensor) -> Tensor:
        """Return the outputs for rows [n, h], ordered by their counts `arrived` [senders, local experts]."""
        num_rows = len(rows)
        if self.expert_tp is not None:
            gathered = all_gather_tensor_autograd(arrived.flatten(), 0, self.expert_tp)
            arrived = gathered.view(self.expert_tp.size(), *arrived.shape)
            # The all-gather needs equal lengths, so every rank pads its rows to the longest.
            longest = int(arrived.sum(dim=(1, 2)).max())
            rows = functional.pad(rows, (0, 0, 0, longest - num_rows))
            rows = all_gather_tensor_autograd(rows.contiguous(), 0, self.expert_tp)
            # The padding of each rank counts as one more expert, sorted behind the real ones.
            filling = longest - arrived.sum(dim=(1, 2))
            arrived = torch.cat([arrived.flatten(1), filling[:, None]], dim=1)
        with record_function("@moe_mlp.permute+"):
            num_kinds = self.num_local + (self.expert_tp is not None)
            # Sort the rows by expert, for the grouped product; `ends` leaves the padding out.
            kinds = torch.arange(self.num_local, device=rows.device).repeat(self.num_ranks)
            if self.expert_tp is not None:
                kinds = torch.cat([kinds, kinds.new_tensor([self.num_local])]).repeat(self.expert_tp.size())
            expert = kinds.repeat_interleave(arrived.flatten(), output_size=len(rows))
            order = expert.argsort(stable=True)
            ends = torch.bincount(expert, minlength=num_kinds)[: self.num_local].cumsum(0).int()
            multiplied = rows[order[: int(ends[-1])]]
        answers = self._multiply(multiplied, ends)
        with record_function("@moe_mlp.permute+"):
            answers = torch.zeros_like(rows).index_copy(0, order[: int(ends[-1])], answers)
        if self.expert_tp is None:
            return answers
        summed: Tensor = reduce_scatter_tensor_autograd(answers, "sum", 0, self.expert_tp)
        return summed[:num_rows]

    def _multiply(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return both products of all local experts, whose rows of x [n, h] end at `ends` [local experts]."""
        up = self.up.view(self.num_local, -1, x.shape[1])
        down = self.down.view(self.num_local, x.shape[1], -1)
        with record_function("@moe_mlp.up"):
            y = _grouped_product(x, up, ends)
        with record_function("@moe_mlp.activation"):
            y = apply_activation(y, self.gates)
        with record_function("@moe_mlp.down"):
            return _grouped_product(y, down, ends)


def _exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the numbers of rows that other ranks will send: `counts` [ranks, local experts] after an all-to-all."""
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts.contiguous(), group=group)
    return arriving


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply x [n, k] by transposed weights [g, m, k], where each group's rows end at `ends` [g]; return [n, m]."""
    if all(size * x.element_size() % 16 == 0 for size in weights.shape[1:]):  # alignment of torch's kernel
        return _GroupedProduct.apply(x, weights, ends)  # type: ignore[no-any-return, no-untyped-call] # torch leaves both untyped
    begins = [0, *ends.tolist()]
    parts = [x[begin:end] @ weight.t() for begin, end, weight in zip(begins, begins[1:], weights, strict=False)]
    return torch.cat(parts)


class _GroupedProduct(torch.autograd.Function):
    """Grouped matrix product of torch; the rows of each group end at `ends`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, ends)
        return torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_x = torch._grouped_mm(gradient, weights, offs=ends)
        of_weights = torch._grouped_mm(gradient.t(), x, offs=ends)
        return of_x, of_weights, None
