"""torchtitan as an oracle: its parser and its Trainer, built under its own fake backend, decide whether a layout runs.

The flags are those of our exporter; the model is torchtitan's Qwen3, dense or with experts, in the drawn sizes. Each
rank that is asked builds the whole Trainer: meshes, stages, FSDP's shards, the schedule and the optimizer; it deals a
batch out to the ranks of the ring, and a few tokens to the experts. What only a GPU or a data set could give is left
out. The backend is `partial_dtensor`: the default, `spmd_types`, needs a PyTorch that is newer than the pinned one, and
makes the same meshes of the same degrees.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from benchmarks.support.oracles import children
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import find_exporter


def torchtitan_oracle() -> Any:
    """Make the function that asks torchtitan.

    Raises:
        ImportError: torchtitan is not installed.
    """
    import torch

    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment] # on no CPU
    torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks
    from torchtitan import trainer
    from torchtitan.config.configs import ParallelismConfig
    from torchtitan.config.manager import ConfigManager
    from torchtitan.tools import utils
    from torchtitan.tools.logging import logger

    logger.setLevel(logging.ERROR)
    utils.get_local_device = lambda: torch.device("cpu")
    trainer.utils.get_peak_flops = lambda _: 1e15
    recipe = ["--module", "qwen3", "--config", "qwen3_moe_debug", "--comm.mode", "fake_backend"]
    recipe += ["--parallelism.spmd_backend", "partial_dtensor"]
    ConfigManager().parse_args(recipe)  # imports what a recipe needs
    known = set(ParallelismConfig.__dataclass_fields__)

    def answer(setting: Setting, config: ParallelConfig) -> str | None:
        if config.up > 1 and not any("ulysses" in name for name in known):
            return "ParallelismConfig has no degree of Ulysses attention"
        words = [*recipe, *find_exporter("torchtitan")(setting, config).arguments]
        world = setting.cluster.num_devices
        return children.on_ranks((0, world - 1), lambda rank: _run(words, setting, config, rank))

    return answer


def _run(words: list[str], setting: Setting, config: ParallelConfig, rank: int) -> None:
    """Be one rank of a layout until its Trainer is built and has dealt out a batch."""
    import torch
    from torchtitan.config.manager import ConfigManager
    from torchtitan.models.qwen3 import model_registry

    children.name_rank(setting.cluster.num_devices, rank)
    read = ConfigManager().parse_args(words)
    read.model_spec = model_registry("debugmodel", attn_backend="flex")
    read.model_spec.model = _model(setting.job.model)
    read.checkpoint.enable = read.validator.enable = False
    nothing = SimpleNamespace(eos_id=0, bos_id=0, state_dict=dict)
    monitor = SimpleNamespace(
        device_name="", get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    )
    for part, made in ((read.tokenizer, nothing), (read.dataloader, nothing)):
        type(part).build = lambda *_, _made=made, **__: _made
    type(read.metrics).build = lambda *_, **__: MagicMock(device_memory_monitor=monitor)
    trainer = read.build()
    tokens = torch.zeros(config.mbs, setting.job.sequence_length, dtype=torch.long)
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    trainer.post_dataloading_process({"input": tokens, "positions": positions}, tokens)
    for module in trainer.model_parts[0].modules():
        if hasattr(getattr(module, "token_dispatcher", None), "_dispatch_token_exchange"):
            _route(module.token_dispatcher, setting.job.model)


def _route(dispatcher: Any, model: ModelSpec) -> None:
    """Deal a few tokens out to the experts, until they would be sent."""
    import torch

    tokens, chosen = torch.zeros(8, model.hidden_size), torch.zeros(8, model.top_k)
    counts = torch.full((model.num_experts,), 2, dtype=torch.int64)
    type(dispatcher)._dispatch_token_exchange = children.reach
    with suppress(children.Reached):
        dispatcher.dispatch(tokens, chosen, chosen.long(), counts)


def _model(model: ModelSpec) -> Any:
    """Return torchtitan's configuration of a Qwen3 model in the sizes of a specification."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear

    rope = CosSinRoPE.Config(dim=model.plain.head_dim, max_seq_len=4096, theta=1e6)
    sizes = {"n_layers": model.num_layers, "dim": model.hidden_size, "head_dim": model.plain.head_dim, "rope": rope}
    sizes |= {"n_heads": model.plain.num_heads, "n_kv_heads": model.plain.num_kv_heads, "attn_backend": "flex"}
    if model.is_moe:
        layers = qwen3._build_qwen3_moe_layers(
            **sizes,
            moe_hidden_dim=model.plain.expert_ffn_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            moe_comm_backend="standard",
        )
    else:
        layers = qwen3._build_qwen3_layers(**sizes, hidden_dim=model.plain.ffn_size)
    tied = model.tied_embeddings
    embedding = qwen3._EMBEDDING_SKIP_INIT if tied else qwen3._EMBEDDING_INIT
    return qwen3.Qwen3Model.Config(
        vocab_size=model.vocab_size,
        dim=model.hidden_size,
        norm=qwen3._qwen3_norm(model.hidden_size),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=model.vocab_size, embedding_dim=model.hidden_size, param_init=embedding
        ),
        lm_head=Linear.Config(
            in_features=model.hidden_size, out_features=model.vocab_size, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )
