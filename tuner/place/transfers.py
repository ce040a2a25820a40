"""Sizes of what modules send to each other, and times of sending it between sets of devices.

Formulas, with S sequences of T tokens per step, hidden size h, vocabulary v, and elements of b bytes:

- tokens: 8 S T (int64 token numbers, as PyTorch's); a generator sends prompt and response.
- logprobs: 4 S T (one fp32 number per token); scores: 4 S.
- logits: b S T v; embeddings: b S T h.
- weights: b times the number of parameters.

Between two sets of devices the data leave through all adapters of the smaller set at once, at the bandwidth that
point-to-point messages reach (hardware/link.py). Weights leave one copy of the model and reach every replica of the
receiver by a pipelined broadcast, so that each device receives its own part once: the longer of sending one copy and of
receiving one part takes the time. On the devices of both, weights are resharded in place: a device gathers the part
that it lacks, (1 / parts of the receiver - 1 / parts of the sender) of the weights, as HybridFlow's 3D-HybridEngine
does (Sheng et al. 2024, arXiv:2409.19256, section 5.4 and table 2).
"""

from __future__ import annotations

import functools

from hardware.cluster import Cluster
from hardware.link import Link, combine_links
from tuner.place.workload import EMBEDDINGS, WEIGHTS, Module

TOKEN_BYTES, NUMBER_BYTES = 8, 4


def data_bytes(sender: Module, sends: str, tokens: int | None = None) -> float:
    """Return the size of the data that a module sends in one step [bytes].

    Args:
        sender: Module that sends.
        sends: Kind of data, of `SENDS`.
        tokens: Tokens per sequence that travel; None for the sender's.
    """
    if sends == WEIGHTS:
        return sender.weight_bytes
    made = sender.generation
    sequences = made.prompts * made.responses_per_prompt if made else sender.sequences_per_step
    length = tokens or (made.prompt_tokens + made.response_tokens if made else sender.training.sequence_length)
    of_token = {
        "tokens": TOKEN_BYTES,
        "logprobs": NUMBER_BYTES,
        "logits": sender.training.element_bytes * sender.model.vocab_size,
        EMBEDDINGS: sender.training.element_bytes * sender.model.hidden_size,
    }
    return float(sequences * (NUMBER_BYTES if sends == "scores" else length * of_token[sends]))


@functools.lru_cache(maxsize=64)
def network_bytes_per_s(cluster: Cluster) -> float:
    """Return the bandwidth of messages of the cluster's slowest device to other domains [bytes/s]."""
    return min(_reached(group.nic_links) for group in cluster.groups)


@functools.lru_cache(maxsize=64)
def local_bytes_per_s(cluster: Cluster) -> float:
    """Return the bandwidth of messages of the slowest device inside its domain [bytes/s]."""
    return min(_reached(group.intra_links) for group in cluster.groups)


def _reached(links: tuple[Link, ...]) -> float:
    return 1 / combine_links(links).cost().hop_s_per_byte


@functools.lru_cache(maxsize=64)
def latency_s(cluster: Cluster) -> float:
    """Return the latency of a message between domains [s]."""
    return max(combine_links(group.nic_links).latency_s for group in cluster.groups)


def send_s(size_bytes: float, *, senders: int, receivers: int, cluster: Cluster) -> float:
    """Return the time of sending data between two sets of devices [s]."""
    return latency_s(cluster) + size_bytes / (min(senders, receivers) * network_bytes_per_s(cluster))


def broadcast_weights_s(size_bytes: float, *, senders: int, parts: int, cluster: Cluster) -> float:
    """Return the time of sending weights to every replica on other devices [s].

    Args:
        size_bytes: Size of all weights.
        senders: Number of devices that send, which share one copy.
        parts: Devices of one replica of the receiver, each with one part.
        cluster: Cluster of both.
    """
    return latency_s(cluster) + size_bytes / (min(senders, parts) * network_bytes_per_s(cluster))


def reshard_weights_s(
    size_bytes: float, *, sender_parts: int, receiver_parts: int, in_domain: bool, cluster: Cluster
) -> float:
    """Return the time in which the devices of both modules gather the weights that they lack [s].

    Args:
        size_bytes: Size of all weights.
        sender_parts: Devices that share one copy of the sender's weights.
        receiver_parts: Devices that share one copy of the receiver's.
        in_domain: Whether such a group of the sender is inside one domain.
        cluster: Cluster of both.
    """
    missing = max(0.0, 1 / receiver_parts - 1 / sender_parts) * size_bytes
    return missing / (local_bytes_per_s(cluster) if in_domain else network_bytes_per_s(cluster))
