import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job.sequences import MOST_LENGTHS, Sequences, check_rows, histogram, pack_rows, sample_lengths
from hardware.io.errors import ConfigError

THREE = Sequences(lengths=(512, 2048, 8192), shares=(0.6, 0.3, 0.1))


def of_lengths(lengths, counts=None, **keys):
    """The histogram of some lengths."""
    counts = [1] * len(lengths) if counts is None else counts
    given = {"layout": "packed", "order": "shuffled"} | keys
    return histogram(np.array(lengths), np.array(counts, dtype=np.float64), **given)


@st.composite
def histograms(draw):
    """A histogram of a few lengths of at most 2,000 tokens."""
    lengths = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=5, unique=True))
    return of_lengths(lengths, [draw(st.integers(1, 9)) for _ in lengths])


def test_equal_lengths_are_added_up_in_any_order():
    """A histogram says how many sequences have each length, however they are listed."""
    assert of_lengths([8, 2, 8, 4], [1, 2, 2, 3]) == of_lengths([2, 4, 8], [2, 3, 3])
    assert of_lengths([2, 4], [0, 3]) == Sequences(lengths=(4,), shares=(1.0,))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"lengths": (2, 2), "shares": (0.5, 0.5)}, "ascend"),
        ({"lengths": (0, 2), "shares": (0.5, 0.5)}, "ascend"),
        ({"lengths": (), "shares": ()}, "1 to"),
        ({"lengths": (2,), "shares": (0.5, 0.5)}, "as many"),
        ({"lengths": (2, 3), "shares": (1.0, 0.0)}, "above 0"),
        ({"lengths": (2, 3), "shares": (0.5, 0.6)}, "sum to 1"),
        ({"lengths": (2,), "shares": (1.0,), "layout": "paked"}, "packed"),
        ({"lengths": (2,), "shares": (1.0,), "layout": "padded", "order": "balanced"}, "packed"),
    ],
)
def test_what_is_no_histogram_is_refused(keys, says):
    """A mistake is named with the rule that it breaks."""
    with pytest.raises(ConfigError, match=says):
        Sequences(**keys)


def test_a_sequence_longer_than_a_row_is_refused():
    """A row must hold the longest sequence."""
    check_rows(THREE, 8192)
    with pytest.raises(ConfigError, match="8192 tokens, more than sequence_length=4096"):
        check_rows(THREE, 4096)


def test_a_row_of_too_many_sequences_is_refused():
    """Rows must be short enough for the sample of sequences to fill them."""
    short = of_lengths([2])
    check_rows(short, 2**17)
    with pytest.raises(ConfigError, match="at most 131072"):
        check_rows(short, 2**17 + 1)


@given(histograms(), st.integers(1, 3), st.sampled_from([1, 2]))
def test_the_longest_of_several_is_that_of_all_draws(sequences, number, power):
    """The expected longest of n sequences is the mean over every way to draw them."""
    pairs = list(zip(sequences.lengths, sequences.shares, strict=True))
    expected = sum(
        np.prod([share for _, share in draw]) * max(length for length, _ in draw) ** power
        for draw in itertools.product(pairs, repeat=number)
    )

    assert sequences.mean_longest(np.array([number]), power=power)[0] == pytest.approx(expected, rel=1e-9)


def test_a_token_stands_in_a_longer_sequence_than_the_mean_one():
    """The attended length is the mean over tokens: 512, 2048 and 8192 count 0.6, 0.3 and 0.1 times their tokens."""
    tokens = np.array([0.6 * 512, 0.3 * 2048, 0.1 * 8192])

    assert THREE.mean_length == pytest.approx(tokens.sum())
    assert THREE.attended_length == pytest.approx((tokens * [512, 2048, 8192]).sum() / tokens.sum())


def test_bins_keep_what_attention_costs():
    """Many lengths become 1,024 of them, with the same mean length and attended length to one part in a thousand."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(np.rint(rng.lognormal(6.5, 1.2, 50_000)) + 1, 100_000).astype(np.int64)
    found = of_lengths(lengths)

    assert MOST_LENGTHS // 2 < len(found.lengths) <= MOST_LENGTHS
    assert found.mean_length == pytest.approx(lengths.mean(), rel=1e-3)
    assert found.attended_length == pytest.approx((lengths**2.0).sum() / lengths.sum(), rel=1e-3)


@settings(max_examples=25)
@given(histograms(), st.sampled_from([1, 3, 20]))
def test_rows_hold_whole_sequences_and_no_more_than_fit(sequences, longest_per_row):
    """Every sequence is in one row, no row overflows, and the sums of a row are those of its sequences."""
    row_tokens = sequences.longest * longest_per_row
    packed = pack_rows(sequences, row_tokens)

    assert set(packed.length.tolist()) <= set(sequences.lengths)
    assert packed.tokens.max() <= row_tokens
    assert np.array_equal(packed.row, np.sort(packed.row))
    for row in (0, len(packed.tokens) // 2, len(packed.tokens) - 1):
        own = packed.length[packed.row == row].astype(float)
        assert (packed.tokens[row], packed.squares[row]) == (own.sum(), (own**2).sum())


def test_rows_are_full_and_have_the_lengths_of_the_data():
    """Rows much longer than sequences are 98% full, and lengths come as often as in the histogram."""
    packed = pack_rows(THREE, 8 * 8192)

    assert packed.tokens.mean() > 0.98 * 8 * 8192
    for length, share in zip(THREE.lengths, THREE.shares, strict=True):
        assert (packed.length == length).mean() == pytest.approx(share, rel=0.02)
        assert (sample_lengths(THREE) == length).mean() == pytest.approx(share, abs=1e-5)


def test_rows_of_thousands_of_sequences_are_cut_out_of_the_stream():
    """Rows that hold very many short sequences are full too."""
    packed = pack_rows(of_lengths([3, 5]), 100_000)

    assert packed.tokens == pytest.approx(100_000, abs=5)


@pytest.mark.parametrize("per_row", [1, 2, 16])
def test_sequences_that_divide_a_row_fill_it(per_row):
    """Equal sequences that divide a row leave nothing of it."""
    packed = pack_rows(of_lengths([512]), 512 * per_row)

    assert set(packed.tokens.tolist()) == {512.0 * per_row}
