import numpy as np
import pytest

from tuner.imports.log.step_shape import shape_of


def alike(rng, count, likeness):
    """Noise each of whose values resembles the one before."""
    found = rng.standard_normal(count)
    for at in range(1, count):
        found[at] = likeness * found[at - 1] + np.sqrt(1 - likeness**2) * found[at]
    return found


def spikes(rng, count):
    """Heights of a few steps that something slowed down, and zeros."""
    return (rng.random(count) < 0.02) * rng.standard_exponential(count)


NOISE = {
    "narrow": lambda rng, count: 1 + 0.02 * rng.standard_normal(count),
    "wide": lambda rng, count: np.exp(0.5 * rng.standard_normal(count)),
    "uniform": lambda rng, count: 1 + 0.3 * rng.random(count),
    "skewed": lambda rng, count: 1 + 0.2 * rng.standard_exponential(count),
    "heavy tails": lambda rng, count: np.exp(0.05 * rng.standard_t(3, count)),
    "rare spikes": lambda rng, count: 1 + 0.01 * rng.standard_normal(count) + 0.5 * spikes(rng, count),
    "correlated": lambda rng, count: np.exp(0.05 * alike(rng, count, 0.9)),
    "slow start": lambda rng, count: 1 + 0.02 * rng.standard_normal(count) + np.exp(-np.arange(count) / 2),
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_has_no_shape(kind):
    """Of a hundred series of noise, short and long, at most two are told to be of two kinds or to drift."""
    rng = np.random.default_rng(7)
    shapes = [shape_of(NOISE[kind](rng, count)) for count in (12, 30, 100, 300) for _ in range(25)]

    assert sum(bool(shape.in_words) for shape in shapes) <= 2


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda at: 1 + 0.5 * (at % 10 == 9), "two kinds: 90 take 2 s and 10 take 3 s, at every interval of 10 steps"),
        (lambda at: 1 + 2.0 * (at % 33 == 32), "two kinds: 97 take 2 s and 3 take 6 s, at every interval of 33 steps"),
        (lambda at: 1 + 0.3 * np.isin(at % 7, (2, 3)), "two kinds: 72 take 2 s and 28 take 2.6 s"),
        (lambda at: 1 + 0.3 * (at >= 40), "change once: the first 40 take 2 s, and the other 60 take 2.6 s"),
        (lambda at: 1 + 0.3 * (at < 50), "change once: the first 50 take 2.6 s, and the other 50 take 2 s"),
        (lambda at: 1 + 0.4 * at / 99, "s (+40%)"),
        (lambda at: (1 + 0.5 * (at % 2)) * (1 - 0.1 * at / 99), "drift"),
    ],
    ids=["checkpoints", "rare checkpoints", "mixed", "slower", "faster", "drift", "both"],
)
def test_shapes_are_told_with_their_numbers(factor, words):
    """Steps of two kinds, a change and a drift are told, with step times that are right to a few percent."""
    rng = np.random.default_rng(3)
    at = np.arange(100)
    told = shape_of(2.0 * factor(at) * (1 + 0.0001 * rng.standard_normal(100))).in_words

    assert len(told) == (2 if words == "drift" else 1)
    assert words in told[-1]
