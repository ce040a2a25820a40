"""Rules on context and sequence parallelism: into which parts a sequence is cut."""

from __future__ import annotations

import numpy as np

from hardware.arrays import IntArray
from tuner.space.rules.rule import Columns, Rule


def _context_chunks(c: Columns) -> IntArray:
    # ring attention cuts the sequence into 2cp chunks, so that each rank has an early and a late one
    return np.asarray(c["up"] * np.where(c["cp"] > 1, 2 * c["cp"], 1))


def _split_length(c: Columns, chunks: IntArray) -> IntArray:
    # norms are split over tp with sequence parallelism alone
    return np.asarray(np.where(c["sequence_parallel"] == 1, c["tp"], 1) * chunks)


MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask (torch/nn/attention/flex_attention.py, _DEFAULT_SPARSE_BLOCK_SIZE)."""


_TWO_CHUNKS = "ring attention deals two chunks to each rank to balance the causal mask"


SEQUENCE_RULES = (
    Rule(
        name="sequence",
        needs=("tp", "cp", "up"),
        keep=lambda s, c: s.job.sequence_length % (c["tp"] * _context_chunks(c)) == 0,
        reason=lambda s: (
            f"tp*up*2cp (tp*up without cp) must divide the sequence of {s.job.sequence_length} tokens: {_TWO_CHUNKS}"
        ),
    ),
    Rule(
        # megatron-core utils.py, get_batch_on_this_cp_rank: two chunks for each rank of cp*up, also with all-to-all
        # exchange alone; tensor_parallel/mappings.py: the rest is split over tp with sequence parallelism
        name="sequence_ranks",
        needs=("tp", "cp", "up", "sequence_parallel"),
        keep=lambda s, c: (
            (s.job.sequence_length % np.where(c["cp"] * c["up"] > 1, 2 * c["cp"] * c["up"], 1) == 0)
            & (s.job.sequence_length % _split_length(c, c["cp"] * c["up"]) == 0)
        ),
        reason=lambda s: (
            f"2*cp*up (1 without cp and up) must divide the sequence of {s.job.sequence_length} tokens, and with "
            f"sequence parallelism tp*cp*up too: each rank of cp*up takes two chunks to balance the causal mask"
        ),
    ),
    Rule(
        # torchtitan trainer.py, seq_len_divisor
        name="sequence_split",
        needs=("tp", "cp", "sequence_parallel"),
        keep=lambda s, c: s.job.sequence_length % _split_length(c, np.where(c["cp"] > 1, 2 * c["cp"], 1)) == 0,
        reason=lambda s: (
            f"tp*2*cp (tp without cp, 2*cp without sequence parallelism) must divide the sequence of "
            f"{s.job.sequence_length} tokens"
        ),
    ),
    Rule(
        # torch/distributed/tensor/experimental/_context_parallel/_attention.py: masks of whole blocks for each rank
        name="sequence_blocks",
        needs=("cp",),
        keep=lambda s, c: (c["cp"] == 1) | (s.job.sequence_length % (MASK_BLOCK * c["cp"]) == 0),
        reason=lambda s: (
            f"cp > 1 needs whole blocks of FlexAttention's mask: {MASK_BLOCK}*cp must divide the sequence of "
            f"{s.job.sequence_length} tokens"
        ),
    ),
    Rule(
        name="sequence_context",
        needs=("cp", "up"),
        keep=lambda s, c: s.job.sequence_length % _context_chunks(c) == 0,
        reason=lambda s: (
            f"up*2cp (up without cp) must divide the sequence of {s.job.sequence_length} tokens: {_TWO_CHUNKS}"
        ),
    ),
    Rule(
        name="sequence_chunks",
        needs=("cp",),
        keep=lambda s, c: (c["cp"] == 1) | (s.job.sequence_length % (2 * c["cp"]) == 0),
        reason=lambda s: f"2*cp must divide the sequence of {s.job.sequence_length} tokens: {_TWO_CHUNKS}",
    ),
    Rule(
        name="sequence_parts",
        needs=("tp", "cp", "up"),
        keep=lambda s, c: s.job.sequence_length % (c["tp"] * c["cp"] * c["up"]) == 0,
        reason=lambda s: f"tp*cp*up must divide the sequence of {s.job.sequence_length} tokens",
    ),
    Rule(
        name="cp_or_up",
        needs=("cp", "up"),
        keep=lambda _, c: (c["cp"] == 1) | (c["up"] == 1),
        reason=lambda s: f"{s.runtime.name} runs ring attention (cp) or Ulysses (up), not both",
    ),
    Rule(
        name="tp_or_context",
        needs=("tp", "cp", "up"),
        keep=lambda _, c: (c["tp"] == 1) | (c["cp"] * c["up"] == 1),
        reason=lambda s: f"{s.runtime.name} splits by tp or by cp and up, not both: they are modes of one group",
    ),
    Rule(
        name="no_sequence_parallel",
        needs=("sequence_parallel",),
        keep=lambda _, c: c["sequence_parallel"] == 0,
        reason=lambda s: f"{s.runtime.name} has no sequence parallelism",
    ),
    Rule(
        name="sequence_parallel_length",
        needs=("tp", "sequence_parallel"),
        keep=lambda s, c: (c["sequence_parallel"] == 0) | (s.job.sequence_length % c["tp"] == 0),
        reason=lambda s: f"with sequence parallelism tp must divide the sequence of {s.job.sequence_length} tokens",
    ),
    Rule(
        name="sequence_parallel_needs_tp",
        needs=("tp", "sequence_parallel"),
        keep=lambda _, c: (c["sequence_parallel"] == 0) | (c["tp"] > 1),
        reason=lambda _: "without tp there is nothing that sequence parallelism could split",
    ),
)
