"""Measured runs that the cost model made up itself, so that a test knows the truth behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.calibration.measured_runs import MeasuredRun
from costmodels.calibration.sources import setting_of
from costmodels.job.model_spec import ModelSpec
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile
from costmodels.step.memory import estimate_memory
from costmodels.step.step_time import estimate_step

SOURCE = "made up"


def small_model(hidden_size: int) -> ModelSpec:
    """A dense model of eight layers."""
    return ModelSpec(
        name=f"made-up-{hidden_size}",
        source="made up",
        assumed=(),
        num_layers=8,
        hidden_size=hidden_size,
        vocab_size=32000,
        num_heads=32,
        num_kv_heads=32,
        head_dim=hidden_size // 32,
        ffn_size=4 * hidden_size,
        gated_ffn=True,
        norm="rms",
        tied_embeddings=False,
        learned_positions=0,
    )


def unmeasured_run(model: ModelSpec, config: ParallelConfig, **changes: object) -> MeasuredRun:
    """A run of which nothing is known yet but what was configured."""
    run = MeasuredRun(
        model=model,
        sequence_length=2048,
        global_batch_size=32,
        devices=config.num_devices,
        device="H100-SXM-80",
        precision="bf16",
        config=config,
        recompute_modules=("core_attn",),
        is_failed=False,
        step_time_s=None,
        peak_memory_bytes=None,
        notes="",
        source=SOURCE,
        place="runs.csv:2",
    )
    return replace(run, **changes)  # type: ignore[arg-type] # the caller names fields of a run


def timed_by(runs: Sequence[MeasuredRun], truth: RuntimeProfile, log_noise: np.ndarray) -> list[MeasuredRun]:
    """The runs with the step times that `truth` gives them, times e to the power of `log_noise` [n]."""
    timed = []
    for run, noise in zip(runs, log_noise, strict=True):
        setting = setting_of(run, {truth.name: truth}, truth.name).setting
        grid = ConfigGrid.from_configs([run.config])
        memory = estimate_memory(setting, grid)
        seconds = estimate_step(setting, grid, memory=memory).step_time_s[0]
        timed.append(replace(run, step_time_s=float(seconds * np.exp(noise))))
    return timed


def varied_runs() -> list[MeasuredRun]:
    """Sixteen configurations of two models on one host of eight devices."""
    configs = [
        ParallelConfig(tp=tp, dp=8 // (tp * pp), pp=pp, mbs=mbs, zero_stage=1, sequence_parallel=tp > 1)
        for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2))
        for mbs in (1, 2)
    ]
    return [unmeasured_run(small_model(hidden), config) for hidden in (2048, 8192) for config in configs]
