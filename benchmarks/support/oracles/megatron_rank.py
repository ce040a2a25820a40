"""Megatron-LM as an oracle: its parser, process groups, model and schedule decide whether a layout runs.

The flags are those of our exporter beside those of the model. Each rank that is asked parses and validates them, makes
the groups, builds its chunks of the model, and calls the schedule, whose first step sends a micro-batch through the
real embedding and the real projections, past attention, to the MLP or to the sending of tokens to experts. Only what
Transformer Engine would do stands in: norms have no condition, and attention checks what its context parallelism
asserts.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks.support.megatron_parser import MegatronParser
from benchmarks.support.oracles import children, cuda
from benchmarks.support.oracles.draws import VOCABULARY
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import find_exporter
from tuner.export.hybrid_pattern import has_pattern


def megatron_oracle() -> Any:
    """Make the function that asks Megatron-LM.

    Raises:
        ImportError: megatron-core is not installed.
    """
    warnings.simplefilter("ignore")
    cuda.install()
    parser = MegatronParser(transformer_engine="2.12.0")
    _stand_ins()

    def answer(setting: Setting, config: ParallelConfig) -> str | None:
        export, world = find_exporter("megatron")(setting, config), setting.cluster.num_devices
        words = [word for word in export.arguments if word != "--moe-grouped-gemm"]  # a kernel, no layout
        if config.ep > 1 and not setting.job.model.is_moe:
            words += ["--expert-model-parallel-size", str(config.ep)]
        # layers of a hybrid model differ, and so may what its stages refuse
        between = range(0, world, world // config.pp) if has_pattern(setting.job.model) else ()
        return children.on_ranks(
            (0, *between, world - 1), lambda rank: _run(parser, words, export.environment, setting, rank)
        )

    return answer


def parameters_of_chunks(setting: Setting, config: ParallelConfig, rank: int) -> list[list[int]]:
    """Return the parameters of every layer of a hybrid model in each chunk of a rank, then those outside of layers.

    Raises:
        ImportError: megatron-core is not installed.
        ChildProcessError: Megatron-LM refuses the layout.
    """

    def answer() -> list[list[int]]:
        warnings.simplefilter("ignore")
        cuda.install()
        parser = MegatronParser(transformer_engine="2.12.0")
        _stand_ins()
        export = find_exporter("megatron")(setting, config)
        words = [word for word in export.arguments if word != "--moe-grouped-gemm"]
        given, own = parser.read(words, export.environment, setting)
        children.join(setting.cluster.num_devices, rank)
        with cuda.OnCpu():
            chunks = _joined(given, own)
        counts = []
        for chunk in chunks:
            layers = [sum(one.numel() for one in layer.parameters()) for layer in chunk.decoder.layers]
            counts.append([*layers, sum(one.numel() for one in chunk.parameters()) - sum(layers)])
        return counts

    found: list[list[int]] = children.ask(answer)
    return found


def _joined(given: Any, config: Any) -> list[Any]:
    """Make the process groups of a rank, and return its chunks of the model."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        given.tensor_model_parallel_size,
        given.pipeline_model_parallel_size,
        given.virtual_pipeline_model_parallel_size,
        context_parallel_size=given.context_parallel_size,
        hierarchical_context_parallel_sizes=given.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=given.expert_model_parallel_size,
        num_distributed_optimizer_instances=given.num_distributed_optimizer_instances,
        expert_tensor_parallel_size=given.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)
    config.use_cpu_initialization, config.perform_initialization = True, False
    return [_chunk(given, config, at) for at in range(given.virtual_pipeline_model_parallel_size or 1)]


def _run(parser: MegatronParser, words: list[str], environment: Any, setting: Setting, rank: int) -> None:
    """Be one rank of a layout until its first micro-batch reaches attention."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.pipeline_parallel import get_forward_backward_func

    world = setting.cluster.num_devices
    given, config = parser.read(words, environment, setting)
    children.join(world, rank)
    with cuda.OnCpu():
        chunks = _joined(given, config)
        if given.use_torch_fsdp2:
            chunks = [_sharded(given, chunk) for chunk in chunks]
        if given.use_megatron_fsdp:
            _meshes(given)
        batches = ConstantNumMicroBatchesCalculator(
            given.global_batch_size, given.micro_batch_size, given.data_parallel_size, False, 0
        )
        try:
            get_forward_backward_func()(
                forward_step_func=lambda data, model: _step(given, data, model),
                data_iterator=[iter(range(1 << 30)) for _ in chunks] if len(chunks) > 1 else iter(range(1 << 30)),
                model=chunks,
                num_microbatches=batches.get(),
                seq_length=given.seq_length,
                micro_batch_size=given.micro_batch_size,
            )
        except children.Reached:
            return
    raise RuntimeError("no micro-batch reached attention")


def _hybrid_chunk(given: Any, config: Any, number: int) -> Any:
    """Return a chunk of a hybrid model, as hybrid_builders.py does."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    stage = number if given.virtual_pipeline_model_parallel_size else None
    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=calculate_padded_vocab_size(
            VOCABULARY, given.make_vocab_size_divisible_by, given.tensor_model_parallel_size
        ),
        max_sequence_length=given.seq_length,
        hybrid_layer_pattern=given.hybrid_layer_pattern,
        pre_process=is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        position_embedding_type=given.position_embedding_type,
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        vp_stage=stage,
    )


def _chunk(given: Any, config: Any, number: int) -> Any:
    if given.hybrid_layer_pattern:
        return _hybrid_chunk(given, config, number)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    stage = number if given.virtual_pipeline_model_parallel_size else None
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage),
        vocab_size=calculate_padded_vocab_size(
            VOCABULARY, given.make_vocab_size_divisible_by, given.tensor_model_parallel_size
        ),
        max_sequence_length=given.seq_length,
        pre_process=is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=not given.untie_embeddings_and_output_weights,
        vp_stage=stage,
    )


def _sharded(given: Any, chunk: Any) -> Any:
    """Return a chunk whose parameters FSDP2 shards over all replicas, as training.py does."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.transformer.module import Float16Module
    from megatron.training.training import get_megatron_ddp_config
    from torch.distributed import DeviceMesh

    chunk.config.transformer_impl = "local"  # as the layers are that _chunk builds
    mesh = DeviceMesh.from_group
    DeviceMesh.from_group = lambda group, _: mesh(group, "cpu")
    narrow = Float16Module(chunk.config, chunk)
    return TorchFullyShardedDataParallel(chunk.config, get_megatron_ddp_config(given), narrow)


def _meshes(given: Any) -> None:
    """Make the meshes of Megatron-FSDP, which refuse ranks that they do not know (mcore_fsdp_adapter.py)."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    whole = given.num_distributed_optimizer_instances == 1
    ranks = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=not whole)
    of_experts = state.get_expert_data_parallel_group(partial_expert_data_parallel=not whole)
    outer = () if whole else (state.get_inter_distributed_optimizer_instance_group(),)
    make = adapter._get_dp_tp_mesh if whole else adapter._get_hsdp_tp_mesh
    make(*outer, ranks, state.get_tensor_model_parallel_group())
    if given.num_experts:
        size = state.get_expert_model_parallel_world_size()
        make(*outer, of_experts, state.get_expert_tensor_parallel_group(), ep_size=size)


def _step(given: Any, data: Iterator[int], model: Any) -> Any:
    """Send one micro-batch through a chunk, as pretrain_gpt.py does."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    next(data)
    whole = torch.zeros(given.micro_batch_size, given.seq_length, dtype=torch.long)
    cut = get_batch_on_this_cp_rank(
        {"tokens": whole, "position_ids": whole}, False, parallel_state.get_context_parallel_group()
    )
    model(cut["tokens"], cut["position_ids"], None)
    raise children.Reached


def _stand_ins() -> None:
    """Put modules without conditions in the place of Transformer Engine's, and attention that checks its own."""
    import torch
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.training.argument_utils import ArgumentGroupFactory

    class Norm(torch.nn.RMSNorm):
        def __init__(self, *, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__(hidden_size, eps)

    class Attention(torch.nn.Module):
        """Asserts of transformer_engine/pytorch/attention/dot_product_attention, 2.20.2."""

        def __init__(self, *, config: Any, cp_comm_type: str | None = None, **_: Any) -> None:
            super().__init__()
            self.config, self.kind = config, cp_comm_type or "p2p"

        def forward(self, query: Any, key: Any, *_: Any, **__: Any) -> Any:
            tp, cp = self.config.tensor_model_parallel_size, self.config.context_parallel_size
            # dot_product_attention.py: heads and key-value heads of a rank
            assert self.config.num_query_groups % tp == 0, "The number of GQA groups must be divisible by TP size!"
            assert query.shape[2] % key.shape[2] == 0, "heads must be divisible by the number of GQA groups!"
            ulysses = {"a2a": cp, "a2a+p2p": (self.config.hierarchical_context_parallel_sizes or [1])[0]}
            if cp > 1:  # context_parallel.py
                assert query.shape[0] % 2 == 0, "Sequence length per GPU needs to be divisible by 2!"
                held, shared = (query.shape[2], key.shape[2]), ulysses.get(self.kind, 1)
                assert all(heads % shared == 0 for heads in held), f"a2a requires num_heads % cp_size == 0: {held}"
            return query.flatten(2)

    _stand_ins_of_hybrids(Norm, Attention)
    backends.LocalSpecProvider.core_attention = lambda _: Attention
    backends.LocalSpecProvider.layer_norm = lambda *_, **__: Norm
    transformer_block.LayerNormImpl = Norm
    gpt_layer_specs.LNImpl = Norm
    layers._grad_accum_fusion_available = True
    # each parser would read the sources of all classes for the texts of its help
    ArgumentGroupFactory._get_field_docstrings = lambda *_: {}
    MLP.forward = MoEAlltoAllTokenDispatcher.dispatch_preprocess = children.reach
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None


def _stand_ins_of_hybrids(norm: Any, attention: Any) -> None:
    """Put Megatron-LM's own linear layers in the place of Transformer Engine's, which hybrid models name in a list."""
    import torch
    from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
    from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
    from megatron.core.ssm import mamba_mixer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc] # the class has no types
        """Norm and product in one, as Transformer Engine's LayerNormLinear."""

        def __init__(self, input_size: int, output_size: int, **given: Any) -> None:
            given.pop("name", None)
            super().__init__(input_size, output_size, **given)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    class GatedNorm(torch.nn.Module):
        """Norm of a state space's result, of mamba_ssm."""

        def __init__(self, size: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(size))

    transformer_engine.TENorm = hybrid_block.TENorm = norm
    transformer_engine.TELayerNormColumnParallelLinear = NormedColumnParallelLinear
    transformer_engine.TEColumnParallelLinear = ColumnParallelLinear
    transformer_engine.TERowParallelLinear = RowParallelLinear
    transformer_engine.TEDotProductAttention = attention
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.MambaMixer.forward = lambda _, hidden, **__: (hidden, None)
    for module in (transformer_engine_spec_provider, hybrid_layer_specs):
        importlib.reload(module)  # they hold the names by which they were imported
