"""States, traffic and products of optimizers, by hand arithmetic; torch's own stand in tests/integration."""

import numpy as np
import pytest

from costmodels.optimizers.contract import PARTS, Widths
from costmodels.optimizers.registry import NOT_MODELLED, OPTIMIZERS, why_unknown

FULL = Widths(4, 4, 4)


@pytest.mark.parametrize(
    ("name", "matrix", "embedding"),
    [
        ("adam", 8, 8),
        ("sgd", 4, 4),
        ("plain_sgd", 0, 0),
        ("lion", 4, 4),
        ("muon", 4, 8),
        ("adaptive_muon", 8, 8),
        ("adam_8bit", 2 * (1 + 4 / 256), 8),
        ("ademamix", 12, 12),
    ],
)
def test_states_of_matrices_and_tables(name, matrix, embedding):
    """Bytes per parameter of the states of a matrix and of the embedding, beside the copy of the weights."""
    one = OPTIMIZERS[name]

    assert one.state_bytes("matrix", FULL) == pytest.approx(matrix)
    assert one.state_bytes("embedding", FULL) == pytest.approx(embedding)


def test_narrow_moments_are_those_of_the_run():
    """Moments that a run keeps in 16 and 8 bits count as wide as that; 8-bit optimizers have widths of their own."""
    narrow = Widths(2, 2, 1)

    assert OPTIMIZERS["adam"].state_bytes("matrix", narrow) == 3
    assert OPTIMIZERS["lion"].state_bytes("matrix", narrow) == 2
    assert OPTIMIZERS["adam_8bit"].state_bytes("matrix", narrow) > 2


def test_adafactor_keeps_lines_of_matrices_only():
    """It has a number for each row and column of a matrix, and for each element of a vector."""
    one = OPTIMIZERS["adafactor"]

    assert (one.state_bytes("matrix", FULL), one.line_bytes("matrix", FULL)) == (0, 4)
    assert (one.state_bytes("vector", FULL), one.line_bytes("vector", FULL)) == (4, 0)


def test_optimizers_are_uniform_where_all_parts_are_alike():
    """Only those that treat every element alike are priced by the sum of parameters."""
    different = {name for name, one in OPTIMIZERS.items() if not one.is_uniform}

    assert different == {"muon", "adaptive_muon", "adafactor", "adam_8bit", "lion_8bit"}


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 1024), (512, 512)])
def test_newton_schulz_multiplies_the_short_side(shape):
    """Each iteration of a matrix with a short side r and a long one c takes 4 r^2 c + 2 r^3 FLOPs."""
    sides = [np.array([side], dtype=np.float64) for side in shape]
    short, long = min(shape), max(shape)

    found = OPTIMIZERS["muon"].products(*sides, steps=5, method="standard")

    assert sum(2 * p.m * p.k * p.n * p.times for p in found) == 5 * (4 * short**2 * long + 2 * short**3)


def test_gram_multiplies_the_long_side_four_times():
    """DeepSpeed's method meets the long side at the begin, before and after the restart, and at the end."""
    found = OPTIMIZERS["muon"].products(np.array([1000.0]), np.array([8000.0]), steps=5, method="gram")

    assert sum(2 * p.m * p.k * p.n * p.times for p in found) == 4 * 2 * 1000**2 * 8000 + 14 * 2 * 1000**3


def test_an_unknown_optimizer_is_named_with_the_nearest():
    """The message names what is unknown, why, and what would be valid."""
    assert "did you mean 'adamw'" in why_unknown("AdamWW", ("adam", "adamw", "muon"))
    assert "QR" in why_unknown("soap", ("adam",))
    assert not NOT_MODELLED.keys() & OPTIMIZERS.keys()


def test_sharding_goes_as_far_as_the_framework_allows():
    """Megatron-LM shards Muon up to ZeRO 1 and SGD not at all; others shard all as Adam."""
    assert [OPTIMIZERS[name].sharded_stage("megatron", 3) for name in ("adam", "muon", "sgd")] == [3, 1, 0]
    assert OPTIMIZERS["muon"].sharded_stage("deepspeed", 3) == 3
    assert set(PARTS) == {"matrix", "expert", "vector", "embedding", "head"}
