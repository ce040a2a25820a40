"""Every stage of a configuration as JSON: parameters, memory, times, and collectives of a step."""

from __future__ import annotations

from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.step.memory.peak import NOT_COUNTED
from costmodels.step.stage_figures import StageFigures, stage_figures
from hardware.io.errors import ConfigError
from tuner.subject.problem import Problem


def stages_json(problem: Problem, chosen: ParallelConfig) -> dict[str, Any]:
    """Return `micro_batches` and `stages` of a prediction; empty for a step of the user's own, which has no stages."""
    try:
        setting = problem.subject.setting
    except ConfigError:
        return {}
    figures = stage_figures(setting, chosen)
    per_stage = chosen.num_devices // chosen.pp
    stages = [_stage_json(figures, stage, stage * per_stage) for stage in range(chosen.pp)]
    return {"micro_batches": figures.num_micro_batches, "stages": stages}


def _stage_json(figures: StageFigures, stage: int, rank: int) -> dict[str, Any]:
    memory = figures.memory
    tensors = [part for part in memory.parts_bytes if part not in NOT_COUNTED["allocated"]]
    return {
        "stage": stage,
        "rank": rank,
        "parameters": round(float(figures.parameters[stage])),
        "peak_memory_bytes": int(memory.peak_bytes[stage]),
        "tensor_bytes": sum(int(memory.parts_bytes[part][stage]) for part in tensors),
        "memory_bytes": {part: int(sizes[stage]) for part, sizes in memory.parts_bytes.items()},
        "forward_s": float(figures.forward_s[stage]),
        "backward_s": float(figures.backward_s[stage]),
        "optimizer_s": float(figures.optimizer_s[stage]),
        "collectives": [
            {
                "name": one.name,
                "kind": str(one.kind),
                "phase": str(one.phase),
                "size_bytes": one.size_bytes,
                "ranks": list(one.ranks),
                "count": one.count,
            }
            for one in figures.collectives[stage]
        ],
    }
