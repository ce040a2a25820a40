"""Buckets of sums over ranks: what nothing reads yet waits, and is added up together with others in one message.

As in DistributedDataParallel, a bucket is sent when it is full, and here also when something in it is read. Buckets are
sent in the order of the program, which is the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from costmodels.sharding.exports.torch_ranks import Rank
from costmodels.sharding.joining import MOST_BYTES
from costmodels.sharding.layouts import PARTIAL, REPLICATED, Layout

Bucket = tuple[Layout, torch.dtype]
"""Axes along which its parts are added up, as the layout of one that nothing else cuts, and their type."""


class Buckets:
    """Parts of sums that wait.

    Args:
        rank: This rank.
        sums: Where finished sums are put, by the names that the parts were given with.
    """

    def __init__(self, rank: Rank, sums: MutableMapping[Any, Tensor]) -> None:
        self._rank, self._sums = rank, sums
        self._waiting: dict[Bucket, dict[Hashable, Tensor]] = defaultdict(dict)
        self._bucket_of: dict[Hashable, Bucket] = {}

    def add(self, name: Hashable, part: Tensor, before: Layout, after: Layout) -> bool:
        """Let a part wait, if adding it up is all that its layout needs; return whether it does."""
        axes = tuple(PARTIAL if one == PARTIAL else REPLICATED for one in before)
        is_sum = tuple(REPLICATED if one == PARTIAL else one for one in before) == after and before != after
        size = part.numel() * part.element_size()
        if not is_sum or not part.is_floating_point() or not 0 < size <= MOST_BYTES:
            return False
        bucket = (axes, part.dtype)
        if sum(one.numel() for one in self._waiting[bucket].values()) * part.element_size() + size > MOST_BYTES:
            self._send(bucket)
        self._waiting[bucket][name] = part
        self._bucket_of[name] = bucket
        return True

    def settle(self, name: Hashable) -> None:
        """Send the bucket in which a part waits, if it does."""
        if name in self._bucket_of:
            self._send(self._bucket_of[name])

    def settle_all(self) -> None:
        """Send all buckets."""
        for bucket in list(self._waiting):
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Add up the parts of a bucket."""
        axes, _ = bucket
        parts = self._waiting.pop(bucket, {})
        if not parts:
            return
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        flat = self._rank.move(flat, flat.shape, axes, self._rank.everywhere)
        sums = torch.split(flat, [part.numel() for part in parts.values()])
        for (name, part), found in zip(parts.items(), sums, strict=True):
            del self._bucket_of[name]
            self._sums[name] = found.view(part.shape)
