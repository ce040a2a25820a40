"""Transformer frontend: the training step of a decoder-only model, built from its sizes alone.

Operators are called `layers.N.BLOCK.ROLE`, with the names of the blocks and roles of the cost model where it has them:
attention.qkv, attention.core, attention.out, dense_mlp.up, moe_mlp.router, head.logits. A block adds its operators
itself (`AbstractBlock.add_to`); of equal blocks in one layer, the second one's roles begin with `2.`. A gradient has
its operator's name with the suffix `.data_gradient`, `.weight_gradient` or `.gradient`. An update has its parameter's
name with the suffix `.update`. The factors that axes can serve are batch, sequence (called queries in the attention
core and chunks on the way to experts), hidden, kv_heads (query_groups if all queries share one key head), state_heads
(of mixers with a state), ffn (expert_ffn, shared_ffn), vocabulary and experts.

Tensors that a model stores side by side are stacked here, not concatenated. For example, the two inputs of a gated MLP
form a dim `gates`, so that a partition of `ffn` splits both. Left out are losses that only balance experts, dropout and
multi-token prediction unless it is asked for; its operators are called `prediction.N.BLOCK.ROLE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.blocks.contract import AbstractBlock
from costmodels.blocks.graph import HIDDEN, ROWS
from costmodels.job.model_spec import ModelSpec
from costmodels.job.training_job import NARROW_BYTES, TrainingJob
from costmodels.optimizers.registry import DEFAULT_OPTIMIZER
from costmodels.sharding.frontends.transformer.block_graph import StepGraph
from costmodels.sharding.frontends.transformer.layers import (
    bias,
    cross_entropy,
    embedding,
    learned_positions,
    linear,
    norm,
)
from costmodels.sharding.frontends.transformer.training_step import TrainingStep
from costmodels.sharding.graph import Graph
from hardware.io.errors import ConfigError

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
    "joined": "hidden",
}
"""Names of dims that differ from the names of their factors."""


def transformer_graph(
    job: TrainingJob,
    *,
    micro_batch_size: int,
    num_layers: int | None = None,
    optimizer: str = DEFAULT_OPTIMIZER,
    has_masters: bool = False,
    has_prediction: bool = False,
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
        has_prediction: Whether the modules of multi-token prediction are built, if the model has some.

    Raises:
        ConfigError: A size is out of its range, or no graph is known of one of the model's blocks.
    """
    model = job.model
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
    check_ends(model)
    step = TrainingStep(
        name=model.name,
        sizes=_sizes(job, micro_batch_size),
        dim_names=DIM_NAMES,
        element_bytes=job.element_bytes,
        has_masters=has_masters,
    )
    _Decoder(job=job, step=step, has_prediction=has_prediction).write(layers)
    step.backward()
    step.update(optimizer)
    return step.done()


def check_ends(model: ModelSpec) -> None:
    """Refuse a model beside whose layers something stands that has no graph.

    Raises:
        ConfigError: The model has towers, or its ends have more than tables, the last norm and a bias.
    """
    embedding, head = model.embedding, model.head
    more_than_tables = embedding.parameters != embedding.table + embedding.positions
    found = {
        "towers": bool(model.towers),
        "an embedding with further parts": more_than_tables,
        "a head with further parts": head.norms != 1.0 or bool(head.transform_size) or head.is_pooled,
    }
    for what, is_there in found.items():
        if is_there:
            raise ConfigError(
                f"has {what}, of which no graph is known that planners could shard",
                key="model",
                nearest="planner: {name: megatron}, the plan by hand",
            )


def _sizes(job: TrainingJob, micro_batch_size: int) -> dict[str, int]:
    """Return the sizes of the factors that blocks share, by their names."""
    model, tokens = job.model, job.sequence_length
    return {
        "batch": micro_batch_size,
        "sequence": tokens,
        "queries": tokens,
        "keys": tokens,
        "hidden": model.hidden_size,
        "vocabulary": model.vocab_size,
        "positions": model.learned_positions or 1,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decoder:
    """Builder of the forward pass, with the modules of multi-token prediction or without."""

    job: TrainingJob
    step: TrainingStep
    has_prediction: bool

    @property
    def wide(self) -> str:
        """Precision of attention, router and head; recipes for narrow types keep these wider."""
        return "bf16" if self.job.precision in NARROW_BYTES else self.job.precision

    def write(self, num_layers: int) -> None:
        """Add the whole forward pass, from the tokens to the loss."""
        step, model = self.step, self.job.model
        tokens = step.token_numbers("tokens", ROWS)
        labels = step.token_numbers("labels", ROWS)
        table = step.parameter("embedding.weight", "vocabulary hidden")
        x = embedding(step, "embedding.lookup", tokens, table)
        if model.learned_positions:
            # Only a table of exactly the sequence's length can share the factor of the sequence.
            is_whole = model.learned_positions == self.job.sequence_length
            rows = step.parameter("embedding.positions.weight", "sequence hidden" if is_whole else "positions hidden")
            x = learned_positions(step, "embedding.positions", x, rows)
        for number, layer in enumerate(model.layers[:num_layers]):
            x = self._add_blocks(f"layers.{number}", layer, x, table)
        head = table if model.tied_embeddings else None
        head = self._add_head("head", x, labels, head)
        for number in range(model.num_mtp_layers if self.has_prediction else 0):
            # a module reads what the one before it made, and shares both tables (DeepSeek-V3, section 2.2)
            name = f"prediction.{number}"
            *blocks, own_head = model.prediction
            x = self._add_blocks(name, blocks, x, table)
            labels = step.token_numbers(f"{name}.labels", ROWS)
            self._add_head(f"{name}.{self._names[own_head]}", x, labels, head)

    @property
    def _names(self) -> dict[AbstractBlock, str]:
        model = self.job.model
        return dict(zip(model.blocks, model.block_names, strict=True))

    def _add_blocks(self, name: str, blocks: Sequence[AbstractBlock], x: int, table: int) -> int:
        """Add the blocks of a layer or of a prediction module, which may look up the next tokens in the table."""
        names, seen = self._names, Counter[str]()

        def embed(role: str) -> int:
            return embedding(self.step, role, self.step.token_numbers(f"{name}.tokens", ROWS), table)

        for block in blocks:
            seen[names[block]] += 1
            again = f".{seen[names[block]]}" if seen[names[block]] > 1 else ""
            graph = StepGraph(
                step=self.step,
                name=f"{name}.{names[block]}{again}",
                precision=self.job.precision,
                wide=self.wide,
                embed=embed,
            )
            x = block.add_to(graph, x)
        return x

    def _add_head(self, name: str, x: int, labels: int, table: int | None) -> int:
        """Add the last norm, the logits and the loss; return the head's table, which is new where none is given."""
        step, model = self.step, self.job.model
        x = norm(step, f"{name}.norm", x, over="hidden", has_bias=model.norm == "layer")
        table = step.parameter(f"{name}.logits.weight", "vocabulary hidden") if table is None else table
        products = [(table, "vocabulary hidden")], [("", "batch sequence vocabulary")]
        (logits,) = linear(step, f"{name}.logits", (x, HIDDEN), *products, precision=self.wide)
        if model.head.bias:
            logits = bias(step, f"{name}.logits_bias", logits, "vocabulary")
        cross_entropy(step, f"{name}.cross_entropy", logits, labels)
        return table
