"""Shares of queries and keys that masks let through, against counted pairs."""

import numpy as np
import pytest

from costmodels.blocks.mask import Mask


def counted(mask, length):
    """The share of all pairs that pass, one by one; of a diagonal pair a half, as in a long sequence."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    weight = np.where(query == key, 0.5, np.where(key < query, 1.0, 0.0 if mask.causal else 1.0))
    if mask.window:
        weight = np.where(
            abs(query - key) < mask.window, weight, np.where(abs(query - key) == mask.window, weight / 2, 0)
        )
    if mask.chunk:
        weight = np.where(query // mask.chunk == key // mask.chunk, weight, 0.0)
    if not mask.causal:
        weight = np.where(query == key, 1.0, weight)
    return weight.sum() / length**2


@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize(
    "mask",
    [
        *(Mask(), Mask(causal=False), Mask(window=128), Mask(window=1000), Mask(window=10_000)),
        *(Mask(chunk=128), Mask(chunk=4096), Mask(causal=False, window=128), Mask(causal=False, chunk=128)),
    ],
    ids=str,
)
def test_the_share_is_that_of_counted_pairs(mask, length):
    """Of every mask, within what short sequences round."""
    assert mask.share(length) == pytest.approx(counted(mask, length), abs=1.5 / length)


def test_a_window_or_a_chunk_longer_than_the_sequence_is_no_mask():
    """Then a query sees all earlier keys, however long the sequences of a grid are."""
    lengths = np.array([64.0, 512.0])

    for mask in (Mask(window=512), Mask(chunk=512)):
        assert mask.share(lengths).tolist() == [0.5, 0.5]
        assert mask.share(4096.0) < 0.5


def test_a_name_tells_what_the_mask_is():
    """Attention to all earlier keys, which most models have, has no word."""
    masks = (Mask(), Mask(causal=False), Mask(window=8), Mask(chunk=8))

    assert [mask.label for mask in masks] == ["", "full", "window", "chunk"]
