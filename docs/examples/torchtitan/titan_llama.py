"""A small Llama 3 that torchtitan's Trainer trains: `config` by FSDP, `planned` as a plan of Meshtune says."""

import os
from dataclasses import dataclass

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from tuner import for_titan, load_plan, titan_step

RANKS, ROWS, LENGTH, STEPS = 2, 4, 32, 6
"""Ranks, rows of a batch on each, tokens of a row, and steps."""


class Drawn(BaseDataLoader):
    """Batches of random tokens, of which each rank takes its rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Number of tokens that there are."""

        vocabulary: int

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, seq_len, **_):
        self._shape, self._vocabulary = (local_batch_size * dp_world_size, seq_len + 1), config.vocabulary
        self._rows = slice(local_batch_size * dp_rank, local_batch_size * (dp_rank + 1))

    def __iter__(self):
        drawn = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(0, self._vocabulary, self._shape, generator=drawn)[self._rows]
            positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1).contiguous()
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class NoTokenizer(BaseTokenizer):
    """Nothing: the data are numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No keys."""

    def __init__(self, *_, **__):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 0


def config():
    """Return the configuration: two layers of torchtitan's debug model, with attention that is causal alone."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Drawn.Config(vocabulary=spec.model.vocab_size),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=ROWS,
            seq_len=LENGTH,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )


def step():
    """Return module, batch and loss: the factory that a study names."""
    return titan_step(config(), num_ranks=RANKS)


def planned():
    """Return the configuration of a trial, whose plan is the file that PLAN names."""
    return for_titan(config(), load_plan(os.environ["PLAN"]))
