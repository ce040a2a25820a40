"""Operators f_i of one layer under a configuration, with their shapes, and the collectives between them.

Source of the idea: FlexParallel equation 1, f_i. Shapes depend on few of the dimensions (SHAPE_DIMENSIONS), so a grid
of tens of thousands of candidates has some hundreds of unique shapes. `unique_shapes` finds them, everything here is
computed once per unique row, and callers gather by its index.

Letters used below: u unique shape rows; T tokens of one micro-batch on one rank, `mbs*s/(cp*up)`; h hidden size.
Heads, ffn and vocabulary are divided by tp (Megatron-LM, Shoeybi et al. 2019, section 3), tokens by cp and up, and with
sequence parallelism norms and residuals work on T/tp tokens (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from costmodels.blocks.builder import OperatorBuilder
from costmodels.blocks.context import BlockContext, RuntimeFacts
from costmodels.blocks.operator import LAYER_FAMILIES, Operator, OpKind, Phase
from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import NARROW_BYTES, TrainingJob
from hardware.arrays import FloatArray, IntArray
from hardware.distinct import distinct_rows
from hardware.group_links import GroupLinks

SHAPE_DIMENSIONS = ("tp", "cp", "up", "ep", "mbs", "recompute", "sequence_parallel", "expert_tp", "plan")
"""Names of the dimensions on which the operators of layers and their times depend."""


_WIDE = {"fp8": "bf16", "nvfp4": "bf16"}
"""Type that replaces a narrow one in operators that do not support it: attention, the head, the router."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Collective:
    """One collective of a step, for g groups of ranks, and perhaps for several stages that have such groups [..., g].

    A ring of point-to-point exchanges is a SEND_RECV of the bytes that travel at once, executed once per exchange.

    Attributes:
        name: Name of the call site: the dimension of `placement.Groups` and the role, for example `tp.all_gather`.
        kind: Kind of collective, one of COLLECTIVES.
        wire_bytes: Message of the collective, as hardware/collectives.py defines it for each kind, divided by
            `network_efficiency` [..., g].
        network_efficiency: Share of the links' speed that the runtime reaches inside a step.
        group: Groups of ranks that take part [g].
        further_messages: Messages beyond the first into which a tensor is cut [..., g]; each costs the collective's
            latency again. None where the tensor is one message.
    """

    name: str
    kind: OpKind
    wire_bytes: FloatArray
    network_efficiency: float
    group: GroupLinks
    further_messages: FloatArray | None = None

    @property
    def messages(self) -> FloatArray:
        """Number of messages into which the tensor is cut [..., g]."""
        further = np.zeros(1) if self.further_messages is None else self.further_messages
        return np.broadcast_to(1.0 + further, np.broadcast_shapes(self.wire_bytes.shape, self.group.row.shape))

    @property
    def shape(self) -> FloatArray:
        """Columns [..., g, 3]: bytes of one message, ranks in the group, hosts that the group spans."""
        # whole bytes, so that equal collectives have equal shapes in spite of rounding
        message_bytes = np.rint(self.wire_bytes * self.network_efficiency / self.messages)
        columns = np.broadcast_arrays(message_bytes, self.group.size, self.group.domains)
        return np.stack(columns, axis=-1).astype(np.float64)


def unique_shapes(grid: ConfigGrid) -> tuple[ConfigGrid, IntArray]:
    """Return the rows of `grid` [n] that differ in shape [u], and the row of each configuration among them [n]."""
    first, row = distinct_rows([getattr(grid, name).astype(np.int64) for name in SHAPE_DIMENSIONS])
    return grid.take(first), row


def unique_tokens(job: TrainingJob, shapes: ConfigGrid) -> tuple[ConfigGrid, IntArray]:
    """Return the rows of `shapes` [u] that differ outside of the attention core [t], and the row of each among them.

    All other operators depend on the number of tokens of a rank, not on the mbs, cp and up that led to it. What a plan
    changes is applied to whole shapes.
    """
    # numbers of tokens are made ranks, since distinct_rows counts small whole numbers
    _, tokens = np.unique(local_tokens(job, shapes), return_inverse=True)
    others = [name for name in SHAPE_DIMENSIONS if name not in ("mbs", "cp", "up", "plan")]
    first, row = distinct_rows([tokens, *(getattr(shapes, name).astype(np.int64) for name in others)])
    return shapes.take(first), row


def local_tokens(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return T, the tokens of one micro-batch on one rank [n]."""
    return grid.mbs * job.row_tokens(grid.mbs) / (grid.cp * grid.up)


def residual_tokens(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return the tokens of a micro-batch in a rank's norms and residuals [n]: T, or T/tp with sequence parallelism."""
    return local_tokens(job, grid) / np.where(grid.sequence_parallel, grid.tp, 1)


def block_context(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> BlockContext:
    """Return what blocks are told of a job, a runtime and shapes [u]."""
    sequences = job.sequences
    return BlockContext(
        degrees=shapes,
        mbs=shapes.mbs,
        tokens=local_tokens(job, shapes),
        residual=residual_tokens(job, shapes),
        row_tokens=job.row_tokens(shapes.mbs),
        length=job.attended_length(shapes.mbs),
        expert_ranks=np.where(shapes.sequence_parallel, shapes.expert_tensor, 1),
        filled_share=job.filled_share if sequences is not None and sequences.is_packed else 1.0,
        sequence_length=job.sequence_length,
        element_bytes=job.element_bytes,
        precision=job.precision,
        wide=_WIDE.get(job.precision, job.precision),
        narrow_bytes=NARROW_BYTES.get(job.precision),
        dropped_modules=job.recompute_modules,
        facts=RuntimeFacts(**{f.name: getattr(runtime, f.name) for f in fields(RuntimeFacts)}),
    )


def block_builders(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> tuple[OperatorBuilder, ...]:
    """Return a builder of operators for every block of the model [B]."""
    context, model = block_context(job, runtime, shapes), job.model
    return tuple(
        OperatorBuilder(context=context, block=name, family=block.family)
        for name, block in zip(model.block_names, model.blocks, strict=True)
    )


def core_recomputed(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> NDArray[np.bool_]:
    """Check whether the backward pass runs the attention core and its exchanges with other ranks again [u]."""
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    repeats_core = "core_attn" in job.recompute_modules and not runtime.selective_products
    return np.asarray(full | (selective & repeats_core))


def step_operators(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> tuple[Operator, ...]:
    """Return every operator of one execution of each block of the model, for each row of `shapes` [u]."""
    builders = block_builders(job, runtime, shapes)
    return tuple(
        operator
        for block, builder in zip(job.model.blocks, builders, strict=True)
        for operator in block.operators(builder)
    )


def core_operators(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> tuple[Operator, ...]:
    """Return the operators of the step that belong to the core of a mixer, for each row of `shapes` [u]."""
    builders = block_builders(job, runtime, shapes)
    return tuple(
        operator for block, builder in zip(job.model.blocks, builders, strict=True) for operator in block.core(builder)
    )


def recomputed_share(job: TrainingJob, runtime: RuntimeProfile, operator: Operator, shapes: ConfigGrid) -> FloatArray:
    """Return the share of this forward operator that the backward pass runs again [u]; 0 for a backward operator.

    Full recomputation repeats every layer's forward pass. Selective recomputation repeats the job's modules, usually
    the attention core (Korthikanti et al. 2022, section 5), or all but attention and every second product: torchtitan's
    SelectiveAC keeps the first, third, fifth, ... product of a layer and flash attention, but not the grouped products
    of experts (distributed/activation_checkpoint.py, torch/_functorch/partitioners.py).
    """
    if operator.phase != Phase.FORWARD or operator.family not in LAYER_FAMILIES:
        return np.zeros(len(shapes))
    if runtime.selective_products:
        share = 0.0 if operator.is_core else 1.0 - operator.kept_share
    else:
        share = float(any(module in job.recompute_modules for module in operator.modules))
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    return np.asarray(np.where(full, 1.0, np.where(selective, share, 0.0)), dtype=np.float64)
