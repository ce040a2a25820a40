"""Megatron-LM's own argument parser, which megatron-core's package has since 0.19: it reads an export's flags.

The flags go through `parse_args`, `validate_args`, and the configurations of model, optimizer and gradient reduction
that training makes from them. The rest of the command line describes the model. What only a GPU could answer is given:
compute capability 9.0, and no fused rotary embedding, which would need TransformerEngine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from costmodels.blocks.attention import Attention
from costmodels.blocks.dense_mlp import DenseMlp
from costmodels.blocks.experts import Experts
from costmodels.blocks.mamba2 import Mamba2
from costmodels.job.setting import Setting
from tests.oracles.frameworks import megatron
from tuner.export.flag_table import FlagValue


class MegatronParser:
    """Reads flags as `pretrain_gpt.py` does.

    Args:
        transformer_engine: Version of Transformer Engine that is taken to be installed; None for the one that is.

    Raises:
        ImportError: megatron-core is not installed, or without `megatron.training`.
    """

    def __init__(self, transformer_engine: str | None = None) -> None:
        self._transformer_engine = transformer_engine
        with _importable():
            from megatron.training import arguments, training
        self._arguments, self._training = arguments, training
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
        self._actions = parser._option_string_actions

    @property
    def flags(self) -> frozenset[str]:
        """Names of all flags of Megatron-LM's parser."""
        return frozenset(self._actions)

    def parse(
        self, words: Sequence[str], environment: Sequence[tuple[str, str | None]], setting: Setting
    ) -> dict[str, FlagValue]:
        """Return what was read for each flag among the words; arguments and errors are those of `read`."""
        read, model = self.read(words, environment, setting)
        found = {word: self._value(word, read) for word in words if word in self._actions}
        if megatron.LAYOUT in found:
            found[megatron.LAYOUT] = layout_text(model.pipeline_model_parallel_layout)
        return found

    def read(
        self, words: Sequence[str], environment: Sequence[tuple[str, str | None]], setting: Setting
    ) -> tuple[argparse.Namespace, Any]:
        """Return the validated arguments and the `TransformerConfig` made of them; errors are Megatron-LM's own.

        Args:
            words: Flags of the export.
            environment: Variables that the export sets; None removes one.
            setting: The job, whose model is described by further flags, and the cluster.
        """
        variables = {name: value for name, value in os.environ.items() if name not in dict(environment)}
        variables |= {name: value for name, value in environment if value is not None}
        variables |= {"RANK": "0", "WORLD_SIZE": str(setting.cluster.num_devices)}
        said = io.StringIO()
        with (
            patch.object(sys, "argv", ["pretrain_gpt.py", *model_flags(setting), *words]),
            patch.dict(os.environ, variables, clear=True),
            patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
            patch("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0)),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(said),
            _stand_in(self._transformer_engine),
        ):
            try:
                read = self._arguments.parse_args()
            except SystemExit as error:  # of argparse, whose message is on standard error
                raise ValueError(said.getvalue()) from error
            self._arguments.validate_args(read)
            model = self._arguments.core_transformer_config_from_args(read)
            self._training.get_megatron_optimizer_config(read)
            self._training.get_megatron_ddp_config(read)
        return read, model

    def _value(self, flag: str, read: argparse.Namespace) -> FlagValue:
        action = self._actions[flag]
        value = getattr(read, action.dest)
        # of an optimizer that updates whole weights, the validation takes this flag for that of another class
        if flag == "--use-distributed-optimizer" and getattr(read, "use_layer_wise_distributed_optimizer", False):
            return True
        if action.nargs == 0:
            return bool(value == action.const)
        return tuple(value) if isinstance(value, list) else value  # type: ignore[no-any-return] # of any type


def layout_text(layout: Any) -> str:
    """Write megatron-core's object for a layout as text again: the layers and modules of each rank's chunks."""
    parts = []
    for chunk in range(layout.virtual_pipeline_model_parallel_size):
        for stage in range(layout.pipeline_model_parallel_size):
            names = [layer.name for layer in layout.layout[stage][chunk]]
            held = names.count("decoder")
            parts.append(("" if not held else "t" if held == 1 else f"t*{held}") + "m" * names.count("mtp"))
    return f"E{'|'.join(parts)}L"


@contextlib.contextmanager
def _stand_in(version: str | None) -> Iterator[None]:
    """Give checks what they ask of Transformer Engine, of a version: its number, Adam's arguments, fused kernels."""
    if version is None:
        yield
        return
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    def fused_adam(*, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
        """Stand for Adam, of which only the arguments' names are asked."""

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = fused_adam  # type: ignore[attr-defined] # what the real module has
    permutes = {
        name: object()
        for name in vars(moe_utils)
        if name.startswith(("fused_permute", "fused_unpermute", "fused_sort_chunks"))
    }
    with (
        patch.object(utils, "get_te_version", lambda: Version(version)),
        patch.dict(sys.modules, modules),
        patch.multiple(moe_utils, **permutes),
    ):
        yield


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Let Megatron-LM be imported on Python 3.11, and where Triton finds no GPU."""
    import triton
    import typing_extensions

    had = hasattr(typing, "override")
    if not had:  # Python 3.12 has it; the package declares 3.12 and uses nothing else of it
        typing.override = typing_extensions.override  # type: ignore[attr-defined] # what 3.12 has there
    # kernels are declared with the driver's benchmark; none of them runs
    triton.runtime.driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))
    try:
        yield
    finally:
        triton.runtime.driver.reset_active()
        if not had:
            del typing.override  # type: ignore[attr-defined] # set above


def model_flags(setting: Setting) -> list[str]:
    """Return flags for the model and for what else a command line must say."""
    model = setting.job.model
    if model.decoder is None:
        return _hybrid_flags(setting)
    values = {
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--ffn-hidden-size": model.plain.ffn_size or model.plain.expert_ffn_size,
        "--num-attention-heads": model.plain.num_heads,
        "--kv-channels": model.plain.head_dim,
        "--max-position-embeddings": setting.job.sequence_length,
        "--position-embedding-type": "rope",
        "--train-iters": 10,
        "--lr": 1e-4,
    }
    if model.plain.num_kv_heads != model.plain.num_heads:
        values |= {"--num-query-groups": model.plain.num_kv_heads}
    if model.is_moe:
        values |= {"--num-experts": model.num_experts, "--moe-router-topk": model.top_k}
        values |= {"--moe-ffn-hidden-size": model.plain.expert_ffn_size}
    if model.is_moe and model.plain.num_dense_layers:
        dense = model.plain.num_dense_layers
        values |= {"--moe-layer-freq": f"([0]*{dense}+[1]*{model.num_layers - dense})"}
    if model.num_mtp_layers:
        values |= {"--mtp-num-layers": model.num_mtp_layers}
    switches = ["--swiglu", "--disable-bias-linear", "--no-rope-fusion", "--mock-data"]
    switches += ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)
    switches += ["--group-query-attention"] * ("--num-query-groups" in values)
    return [*switches, *(str(word) for pair in values.items() for word in pair)]


def _hybrid_flags(setting: Setting) -> list[str]:
    """Return the same for a hybrid model, whose layers the export's pattern names."""
    model = setting.job.model
    kinds = {type(block): block for layer in (*model.layers, model.mtp_layer) for block in layer}
    states, mixer, mlp, routed = (kinds.get(kind) for kind in (Mamba2, Attention, DenseMlp, Experts))
    assert isinstance(mixer, Attention), "Megatron-LM asks for the heads of attention"
    values: dict[str, Any] = {
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": mixer.num_heads,
        "--num-query-groups": mixer.num_kv_heads,
        "--kv-channels": mixer.head_dim,
        "--max-position-embeddings": setting.job.sequence_length,
        "--position-embedding-type": "rope" if mixer.rotary else "none",
        "--normalization": "RMSNorm",
        "--train-iters": 10,
        "--lr": 1e-4,
    }
    gated = False
    if isinstance(states, Mamba2):
        values |= {"--mamba-num-heads": states.num_heads, "--mamba-head-dim": states.head_dim}
        values |= {"--mamba-num-groups": states.num_groups, "--mamba-state-dim": states.state_size}
    if isinstance(mlp, DenseMlp):
        values |= {"--ffn-hidden-size": mlp.ffn_size}
        gated = mlp.gated
    if isinstance(routed, Experts):
        values |= {"--num-experts": routed.num_experts, "--moe-router-topk": routed.top_k}
        values |= {"--moe-ffn-hidden-size": routed.ffn_size}
        values |= {"--moe-shared-expert-intermediate-size": routed.shared_ffn_size} if routed.shared_ffn_size else {}
        values |= {"--moe-latent-size": routed.latent_size} if routed.latent_size else {}
        gated = routed.gated
    switches = ["--swiglu" if gated else "--squared-relu", "--disable-bias-linear", "--no-rope-fusion", "--mock-data"]
    switches += ["--group-query-attention"]
    switches += ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)
    return [*switches, *(str(word) for pair in values.items() for word in pair)]
