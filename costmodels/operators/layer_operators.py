"""Operators f_i of one layer under a configuration, with their shapes, and the collectives between them.

Source of the idea: FlexParallel equation 1, f_i. Shapes depend on few of the dimensions (SHAPE_DIMENSIONS), so a grid
of tens of thousands of candidates has some hundreds of unique shapes. `unique_shapes` finds them, everything here is
computed once per unique row, and callers gather by its index.

Letters used below: u unique shape rows; T tokens of one micro-batch on one rank, `mbs*s/(cp*up)`; h hidden size.
Heads, ffn and vocabulary are divided by tp (Megatron-LM, Shoeybi et al. 2019, section 3), tokens by cp and up, and with
sequence parallelism norms and residuals work on T/tp tokens (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from costmodels.job.parallel_config import RECOMPUTE_MODES, ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import NARROW_BYTES, TrainingJob
from hardware.arrays import FloatArray, IntArray
from hardware.distinct import distinct_rows
from hardware.group_links import GroupLinks

_MODULES = {
    "core_attn": ("attention.core",),
    "mla_up_proj": ("attention.q_up", "attention.kv_up"),
    "layernorm": ("attention.norm", "dense_mlp.norm", "moe_mlp.norm"),
    "mlp": ("dense_mlp.up", "dense_mlp.activation", "dense_mlp.down"),
    "moe_act": ("moe_mlp.activation",),
    "shared_experts": ("moe_mlp.shared",),
}
"""Prefixes of the operators of each module that selective recomputation can name; `moe` is all of its block."""

SHAPE_DIMENSIONS = ("tp", "cp", "up", "ep", "mbs", "recompute", "sequence_parallel", "expert_tp", "plan")
"""Names of the dimensions on which the operators of layers and their times depend."""


UNFUSED_PASSES = 1.7
"""Memory passes of eager kernels for one of a fused kernel: SwiGLU in two kernels moves 5 tensors instead of 3, rotary
embedding in eager PyTorch 4 to 7 instead of 2 (counted)."""

_WIDE = {"fp8": "bf16", "nvfp4": "bf16"}
"""Type that replaces a narrow one in operators that do not support it: attention, the head, the router."""


class OpKind(StrEnum):
    """Kinds of operators and collectives; each has its own model of the time, and its own surrogate."""

    MATMUL = "matmul"
    GROUPED_MATMUL = "grouped_matmul"
    ATTENTION = "flash_attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECV = "send_recv"


COLLECTIVES = frozenset(
    {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL, OpKind.SEND_RECV}
)
"""Kinds of collectives, whose shape is (message bytes, group size, hosts)."""


class Block(StrEnum):
    """Parts of the model that stages hold as wholes."""

    ATTENTION = "attention"
    DENSE_MLP = "dense_mlp"
    MOE_MLP = "moe_mlp"
    EMBEDDING = "embedding"
    HEAD = "head"


BLOCKS = tuple(Block)
"""Blocks in the order of arrays with one entry per block."""


class Phase(StrEnum):
    """Pass in which an operator runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operator:
    """One operator of a block, for every unique shape row.

    Attributes:
        name: Name made of block and role, for example `attention.qkv`.
        kind: Kind of operator, which selects the kernel model.
        block: Block that the operator belongs to.
        phase: Phase, forward or backward.
        shape: Columns of sizes [u, d]: (m, k, n) of a matmul, (groups, m, k, n) of a grouped one, (batch, heads, query
            length, key length, head size) of attention, (rows, columns) of a norm, (elements,) else.
        precision: Type of the operator's arithmetic.
        flop: Number of floating-point operations [u].
        moved_bytes: Number of bytes read and written [u].
    """

    name: str
    kind: OpKind
    block: Block
    phase: Phase
    precision: str
    shape: FloatArray
    flop: FloatArray
    moved_bytes: FloatArray


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


def routed_tokens(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return the rows that one rank's experts multiply for one micro-batch, with balanced experts [n].

    There are top_k rows for each of the tokens gathered from the ranks that share its experts.
    """
    gathered = np.where(grid.sequence_parallel, grid.expert_tensor, 1)
    return residual_tokens(job, grid) * job.model.top_k * gathered


def local_vocabulary(job: TrainingJob, runtime: RuntimeProfile, grid: ConfigGrid) -> FloatArray:
    """Return the rows of the vocabulary on one tp rank, with the runtime's padding [n]."""
    # the padded vocabulary divides by tp, so that the rows of one rank are padded
    rows = job.model.vocab_size / grid.tp
    padded = np.ceil(rows / runtime.vocabulary_multiple) * runtime.vocabulary_multiple
    is_padded = (grid.tp > 1) | runtime.pads_whole_vocabulary
    return np.where(is_padded, padded, rows)


def local_kv_size(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return the key (or value) elements per token on a rank before Ulysses [n]; key heads are copied if tp is more."""
    model = job.model
    if model.kv_lora_rank:
        return model.num_heads * model.v_head_dim / grid.tp
    return np.maximum(model.num_kv_heads / grid.tp, 1.0) * model.head_dim


def exchanged_kv_size(job: TrainingJob, grid: ConfigGrid) -> FloatArray:
    """Return the key (or value) elements that Ulysses and the ring send: heads repeated until up divides them [n]."""
    size = local_kv_size(job, grid)
    if job.model.kv_lora_rank:
        return size
    # Ulysses deals whole heads: the least common multiple of heads and up, over up
    heads = np.rint(size / job.model.head_dim).astype(np.int64)
    return size * (grid.up // np.gcd(heads, grid.up))


def core_recomputed(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> NDArray[np.bool_]:
    """Check whether the backward pass runs the attention core and its exchanges with other ranks again [u]."""
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    repeats_core = "core_attn" in job.recompute_modules and not runtime.selective_products
    return np.asarray(full | (selective & repeats_core))


def step_operators(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> tuple[Operator, ...]:
    """Return every operator of one attention block, MLP, embedding and head, for each row of `shapes` [u]."""
    builder = _Builder(job, runtime, shapes)
    operators = [*builder.attention(), *builder.dense_mlp(), *builder.embedding(), *builder.head()]
    if job.model.is_moe:
        operators += builder.moe_mlp()
    return tuple(operators)


def attention_core(job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> tuple[Operator, ...]:
    """Return the operators of the step for which `is_core` holds, for each row of `shapes` [u]."""
    return tuple(_Builder(job, runtime, shapes).core())


def is_core(operator: Operator) -> bool:
    """Check whether an operator belongs to the attention core.

    The core stands between the projections and depends on mbs, cp and up themselves.
    """
    return operator.name.startswith(_MODULES["core_attn"])


def recomputed_share(job: TrainingJob, runtime: RuntimeProfile, operator: Operator, shapes: ConfigGrid) -> FloatArray:
    """Return the share of this forward operator that the backward pass runs again [u]; 0 for a backward operator.

    Full recomputation repeats every layer's forward pass. Selective recomputation repeats the job's modules, usually
    the attention core (Korthikanti et al. 2022, section 5), or all but attention and every second product.
    """
    in_layer = operator.block in (Block.ATTENTION, Block.DENSE_MLP, Block.MOE_MLP)
    if operator.phase != Phase.FORWARD or not in_layer:
        return np.zeros(len(shapes))
    if runtime.selective_products:
        share = _share_beside_second_products(job, operator, shapes)
    else:
        module = next((name for name, prefixes in _MODULES.items() if operator.name.startswith(prefixes)), None)
        # moe is no prefix of names but a whole block
        named = module in job.recompute_modules or ("moe" in job.recompute_modules and operator.block == Block.MOE_MLP)
        share = np.full(len(shapes), float(named))
    selective = shapes.recompute == RECOMPUTE_MODES.index("selective")
    full = shapes.recompute == RECOMPUTE_MODES.index("full")
    return np.asarray(np.where(full, 1.0, np.where(selective, share, 0.0)), dtype=np.float64)


def _share_beside_second_products(job: TrainingJob, operator: Operator, shapes: ConfigGrid) -> FloatArray:
    """Return the share of a forward operator that runs again if attention and every second product are kept [u].

    torchtitan's SelectiveAC keeps the first, third, fifth, ... product of a layer and flash attention, but not the
    grouped products of experts (distributed/activation_checkpoint.py, torch/_functorch/partitioners.py). The products
    are those of queries, keys, values, the projection, then w1, w3 and w2 of a gated MLP, or up and down of another.
    """
    if is_core(operator):
        return np.zeros(len(shapes))
    if operator.name == "attention.qkv":
        keys = local_kv_size(job, shapes)
        return keys / (job.model.num_heads / shapes.tp * job.model.head_dim + 2 * keys)
    role = operator.name.rpartition(".")[2]
    if operator.kind == OpKind.MATMUL and operator.block != Block.ATTENTION and role in ("up", "down"):
        # of w1 and w3, which are one operator here, w1 is kept; w2 is the seventh product, and `down` the sixth
        kept_of_down = 1.0 if job.model.gated_ffn else 0.0
        kept_of_up = 0.5 if job.model.gated_ffn else 1.0
        return np.full(len(shapes), 1.0 - (kept_of_down if role == "down" else kept_of_up))
    return np.ones(len(shapes))


class _Builder:
    """Builder of the operators, with one method per block."""

    def __init__(self, job: TrainingJob, runtime: RuntimeProfile, shapes: ConfigGrid) -> None:
        self.job, self.model, self.runtime, self.shapes = job, job.model, runtime, shapes
        self.element_bytes = job.element_bytes
        self.wide = _WIDE.get(job.precision, job.precision)
        self.heads = job.model.num_heads / shapes.tp
        self.tokens = local_tokens(job, shapes)
        self.residual = residual_tokens(job, shapes)
        self.kv_size = local_kv_size(job, shapes)

    def attention(self) -> list[Operator]:
        model, queries = self.model, self.heads * self.model.head_dim
        operators = self._norm("attention.norm")
        if model.kv_lora_rank:  # multi-head latent attention: DeepSeek-V2 (2024), section 2.1
            if model.q_lora_rank:
                operators += self._matmul("attention.q_down", self.residual, model.hidden_size, model.q_lora_rank)
            operators += self._matmul("attention.q_up", self.tokens, model.q_lora_rank or model.hidden_size, queries)
            latent = model.kv_lora_rank + model.qk_rope_head_dim
            operators += self._matmul("attention.kv_down", self.residual, model.hidden_size, latent)
            keys_values = self.heads * (model.qk_nope_head_dim + model.v_head_dim)
            operators += self._matmul("attention.kv_up", self.tokens, model.kv_lora_rank, keys_values)
            qk_elements = 2 * queries  # every head has its own key
        else:
            qk_elements = queries + self.kv_size  # rotary positions change queries and keys, not values
            operators += self._matmul("attention.qkv", self.tokens, model.hidden_size, queries + 2 * self.kv_size)
        if not model.learned_positions:
            operators += self._elementwise("attention.rotary", self.tokens * qk_elements, 2, 2)
        operators += self.core()
        context = self.heads * model.value_head_dim
        operators += self._matmul("attention.proj", self.tokens, context, model.hidden_size)
        return operators + self._add_residual("attention.residual")

    def core(self) -> list[Operator]:
        operators = self._flash_core() if self.runtime.fused_attention else self._unfused_core()
        return operators + self._merge_of_ring() if np.any(self.shapes.cp > 1) else operators

    def dense_mlp(self) -> list[Operator]:
        mlp = self._mlp("dense_mlp", self.model.ffn_size)
        return [*self._norm("dense_mlp.norm"), *mlp, *self._add_residual("dense_mlp.residual")]

    def moe_mlp(self) -> list[Operator]:
        model = self.model
        hidden, routed = model.hidden_size, routed_tokens(self.job, self.shapes)
        # the experts of one rank are one grouped product: ep deals out whole experts, expert_tp cuts their inner size
        groups = model.num_experts / self.shapes.ep
        ffn = model.expert_ffn_size / self.shapes.expert_tensor
        operators = self._norm("moe_mlp.norm")
        operators += self._matmul("moe_mlp.router", self.residual, hidden, model.num_experts)
        operators += self._elementwise("moe_mlp.permute", 2 * routed * hidden, 2, 2)
        operators += self._matmul("moe_mlp.up", routed, hidden, ffn * (1 + model.gated_ffn), groups)
        operators += self._activation("moe_mlp.activation", routed * ffn)
        operators += self._matmul("moe_mlp.down", routed, ffn, hidden, groups)
        if model.shared_expert_ffn_size:
            operators += self._mlp("moe_mlp.shared", model.shared_expert_ffn_size)
        return operators + self._add_residual("moe_mlp.residual")

    def embedding(self) -> list[Operator]:
        return self._elementwise("embedding.lookup", self.tokens * self.model.hidden_size, 2, 3)

    def head(self) -> list[Operator]:
        # the vocabulary is cut by tp, so that the logits are never gathered
        vocabulary = local_vocabulary(self.job, self.runtime, self.shapes)
        logits = self._matmul("head.logits", self.tokens, self.model.hidden_size, vocabulary)
        # one kernel reads the logits and writes their gradient; in parts they pass through memory in fp32 for the cast,
        # the maximum, the difference, the exponential and the sum, and back through softmax minus target (counted from
        # megatron-core tensor_parallel/cross_entropy.py)
        forward, backward = (3, 1) if self.runtime.fused_cross_entropy else (17, 8)
        loss = self._elementwise("head.cross_entropy", self.tokens * vocabulary, forward, backward, is_fused=True)
        return [*self._norm("head.norm"), *logits, *loss]

    def _mlp(self, name: str, ffn_size: int) -> list[Operator]:
        ffn = ffn_size / self.shapes.tp
        return [
            *self._matmul(f"{name}.up", self.tokens, self.model.hidden_size, ffn * (1 + self.model.gated_ffn)),
            *self._activation(f"{name}.activation", self.tokens * ffn),
            *self._matmul(f"{name}.down", self.tokens, ffn, self.model.hidden_size),
        ]

    def _add_residual(self, name: str) -> list[Operator]:
        # a residual is read twice and written once, in both directions
        return self._elementwise(name, self.residual * self.model.hidden_size, 3, 3)

    def _activation(self, name: str, elements: FloatArray) -> list[Operator]:
        # one or two inputs and an output; backwards the output's gradient, the inputs, and a gradient of each
        gated = int(self.model.gated_ffn)
        return self._elementwise(name, elements, 2 + gated, 3 + 2 * gated)

    def _matmul(
        self, name: str, m: FloatArray, k: FloatArray | float, n: FloatArray | float, groups: FloatArray | None = None
    ) -> list[Operator]:
        """Return the product [m, k] @ [k, n] and the two of its backward pass; m is the sum over `groups` weights."""
        kind = OpKind.MATMUL if groups is None else OpKind.GROUPED_MATMUL
        # fp8 keeps head and router in 16 bits (Transformer Engine, torchao)
        precision = self.wide if name.startswith(("head.", "moe_mlp.router")) else self.job.precision
        operators = self._cast_operands(name, m * k, m * n) if precision in NARROW_BYTES else []
        # each of the three products reads or writes the same three matrices
        weights = np.ones_like(m) if groups is None else groups
        moved_bytes = self.element_bytes * (m * k + weights * k * n + m * n)
        for role, phase, sizes in (
            (name, Phase.FORWARD, (m, k, n)),
            (f"{name}.data_gradient", Phase.BACKWARD, (m, n, k)),
            (f"{name}.weight_gradient", Phase.BACKWARD, (k, m, n)),
        ):
            shape = sizes if groups is None else (groups, *sizes)
            operators.append(_operator(role, kind, phase, precision, shape, moved_bytes, 2.0 * m * k * n))
        return operators

    def _cast_operands(self, name: str, inputs: FloatArray, outputs: FloatArray) -> list[Operator]:
        """Return the casts of a product's input and of its output's gradient to a narrow type.

        Each is read once and written straight and transposed (Transformer Engine, cast_transpose kernels).
        """
        casts = (("input", inputs, Phase.FORWARD), ("gradient", outputs, Phase.BACKWARD))
        kind, precision, width = OpKind.ELEMENTWISE, self.job.precision, 2.0 * self.element_bytes
        return [
            _operator(f"{name}.cast_{role}", kind, phase, precision, (elements,), width * elements)
            for role, elements, phase in casts
        ]

    def _flash_core(self) -> list[Operator]:
        """Return flash attention under a causal mask, whose work the cp ranks share evenly.

        Sequences of varying length are priced as so many equal ones, each of the length in which a mean token stands.
        That keeps the number of tokens, the sum of the squares of the lengths, and the time of every row's start and
        end; only the last rows to run are those of a mean sequence (assumed).

        The forward pass has two products of 2*s*s*size, halved by the mask; the backward pass has five instead of two
        (Dao 2023, FlashAttention-2, section 4.1).
        """
        shapes, length = self.shapes, self.job.attended_length(self.shapes.mbs)
        batch = np.asarray(shapes.mbs * self._sequences_per_row(length), dtype=np.float64)
        head_dim, both_sizes = self.model.head_dim, self.model.head_dim + self.model.value_head_dim
        local_heads, queries = self.heads / shapes.up, length / shapes.cp
        # two products over queries and keys, each of 2 flop per element of its sum, halved by the mask
        flop = 2 * batch * local_heads * queries * length * both_sizes / 2
        # queries and results of all heads; keys and values of as many heads as the model has for them
        keys_values = self.kv_size / shapes.up * both_sizes / self.model.value_head_dim
        moved_bytes = self.element_bytes * (batch * queries * (local_heads * both_sizes + keys_values))
        shape = (batch, local_heads, queries, length, head_dim)
        name, kind = "attention.core", OpKind.ATTENTION
        return [
            _operator(name, kind, Phase.FORWARD, self.wide, shape, moved_bytes, flop),
            _operator(f"{name}.gradient", kind, Phase.BACKWARD, self.wide, shape, 2.5 * moved_bytes, 2.5 * flop),
        ]

    def _sequences_per_row(self, length: FloatArray | float) -> FloatArray | float:
        """Return how many sequences of a length make up the tokens of a row that attention works on [u]."""
        filled = self.job.filled_share if self.job.sequences is not None and self.job.sequences.is_packed else 1.0
        return self.job.row_tokens(self.shapes.mbs) * filled / length

    def _unfused_core(self) -> list[Operator]:
        """Return attention whose scores pass through memory: two products of the whole square and a masked softmax.

        Packed sequences attend to their own tokens by the mask alone, so that whole rows are computed.

        The softmax output has 2abs^2 bytes, and its dropout as many again (Korthikanti et al. 2022, section 4.1). The
        fused softmax reads the scores and writes the probabilities (Megatron-LM fused_kernels), and so does dropout.
        """
        shapes, length = self.shapes, self.job.row_tokens(self.shapes.mbs)
        rows = shapes.mbs * (self.heads / shapes.up) * (length / shapes.cp)
        scores = rows * length
        operators = self._batched("attention.core.scores", rows, self.model.head_dim, length)
        # the fused kernel wants four score matrices at a time; in PyTorch's own operators scores are scaled, cast,
        # masked and normalised in fp32 one after the other (Megatron-LM model/fused_softmax.py, is_kernel_available)
        is_fused = self.runtime.fused_elementwise & ((shapes.mbs * (self.heads / shapes.up)) % 4 == 0)
        slow = np.where(is_fused, 0.0, 28 / self.element_bytes)
        operators += self._elementwise("attention.core.softmax", scores, 2 + slow, 3 + slow, is_fused=True)
        if self.runtime.attention_dropout:  # reads and writes the probabilities, and a mask of one byte
            operators += self._elementwise("attention.core.dropout", scores, 2.5, 2.5, is_fused=True)
        return operators + self._batched("attention.core.context", rows, length, self.model.value_head_dim)

    def _merge_of_ring(self) -> list[Operator]:
        """Return the merging of the ring's partial results; it moves no bytes in rows whose cp is 1.

        Each of the cp - 1 further steps rescales its result and adds it to an accumulator in fp32; backward it adds its
        gradients of queries, keys and values (Transformer Engine, context_parallel.py). Under a causal mask that the
        ranks share evenly, half of these steps concern half of the queries, or half of the keys.
        """
        shapes = self.shapes
        positions = shapes.mbs * self.job.row_tokens(shapes.mbs) / shapes.cp / shapes.up * 0.75 * (shapes.cp - 1)
        results = positions * self.heads * self.model.value_head_dim
        gradients = positions * (self.heads * self.model.head_dim + 2 * self.kv_size)
        # forward the accumulator is read and written; backward the sum and its term are read, and the sum is written
        forward_bytes, backward_bytes = (self.element_bytes + 2 * 4) * results, 3 * self.element_bytes * gradients
        name, kind, precision = "attention.core.merge", OpKind.ELEMENTWISE, self.job.precision
        return [
            _operator(name, kind, Phase.FORWARD, precision, (results,), forward_bytes),
            _operator(f"{name}.gradient", kind, Phase.BACKWARD, precision, (gradients,), backward_bytes),
        ]

    def _batched(self, name: str, rows: FloatArray, k: FloatArray | float, n: FloatArray | float) -> list[Operator]:
        """Return a batched product [rows, k] @ [k, n] whose right side differs per head, and its two gradients."""
        # the right side is shared by the queries of a head, so that it has as many copies as there are sequences
        copies = rows * k * n / self.job.row_tokens(self.shapes.mbs)
        moved_bytes = (rows * k + rows * n + copies) * self.element_bytes
        return [
            _operator(role, OpKind.MATMUL, phase, self.wide, sizes, moved_bytes, 2.0 * rows * k * n)
            for role, phase, sizes in (
                (name, Phase.FORWARD, (rows, k, n)),
                (f"{name}.data_gradient", Phase.BACKWARD, (rows, n, k)),
                (f"{name}.right_gradient", Phase.BACKWARD, (rows, n, k)),
            )
        ]

    def _norm(self, name: str) -> list[Operator]:
        # the norms of a layer are dealt evenly to its two blocks
        rows = self.residual * (1 if name.startswith("head.") else self.model.norms_per_layer / 2)
        shape, precision = (rows, self.model.hidden_size), self.job.precision
        forward, backward = (passes * self.element_bytes * rows * self.model.hidden_size for passes in (2.0, 3.0))
        return [
            _operator(name, OpKind.NORM, Phase.FORWARD, precision, shape, forward),
            _operator(f"{name}.gradient", OpKind.NORM, Phase.BACKWARD, precision, shape, backward),
        ]

    def _elementwise(
        self,
        name: str,
        elements: FloatArray,
        forward_passes: FloatArray | float,
        backward_passes: FloatArray | float,
        *,
        is_fused: bool = False,
    ) -> list[Operator]:
        """Return a memory-bound operator; a pass reads or writes every element, and again between unfused kernels."""
        repeated = 1.0 if is_fused or self.runtime.fused_elementwise else UNFUSED_PASSES
        kind, precision = OpKind.ELEMENTWISE, self.job.precision
        return [
            _operator(role, kind, phase, precision, (elements,), repeated * passes * self.element_bytes * elements)
            for role, phase, passes in (
                (name, Phase.FORWARD, forward_passes),
                (f"{name}.gradient", Phase.BACKWARD, backward_passes),
            )
        ]


def _operator(
    name: str,
    kind: OpKind,
    phase: Phase,
    precision: str,
    sizes: Sequence[FloatArray | IntArray | float],
    moved_bytes: FloatArray,
    flop: FloatArray | float = 0.0,
) -> Operator:
    """Return the operator whose name begins with its block; a model's own sizes are scalars, equal in every row."""
    return Operator(
        name=name,
        kind=kind,
        block=Block(name.partition(".")[0]),
        phase=phase,
        precision=precision,
        shape=np.stack(np.broadcast_arrays(*sizes), axis=1).astype(np.float64),
        flop=flop * np.ones_like(moved_bytes),
        moved_bytes=moved_bytes,
    )
