"""Transformer frontend: the training step of a decoder-only model, built from its sizes alone.

Operators are called `layers.N.BLOCK.ROLE`, with the blocks and roles of the cost model where it has them:
attention.qkv, attention.core, attention.out, dense_mlp.up, moe_mlp.router, head.logits. A gradient has its operator's
name with the suffix `.data_gradient`, `.weight_gradient` or `.gradient`. An update has its parameter's name with the
suffix `.update`. The factors that axes can serve are batch, sequence (called queries in the attention core and chunks
on the way to experts), hidden, kv_heads (query_groups if all queries share one key head), ffn (expert_ffn, shared_ffn),
vocabulary and experts.

Tensors that a model stores side by side are stacked here, not concatenated. For example, the two inputs of a gated MLP
form a dim `gates`, so that a partition of `ffn` splits both. Left out are losses that only balance experts, dropout and
multi-token prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.job.training_job import NARROW_BYTES, TrainingJob
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER
from costmodels.sharding.frontends.transformer.experts import chunk_sizes, combine, dispatch, routing, shared_gate
from costmodels.sharding.frontends.transformer.layers import (
    activation,
    add,
    attention_core,
    bias,
    cross_entropy,
    embedding,
    latent_key,
    learned_positions,
    linear,
    norm,
    rotary,
)
from costmodels.sharding.frontends.transformer.training_step import TrainingStep
from costmodels.sharding.graph import Graph
from hardware.io.errors import ConfigError

HIDDEN = "batch sequence hidden"
HEADS = "(kv_heads query_groups)"

DIM_NAMES = {
    "kv_heads query_groups": "heads",
    "chunks chunk_tokens": "sequence",
    "chunks chunk_slots": "slots",
    "queries": "sequence",
    "keys": "sequence",
    "value_dim": "head_dim",
    "plain_dim": "head_dim",
    "rotary_dim": "head_dim",
    "expert_ffn": "ffn",
    "shared_ffn": "ffn",
}
"""Names of dims that differ from the names of their factors."""


def transformer_graph(
    job: TrainingJob,
    *,
    micro_batch_size: int,
    num_layers: int | None = None,
    optimizer: str = DEFAULT_OPTIMIZER,
    has_masters: bool = False,
) -> Graph:
    """Build the graph of one training step of one micro-batch: forward pass, backward pass and update.

    Parameters, activations and gradients have the job's element size. Moments are float32.

    Args:
        job: Model, sequence length and precision of the training job.
        micro_batch_size: Number of sequences in the micro-batch.
        num_layers: Number of layers to build, from the first one; None for all.
        optimizer: Name of the optimizer: `adam` or `sgd`.
        has_masters: Whether the optimizer keeps a float32 copy of each parameter, and the parameters' gradients are
            float32 too.

    Raises:
        ConfigError: A size is out of its range.
    """
    model = job.model.plain
    layers = model.num_layers if num_layers is None else num_layers
    if micro_batch_size < 1:
        raise ConfigError("must be at least 1", key="micro_batch_size", value=micro_batch_size)
    if not 1 <= layers <= model.num_layers:
        raise ConfigError(f"must be from 1 to the model's {model.num_layers}", key="num_layers", value=layers)
    if 0 < model.learned_positions < job.sequence_length:
        raise ConfigError(
            f"must not exceed the {model.learned_positions} learned positions of {model.name}",
            key="sequence_length",
            value=job.sequence_length,
        )
    if model.norms_per_layer > len(_NORMS):
        raise ConfigError(f"must be from 1 to {len(_NORMS)}", key="norms_per_layer", value=model.norms_per_layer)
    step = TrainingStep(
        name=model.name,
        sizes=_sizes(job, micro_batch_size),
        dim_names=DIM_NAMES,
        element_bytes=job.element_bytes,
        has_masters=has_masters,
    )
    _Decoder(job=job, step=step).write(layers)
    step.backward()
    step.update(optimizer)
    return step.done()


def _sizes(job: TrainingJob, micro_batch_size: int) -> dict[str, int]:
    """Return the size of every factor by its name; 1 for parts that the model lacks."""
    model, tokens = job.model.plain, job.sequence_length
    # Without experts, no pattern uses the chunks.
    chunks = chunk_sizes(tokens, top_k=model.top_k, num_experts=model.num_experts) if model.is_moe else {}
    return {
        "batch": micro_batch_size,
        "sequence": tokens,
        "queries": tokens,
        "keys": tokens,
        "hidden": model.hidden_size,
        "vocabulary": model.vocab_size,
        "positions": model.learned_positions or 1,
        "kv_heads": model.num_kv_heads,
        "query_groups": model.num_heads // model.num_kv_heads,
        "head_dim": model.head_dim,
        "value_dim": model.value_head_dim,
        "plain_dim": model.qk_nope_head_dim or 1,
        "rotary_dim": model.qk_rope_head_dim or 1,
        "query_rank": model.q_lora_rank or 1,
        "latent_rank": model.kv_lora_rank or 1,
        "gates": 2,
        "ffn": model.ffn_size,
        "experts": model.num_experts or 1,
        "expert_ffn": model.expert_ffn_size or 1,
        "shared_ffn": model.shared_expert_ffn_size or 1,
        **chunks,
    }


_NORMS = ("attention.norm", "mlp.norm", "attention.post_norm", "mlp.post_norm")
"""Norms of a layer over the hidden size, in the order in which models add them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decoder:
    """Builder of the forward pass, with one method per block."""

    job: TrainingJob
    step: TrainingStep

    @property
    def wide(self) -> str:
        """Precision of attention, router and head; recipes for narrow types keep these wider."""
        return "bf16" if self.job.precision in NARROW_BYTES else self.job.precision

    def write(self, num_layers: int) -> None:
        """Add the whole forward pass, from the tokens to the loss."""
        step, model = self.step, self.job.model.plain
        tokens = step.token_numbers("tokens", "batch sequence")
        labels = step.token_numbers("labels", "batch sequence")
        table = step.parameter("embedding.weight", "vocabulary hidden")
        x = embedding(step, "embedding.lookup", tokens, table)
        if model.learned_positions:
            # Only a table of exactly the sequence's length can share the factor of the sequence.
            is_whole = model.learned_positions == self.job.sequence_length
            rows = step.parameter("embedding.positions.weight", "sequence hidden" if is_whole else "positions hidden")
            x = learned_positions(step, "embedding.positions", x, rows)
        for number in range(num_layers):
            x = self.attention(f"layers.{number}.attention", x)
            mlp = self.moe_mlp if model.is_moe_layer(number) else self.dense_mlp
            x = mlp(f"layers.{number}.{'moe_mlp' if model.is_moe_layer(number) else 'dense_mlp'}", x)
        x = norm(step, "head.norm", x, over="hidden", has_bias=model.norm == "layer")
        head = table if model.tied_embeddings else step.parameter("head.logits.weight", "vocabulary hidden")
        products = [(head, "vocabulary hidden")], [("", "batch sequence vocabulary")]
        (logits,) = linear(step, "head.logits", (x, HIDDEN), *products, precision=self.wide)
        cross_entropy(step, "head.cross_entropy", logits, labels)

    def attention(self, name: str, x: int) -> int:
        """Add an attention block with its residual connection."""
        model, step = self.job.model.plain, self.step
        normed = self._add_norm(name, "attention.norm", x)
        queries, keys, values = (self._add_latent_heads if model.uses_mla else self._add_heads)(name, normed)
        # Narrow types apply to the projections only, not to the core.
        context = attention_core(
            step, f"{name}.core", queries, keys, values, is_causal=model.causal, precision=self.wide
        )
        heads = (context, f"batch sequence {HEADS} value_dim")
        y = self._add_product(f"{name}.out", heads, f"{HEADS} value_dim hidden", HIDDEN)
        if model.attention_output_bias:
            y = bias(step, f"{name}.out_bias", y, "hidden")
        return add(step, f"{name}.residual", (x, self._add_norm(name, "attention.post_norm", y)))

    def _add_heads(self, name: str, x: int) -> tuple[int, int, int]:
        """Add queries, keys and values, computed from the hidden vectors.

        They are one operator, so that its input gradient is a single partial sum if heads are partitioned. With one key
        head for all queries, the query heads can be partitioned and the key head cannot, so there are two operators.
        """
        model, step = self.job.model.plain, self.step
        dims = {"query": f"{HEADS} head_dim", "key": "kv_heads head_dim", "value": "kv_heads head_dim"}
        # Multi-query attention: kv_heads has size 1, so only query_groups can be partitioned.
        has_one_key = model.num_kv_heads == 1 < model.num_heads
        # The biases and norms below apply to each product by its label.
        made: dict[str, int] = {}
        for role, labels in (("q", ("query",)), ("kv", ("key", "value"))) if has_one_key else (("qkv", tuple(dims)),):
            weights = [
                (step.parameter(f"{name}.{role}.{label}_weight", f"hidden {dims[label]}"), f"hidden {dims[label]}")
                for label in labels
            ]
            outputs = [(label, f"batch sequence {dims[label]}") for label in labels]
            products = linear(step, f"{name}.{role}", (x, HIDDEN), weights, outputs, precision=self.job.precision)
            made.update(zip(labels, products, strict=True))
        for label, pattern in dims.items():
            if model.qkv_bias:
                made[label] = bias(step, f"{name}.{label}_bias", made[label], pattern)
            if label != "value":
                made[label] = self._add_positions(name, label, made[label])
        return made["query"], made["key"], made["value"]

    def _add_positions(self, name: str, label: str, x: int) -> int:
        """Add the norm and the rotary embedding of queries or keys, where the model has them."""
        if self.job.model.plain.qk_norm:
            x = norm(self.step, f"{name}.{label}_add_norm", x, over="head_dim")
        return x if self.job.model.plain.learned_positions else rotary(self.step, f"{name}.{label}_rotary", x)

    def _add_latent_heads(self, name: str, x: int) -> tuple[int, int, int]:
        """Add queries, keys and values of latent attention.

        They are projected down to a rank, normalised there, and projected up to the heads. Source: DeepSeek-V2, arXiv
        2405.04434, section 2.1.
        """
        model, step, precision = self.job.model.plain, self.step, self.job.precision

        def product(role: str, x: tuple[int, str], outputs: dict[str, str]) -> tuple[int, ...]:
            # The weight's input dims are those of x without the token dims.
            inner = x[1].removeprefix("batch sequence ")
            weights = [
                (step.parameter(f"{name}.{role}.{label}weight", f"{inner} {dims}"), f"{inner} {dims}")
                for label, dims in outputs.items()
            ]
            labels = [(label.removesuffix("_"), f"batch sequence {dims}") for label, dims in outputs.items()]
            return linear(step, f"{name}.{role}", x, weights, labels, precision=precision)

        hidden = (x, HIDDEN)
        if model.q_lora_rank:
            (rank,) = product("q_down", hidden, {"": "query_rank"})
            if model.qkv_bias:
                rank = bias(step, f"{name}.q_down_bias", rank, "query_rank")
            rank = norm(step, f"{name}.q_norm", rank, over="query_rank")
            (queries,) = product("q_up", (rank, "batch sequence query_rank"), {"": f"{HEADS} head_dim"})
        else:
            (queries,) = product("q_up", hidden, {"": f"{HEADS} head_dim"})
        # The key's rotary part comes directly from the hidden vector, and all heads share it.
        latent, turned = product("kv_down", hidden, {"latent_": "latent_rank", "rotary_": "rotary_dim"})
        if model.qkv_bias:
            latent = bias(step, f"{name}.kv_down_bias", latent, "latent_rank")
            turned = bias(step, f"{name}.kv_down_rotary_bias", turned, "rotary_dim")
        latent = norm(step, f"{name}.kv_norm", latent, over="latent_rank")
        plain, values = product(
            "kv_up",
            (latent, "batch sequence latent_rank"),
            {"key_": "kv_heads plain_dim", "value_": "kv_heads value_dim"},
        )
        keys = latent_key(step, f"{name}.key_rotary", plain, turned)
        if model.qk_norm:
            keys = norm(step, f"{name}.key_norm", keys, over="head_dim")
            queries = norm(step, f"{name}.query_norm", queries, over="head_dim")
        return rotary(step, f"{name}.query_rotary", queries), keys, values

    def dense_mlp(self, name: str, x: int) -> int:
        """Add a dense MLP block with its residual connection."""
        y = self._add_mlp(name, self._add_norm(name, "mlp.norm", x), "batch sequence", "ffn")
        return add(self.step, f"{name}.residual", (x, self._add_norm(name, "mlp.post_norm", y)))

    def moe_mlp(self, name: str, x: int) -> int:
        """Add a mixture-of-experts block with its shared experts and its residual connection."""
        model, step = self.job.model.plain, self.step
        normed = self._add_norm(name, "mlp.norm", x)
        scores = "batch sequence experts"
        logits = self._add_product(f"{name}.router", (normed, HIDDEN), "experts hidden", scores, precision=self.wide)
        weights = routing(step, f"{name}.routing", logits)
        slots = dispatch(step, f"{name}.dispatch", normed, weights)
        slots = self._add_mlp(name, slots, "experts batch slots", "expert_ffn", experts="experts ")
        y = combine(step, f"{name}.combine", slots, weights)
        if model.num_shared_experts:
            # Shared experts see every token, without dispatch.
            shared = self._add_mlp(f"{name}.shared", normed, "batch sequence", "shared_ffn")
            if model.shared_expert_gate:
                gate, tokens = f"{name}.shared.gate", "batch sequence"
                logit = self._add_product(gate, (normed, HIDDEN), "hidden", tokens, precision=self.wide)
                shared = shared_gate(step, f"{name}.shared.scale", shared, logit)
            y = add(step, f"{name}.sum", (y, shared))
        return add(step, f"{name}.residual", (x, self._add_norm(name, "mlp.post_norm", y)))

    def _add_mlp(self, name: str, x: int, rows: str, ffn: str, *, experts: str = "") -> int:
        """Add the two products of an MLP and the activation between them, for all tokens or for each expert's own."""
        model, step = self.job.model.plain, self.step
        # Experts multiply by a weight each, which makes the expert dim a batch dim of the product.
        primitive = "batch_matmul" if experts else "matmul"
        inner = f"gates {ffn}" if model.gated_ffn else ffn
        weight, out = f"{experts}hidden {inner}", f"{rows} {inner}"
        y = self._add_product(f"{name}.up", (x, f"{rows} hidden"), weight, out, primitive=primitive)
        if model.mlp_bias:
            y = bias(step, f"{name}.up_bias", y, f"{experts}{inner}")
        y = activation(step, f"{name}.activation", y, f"{rows} {ffn}", is_gated=model.gated_ffn)
        weight, out = f"{experts}{ffn} hidden", f"{rows} hidden"
        y = self._add_product(f"{name}.down", (y, f"{rows} {ffn}"), weight, out, primitive=primitive)
        return bias(step, f"{name}.down_bias", y, f"{experts}hidden") if model.mlp_bias else y

    def _add_product(
        self, name: str, x: tuple[int, str], dims: str, output: str, *, precision: str = "", primitive: str = "matmul"
    ) -> int:
        """Add a weight with the given dims and its product with one tensor, by default in the job's precision."""
        weight = self.step.parameter(f"{name}.weight", dims)
        precision = precision or self.job.precision
        outputs = [("", output)]
        (made,) = linear(self.step, name, x, [(weight, dims)], outputs, precision=precision, primitive=primitive)
        return made

    def _add_norm(self, block: str, place: str, x: int) -> int:
        """Add the norm at one of the places in _NORMS if the model has it; otherwise return the input."""
        model = self.job.model.plain
        if _NORMS.index(place) >= model.norms_per_layer:
            return x
        name = f"{block}.{place.partition('.')[2]}"
        return norm(self.step, name, x, over="hidden", has_bias=model.norm == "layer")
