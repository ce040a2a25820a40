"""Chunks of a transformer on one rank: its pipeline stage, or several pieces of it with interleaving."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from costmodels.step.pipeline.schedules import chunk_of_layer
from trials.torch_training.model.attention import local_positions
from trials.torch_training.model.blocks import Attention, DenseMlp, Embedding, Head, Surroundings, add_residual
from trials.torch_training.model.experts import Keep, MoeMlp, keep_all
from trials.torch_training.model.mesh import RankMesh
from trials.torch_training.model.sharding import Layout, Sharding
from trials.torch_training.model.weights import WeightMaker


class Layer(nn.Module):
    """Attention and MLP with their residual connections."""

    def __init__(self, attention: Attention, mlp: DenseMlp | MoeMlp, *, recomputed: bool) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output for x [b, s, h] in the residual's layout."""
        if self.recomputed:
            return checkpoint(self._forward, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return] # torch leaves it untyped
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        x = add_residual(x, self.attention, "attention")
        return add_residual(x, self.mlp, "moe_mlp" if isinstance(self.mlp, MoeMlp) else "dense_mlp")


class Chunk(nn.Module):
    """Consecutive layers, with the embedding before the model's first layer and the head after its last.

    Attributes:
        virtual: Number of the virtual stage.
        embedding: Embedding of the first chunk; None in all others.
        layers: Layers of the chunk, in order.
        head: Head of the last chunk; None in all others.
        is_tied: Whether the model's embedding and head share one table.
    """

    def __init__(
        self, virtual: int, embedding: Embedding | None, layers: list[Layer], head: Head | None, *, is_tied: bool
    ) -> None:
        super().__init__()
        self.virtual = virtual
        self.is_tied = is_tied
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Compute activations [b, s, h], or logits [b, s, v], from tokens [b, s] or activations [b, s, h]."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def build_chunks(
    job: TrainingJob,
    runtime: RuntimeProfile,
    config: ParallelConfig,
    mesh: RankMesh,
    sharding: Sharding,
    *,
    seed: int = 0,
    keep: Keep = keep_all,
) -> list[Chunk]:
    """Return the chunks of this rank, in the order of their virtual stages.

    Args:
        job: Training job that `trainable.check_trainable` accepts.
        runtime: Runtime profile, which determines the assignment of layers to stages.
        config: Configuration to train with.
        mesh: Mesh of the configuration, seen from this rank.
        sharding: Layout of the tensors over tensor-parallel ranks.
        seed: Seed of all weights.
        keep: Selection of the copies of tokens that experts accept.
    """
    model = job.model.plain
    positions = local_positions(
        job.sequence_length, cp=config.cp, up=config.up, cp_rank=mesh.index("cp"), up_rank=mesh.index("up")
    ).to(mesh.device)
    tensor = mesh.group("tp")
    # with sequence parallelism, the residual of a rank holds a part of its positions
    split = config.sequence_parallel and tensor is not None
    layout = Layout(sharding, None if tensor is None else mesh.device_mesh("tp"), mesh.index("tp"))
    own = Surroundings(
        model=model,
        layout=layout,
        make=WeightMaker(seed, mesh.device),
        positions=positions,
        residual_positions=positions.chunk(layout.size)[layout.index] if split else positions,
        ring=mesh.group("cp"),
        ulysses=mesh.group("up"),
        recomputes_attention=config.recompute == "selective",
    )
    moe = partial(
        MoeMlp,
        own,
        ep=mesh.group("ep") if model.is_moe else None,
        expert_tp=mesh.group("expert_tp") if model.is_moe else None,
        keep=keep,
    )
    # Virtual stage v belongs to pipeline rank v mod pp, as in Megatron-LM's interleaved schedule.
    of_layer = chunk_of_layer(job.model, runtime, config.pp, config.vpp, config.assignment.layers)
    last = config.pp * config.vpp - 1
    chunks = []
    for virtual in range(mesh.index("pp"), last + 1, config.pp):
        layers = []
        for place, number in enumerate((of_layer == virtual).nonzero()[0].tolist()):
            # Weights are named by the layer's number in the model, whatever stage holds it.
            name = f"layers.{number}"
            # Only the first layers of a chunk may be recomputed.
            again = config.recomputed[virtual]
            layers.append(
                Layer(
                    Attention(own, f"{name}.attention"),
                    moe(name) if model.is_moe_layer(number) else DenseMlp(own, name),
                    recomputed=config.recompute == "full" or place < again,
                )
            )
        embedding = Embedding(own) if virtual == 0 else None
        head = Head(own) if virtual == last else None
        if model.tied_embeddings and embedding is not None and head is not None:
            # With a single stage, embedding and head share one parameter.
            head.table = embedding.tokens
        chunks.append(Chunk(virtual, embedding, layers, head, is_tied=model.tied_embeddings))
    return chunks


def activation_shape(job: TrainingJob, config: ParallelConfig) -> torch.Size:
    """Return the shape of the activations between stages: [mbs, s, h] in the residual's layout."""
    parts = config.cp * config.up * (config.tp if config.sequence_parallel else 1)
    return torch.Size([config.mbs, job.sequence_length // parts, job.model.hidden_size])
