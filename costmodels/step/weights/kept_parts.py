"""Parameters whose states one rank keeps and updates, by parts of the model, and the bytes and time that follow.

Where ZeRO shards the states, each rank keeps an equal share of them; or whole matrices, where an update multiplies
them, so that the fullest rank has more (Megatron-LM, layer_wise_optimizer.py; torchtitan, dist_muon.py; DeepSpeed,
whose ranks update each matrix of which they keep a part).

Letters: c kinds of stages, w rows of weights (see `placement.Pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.optimizers.contract import MATRICES, PARTS, Part, Widths
from costmodels.optimizers.registry import OPTIMIZERS
from costmodels.step.placement import LocalParameters, expert_shards, local_table
from costmodels.step.weights.matrices import layer_matrices
from hardware.arrays import FloatArray, IntArray

FLAT_RULE_SETS = ("megatron", "mindspeed", "gpt-neox", "megatron-deepspeed", "nanotron")
"""Rule sets of frameworks that shard states as flat buffers, in which no matrix is seen."""
JOINING_RULE_SETS = ("megatron", "mindspeed", "megatron-2021", "megatron-2022", "megatron-deepspeed", "gpt-neox")
"""Rule sets of frameworks that join the gate of an MLP with its first matrix."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptParts:
    """Parameters whose states the fullest rank keeps, each [c, w].

    Attributes:
        parameters: Parameters of each part.
        lines: Rows and columns of each part's matrices together.
        is_sharded: Whether ZeRO shards the states [w].
    """

    parameters: Mapping[Part, FloatArray]
    lines: Mapping[Part, FloatArray]
    is_sharded: NDArray[np.bool_]

    @classmethod
    def of(cls, job: TrainingJob, weights: ConfigGrid, pieces: FloatArray, local: LocalParameters) -> KeptParts | None:
        """Count the parameters of stages that hold `pieces` [c, P].

        Return None for an optimizer that treats all parts alike, whose figures follow from the sums in `local`.
        """
        optimizer = OPTIMIZERS[job.optimizer]
        if optimizer.is_uniform:
            return None
        model = job.model
        table, blocks = local_table(model, weights), pieces @ model.blocks_of_piece
        counts: dict[Part, FloatArray] = dict.fromkeys(PARTS, np.zeros(local.dense.shape))
        counts["embedding"] = np.outer(pieces[:, -2], table)
        # a tied head is a table of its own on the last of several stages only
        has_head = (weights.pp > 1) | (not job.model.tied_embeddings)
        counts["head"] = np.outer(pieces[:, -1], table * has_head)
        lines: dict[Part, FloatArray] = dict(counts)
        for name in ("embedding", "head"):
            lines[name] = counts[name] / job.model.hidden_size + job.model.hidden_size * (counts[name] > 0)
        sizes: dict[Part, list[tuple[FloatArray, FloatArray]]] = {part: [] for part in MATRICES}
        for matrix in layer_matrices(job, weights, joins_gate=True, splits_qkv=False):
            rows, columns = matrix.local
            held = matrix.held(blocks)
            counts[matrix.part] = counts[matrix.part] + held * rows * columns
            lines[matrix.part] = lines[matrix.part] + held * (rows + columns)
            sizes[matrix.part].append((rows * columns, held))
        counts["vector"] = np.maximum(local.dense - sum(counts[part] for part in PARTS if part != "expert"), 0.0)
        is_sharded = weights.zero_stage >= 1
        for part in PARTS:
            ranks = np.where(is_sharded, shards_of(part, weights), 1)
            if part in MATRICES and optimizer.needs_matrices:
                counts[part] = fullest(sizes[part], ranks) if sizes[part] else counts[part]
            else:
                counts[part] = counts[part] / ranks
            lines[part] = lines[part] / ranks
        return cls(parameters=counts, lines=lines, is_sharded=is_sharded)

    def state_bytes(self, job: TrainingJob, runtime: RuntimeProfile, widths: Widths) -> FloatArray:
        """Compute the size of the states with the optimizer's own copy of the weights [bytes], [c, w].

        A flat shard keeps a whole second moment in place of factors.
        """
        optimizer = OPTIMIZERS[job.optimizer]
        is_flat = self.is_sharded & (runtime.rule_set in FLAT_RULE_SETS)
        total = np.zeros(1)
        for part in PARTS:
            line, number = optimizer.line_bytes(part, widths), self.parameters[part]
            factored = np.where(is_flat, widths.second * number, line * self.lines[part]) if line else 0.0
            total = total + (widths.weight + optimizer.state_bytes(part, widths)) * number + factored
        return total

    def moved_bytes(self, job: TrainingJob, widths: Widths, gradient_bytes: float) -> FloatArray:
        """Compute what the passes of an update move [bytes], [c, w]: `gradient_bytes` per parameter beside states."""
        optimizer = OPTIMIZERS[job.optimizer]
        total = np.zeros(1)
        for part in PARTS:
            states = widths.weight + optimizer.state_bytes(part, widths)
            each = gradient_bytes + 2 * states + optimizer.further_bytes(part)
            total = total + each * self.parameters[part] + 2 * optimizer.line_bytes(part, widths) * self.lines[part]
        return total


def shards_of(part: Part, weights: ConfigGrid) -> IntArray:
    """Return the number of ranks over which ZeRO shards the states of a part [w]."""
    if part == "expert":
        return expert_shards(weights)
    return np.asarray(weights.dp * weights.cp * weights.up // weights.copies)


def fullest(costs: Sequence[tuple[FloatArray, FloatArray]], ranks: IntArray) -> FloatArray:
    """Return the least cost of the rank with the most, where each matrix is on one of `ranks` ranks [c, w].

    It is at least the mean, and what the ranks have of the k costliest matrices if these are dealt out evenly; a greedy
    assignment of the costliest first comes close to it (Graham 1969).

    Args:
        costs: Cost of one matrix of each kind [w], and how many there are of it [c, w].
        ranks: Number of ranks [w].
    """
    total = sum(cost * held for cost, held in costs)
    found = np.asarray(total / ranks)
    for cost, _ in costs:
        as_large = sum(np.where(other >= cost, held, 0.0) for other, held in costs)
        found = np.maximum(found, np.ceil(as_large / ranks - 1e-9) * cost)
    return np.where(ranks > 1, found, total)
