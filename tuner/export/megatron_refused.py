"""Flags that Megatron-LM takes with some layouts only, among those that say nothing of a layout themselves.

A user's command has them for today's layout. Sources: megatron-core 0.19.2 training/arguments.py `validate_args`,
transformer/transformer_config.py and model_parallel_config.py (`__post_init__`).
"""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig


def refused_flags(config: ParallelConfig) -> frozenset[str]:
    """Return the flags that Megatron-LM refuses together with a configuration."""
    interleaves = config.pp > 1 and config.vpp > 1
    recomputes_layers = config.recompute == "full" or config.recompute_layers > 0 or any(config.recomputed)
    overlaps_experts = config.ep > 1 and (config.pp == 1 or interleaves) and not recomputes_layers
    taken = {
        # only with --sequence-parallel, which validate_args turns off where tp is 1
        "--tp-comm-overlap": config.tp > 1 and config.sequence_parallel,
        "--overlap-moe-expert-parallel-comm": overlaps_experts,
        "--delay-wgrad-compute": overlaps_experts,
        "--defer-embedding-wgrad-compute": config.pp > 1,
        "--overlap-param-gather-with-optimizer-step": interleaves and config.dp * config.cp * config.up > 1,
        "--overlap-p2p-communication-warmup-flush": interleaves,
        # "to avoid having multiple p2p sends and recvs between same 2 ranks"
        "--no-overlap-p2p-communication": config.pp > 2 or not interleaves,
        "--distribute-saved-activations": config.tp > 1 and recomputes_layers and not config.sequence_parallel,
        "--cpu-offloading-num-layers": config.pp == 1 and config.recompute == "none" and not recomputes_layers,
    }
    return frozenset(flag for flag, is_taken in taken.items() if not is_taken)
