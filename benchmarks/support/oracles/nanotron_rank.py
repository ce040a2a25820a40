"""nanotron as an oracle: its configuration, its process groups and its model decide whether a layout runs.

The sections are those of our exporter; the model is nanotron's Llama in the drawn sizes. Each rank that is asked reads
the sections into nanotron's dataclasses, makes its `ParallelContext`, builds its blocks of the model, and sends one
micro-batch through its first block of each kind until attention, where kernels begin. FlashAttention is not installed:
empty modules stand in for it. nanotron 0.4 imports itself in a circle, which is cut at its logging.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import yaml

from benchmarks.support.oracles import children, cuda
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import find_exporter


def nanotron_oracle() -> Any:
    """Make the function that asks nanotron.

    Raises:
        ImportError: nanotron is not installed.
    """
    flash = ("", ".bert_padding", ".flash_attn_interface", ".layers", ".layers.rotary", ".ops", ".ops.triton")
    for name in (*flash, ".ops.triton.layer_norm"):
        _empty(f"flash_attn{name}")
    circle = [f"nanotron.{name}" for name in ("config", "config.config", "parallel", "distributed")]
    for name in circle:
        _empty(name)
    import nanotron.logging
    import torch

    for name in circle:
        del sys.modules[name]
    import nanotron.config
    import nanotron.models.llama
    import nanotron.trainer

    cuda.install()
    nanotron.models.llama.TritonRMSNorm.forward = lambda _, x: x
    rotary = type("Rotary", (torch.nn.Module,), {"__init__": lambda self, **_: super(rotary, self).__init__()})
    rotary.forward = children.reach
    nanotron.models.llama.FlashRotaryEmbedding = rotary
    return answer


def answer(setting: Setting, config: ParallelConfig) -> str | None:
    """Return how nanotron refuses a layout; None if it runs."""
    export, world = find_exporter("nanotron")(setting, config), setting.cluster.num_devices
    content = yaml.safe_load(export.text)
    content["parallelism"]["expert_parallel_size"] = config.ep
    content["parallelism"].pop("recompute_layer", None)  # a key of the repository; it changes no layout
    variables = dict(export.environment)
    for name in ("up", "vpp"):  # degrees that the file has no key for
        if getattr(config, name) > 1:
            return f"ParallelismArgs has no key for {name}"
    return children.on_ranks((0, world - 1), lambda rank: _run(content, variables, setting, rank))


def _empty(name: str) -> None:
    """Register a module whose every attribute can be called."""

    class Empty(ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return MagicMock()

    module = sys.modules[name] = Empty(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)


def _run(content: dict[str, Any], variables: dict[str, str | None], setting: Setting, rank: int) -> None:
    """Be one rank of a layout until its blocks are built and have passed a micro-batch to attention."""
    import torch
    from nanotron.config import LlamaConfig, LRSchedulerArgs, OptimizerArgs, ParallelismArgs, TokensArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator
    from nanotron.models.base import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.parallel import ParallelContext
    from nanotron.trainer import mark_tied_parameters

    model = setting.job.model
    os.environ.update({name: value for name, value in variables.items() if value is not None})
    children.join(setting.cluster.num_devices, rank)
    with cuda.OnCpu():
        given = ParallelismArgs(**content["parallelism"])
        tokens = TokensArgs(**content["tokens"], train_steps=1)
        context = ParallelContext(given.tp, given.pp, given.dp, given.expert_parallel_size)
        sizes = LlamaConfig(
            hidden_size=model.hidden_size,
            intermediate_size=model.plain.ffn_size,
            max_position_embeddings=tokens.sequence_length,
            num_attention_heads=model.plain.num_heads,
            num_hidden_layers=model.num_layers,
            num_key_value_heads=model.plain.num_kv_heads,
            tie_word_embeddings=model.tied_embeddings,
            vocab_size=model.vocab_size,
        )
        blocks = build_model(
            model_builder=lambda: LlamaForTraining(sizes, context, given),
            parallel_context=context,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        trained = tokens.micro_batch_size * tokens.batch_accumulation_per_replica * given.dp  # Config.global_batch_size
        if trained != setting.job.global_batch_size:
            raise ValueError(f"the global batch would be {trained}")
        mark_tied_parameters(blocks, context, given)
        optimizer = OptimizerArgs(
            content["optimizer"]["zero_stage"],
            0.1,
            1.0,
            False,
            1e-8,
            0.9,
            0.95,
            False,
            LRSchedulerArgs(1e-4, 1, "linear", "linear"),
        )
        init_optimizer_and_grad_accumulator(blocks, optimizer, context)
        if rank:  # what other ranks send decides on nothing
            return
        whole = torch.ones(tokens.micro_batch_size, tokens.sequence_length, dtype=torch.long)
        names = ("input_ids", "input_mask", "label_ids", "label_mask")
        batches = tokens.batch_accumulation_per_replica
        try:
            given.pp_engine.train_batch_iter(
                blocks, context.pp_pg, (dict.fromkeys(names, whole) for _ in range(batches)), batches, None
            )
        except children.Reached:
            return
    raise RuntimeError("no micro-batch reached attention")
