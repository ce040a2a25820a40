import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.job.model_catalog import find_model
from hardware.cluster_file import find_cluster
from tests.support.settings.placements import LENGTHS, module
from tuner.place.transfers import (
    broadcast_weights_s,
    data_bytes,
    latency_s,
    network_bytes_per_s,
    reshard_weights_s,
    send_s,
)

CLUSTER = find_cluster("dgx-h100", 4)


def test_sizes_follow_the_shapes():
    """Bytes of what a module sends are those of the shapes, by arithmetic."""
    sender, model = module("a", batch=4, length=100), find_model("llama3-8b")

    assert data_bytes(sender, "tokens") == 8 * 400
    assert data_bytes(sender, "logprobs") == 4 * 400
    assert data_bytes(sender, "scores") == 4 * 4
    assert data_bytes(sender, "logits") == 2 * 400 * model.vocab_size
    assert data_bytes(sender, "embeddings", tokens=10) == 2 * 40 * model.hidden_size
    assert data_bytes(sender, "weights") == 2 * model.num_parameters


def test_a_generator_sends_prompts_and_responses():
    """Tokens of a generator are those of its prompts and responses."""
    generated = data_bytes(module("a", "generate"), "tokens")

    assert generated == 8 * LENGTHS.prompts * (LENGTHS.prompt_tokens + LENGTHS.response_tokens)


@given(senders=st.integers(1, 32), receivers=st.integers(1, 32), size=st.floats(0, 1e13))
def test_sending_takes_the_bandwidth_of_the_smaller_set(senders, receivers, size):
    """Data leave through the adapters of the smaller set, in either direction."""
    expected_s = latency_s(CLUSTER) + size / (min(senders, receivers) * network_bytes_per_s(CLUSTER))

    assert send_s(size, senders=senders, receivers=receivers, cluster=CLUSTER) == pytest.approx(expected_s)
    assert send_s(size, senders=receivers, receivers=senders, cluster=CLUSTER) == pytest.approx(expected_s)


def test_weights_on_the_same_layout_are_not_resharded():
    """Nothing is gathered where the receiver's parts are no larger; else (1/r - 1/s) of the weights are."""
    reshard = {"cluster": CLUSTER, "in_domain": False}
    size = 140e9

    assert reshard_weights_s(size, sender_parts=8, receiver_parts=8, **reshard) == 0
    assert reshard_weights_s(size, sender_parts=4, receiver_parts=8, **reshard) == 0
    gathered = (1 / 2 - 1 / 8) * size / network_bytes_per_s(CLUSTER)
    assert reshard_weights_s(size, sender_parts=8, receiver_parts=2, **reshard) == pytest.approx(gathered)


def test_seventy_billion_parameters_arrive_within_seconds():
    """140 GB from 64 senders to replicas of 8 devices at 400 Gb/s each take about 140 / (8 * 45) s."""
    seconds = broadcast_weights_s(140e9, senders=64, parts=8, cluster=CLUSTER)

    assert 140 / (8 * 50) < seconds < 140 / (8 * 25)
