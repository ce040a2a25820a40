"""Simulation of one configuration of a study with the event simulator."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.simulator.simulated_step import Simulation, simulate_step
from costmodels.simulator.stage_rows import stage_rows
from costmodels.simulator.trace import chrome_trace, operator_events
from costmodels.step.memory.peak import MemoryEstimate, estimate_memory
from costmodels.step.pipeline.passes import ONE_CHUNK, SCHEDULES
from costmodels.step.step_time import StepEstimate
from hardware.io.errors import ConfigError, did_you_mean
from hardware.io.output_file import write_output
from tuner.forecast.candidates import predict_candidate, prediction_json
from tuner.subject.problem import Problem

SCHEDULE = "1f1b"
"""Schedule that all predictions assume; with chunks it is the interleaved one."""


def simulate_candidate(problem: Problem, chosen: ParallelConfig, schedule: str = SCHEDULE) -> Simulation:
    """Simulate one step of a configuration that can be launched, on the study's cluster.

    Raises:
        ConfigError: There is no such schedule, or not with this configuration.
    """
    _check_schedule(chosen, schedule)
    memory = _estimate_memory(problem, chosen, schedule)
    return simulate_step(problem.setting, chosen, schedule=schedule, memory=memory)


def simulation_json(problem: Problem, chosen: ParallelConfig, schedule: str, simulation: Simulation) -> dict[str, Any]:
    """Return what `meshtune simulate` prints: a prediction, the closed form's step beside it, and every stage."""
    estimate = StepEstimate(
        step_time_s=np.array([simulation.step_time_s]),
        breakdown_s={part: np.array([seconds]) for part, seconds in simulation.breakdown_s.items()},
    )
    memory = _estimate_memory(problem, chosen, schedule)
    closed_form = predict_candidate(problem, chosen)
    return prediction_json(problem, estimate, memory, 0) | {
        "predicted_step_time_s": closed_form["step_time_s"],
        "predicted_breakdown_s": closed_form["breakdown_s"],
        "schedule": schedule,
        "operator_events": len(operator_events(simulation)),
        "stages": [
            {
                "replica": row.replica,
                "alike": row.count,
                "stage": row.stage,
                "device": row.device,
                "idle_share": row.idle_share,
            }
            for row in stage_rows(simulation)
        ],
    }


def write_trace(simulation: Simulation, out: Path) -> None:
    """Write the step's trace for Perfetto, compressed where the name of the file ends in .gz.

    Raises:
        ConfigError: It cannot be written.
    """
    content = chrome_trace(simulation).encode()
    # without a date, so that the same step gives the same file
    write_output(out, gzip.compress(content, 6, mtime=0) if out.suffix == ".gz" else content, option="--trace")


def _estimate_memory(problem: Problem, chosen: ParallelConfig, schedule: str) -> MemoryEstimate:
    grid = ConfigGrid.from_configs([chosen], problem.options.opened)
    return estimate_memory(problem.setting, grid, schedule=schedule)


def _check_schedule(chosen: ParallelConfig, schedule: str) -> None:
    """Check that a configuration can run under a schedule."""
    if schedule not in SCHEDULES:
        raise ConfigError("is no schedule", key="--schedule", value=schedule, nearest=did_you_mean(schedule, SCHEDULES))
    if schedule in ONE_CHUNK and chosen.vpp > 1:
        raise ConfigError(
            f"cuts no stage into chunks, and the configuration has vpp={chosen.vpp}",
            key="--schedule",
            value=schedule,
            nearest=f"vpp=1, or --schedule {SCHEDULE}",
        )
