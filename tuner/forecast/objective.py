"""Objective of a study: the rates by which the step times of its candidates become costs and energies."""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.energy import mean_power_w
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.time_units import HOUR_S
from tuner.forecast.prepared import Prepared
from tuner.search.objectives import COST, ENERGY, GIB, MEMORY, STEP_TIME, MinimizedValue, Objective, label_of
from tuner.study_file.request import Economics
from tuner.subject.problem import Problem

TOKENS_PRICED = 1e6
"""Number of tokens whose cost is a value: a single token costs too little to read."""


def objective_of(prepared: Prepared) -> Objective | None:
    """Return what a study minimizes; None for the step time alone."""
    if prepared.problem.objective == (STEP_TIME,):
        return None
    pairs = zip(prepared.problem.objective, labels_of(prepared.problem, prepared.request.economics), strict=True)
    return Objective(values=tuple(_value(name, label, prepared) for name, label in pairs))


def labels_of(problem: Problem, economics: Economics) -> list[str]:
    """Return the names of the values that a study minimizes, with their units."""
    return [label_of(name, economics.prices.currency if economics.prices else "") for name in problem.objective]


def _value(name: str, label: str, prepared: Prepared) -> MinimizedValue:
    candidates = prepared.candidates
    grid, memory = candidates.space.grid, candidates.space.memory
    if name == STEP_TIME:
        log_rate = np.zeros(len(grid))
    elif name == MEMORY:
        log_rate = np.log(memory.peak_bytes / GIB)
    else:
        log_rate = np.log(rate_of(name, prepared, grid, candidates.estimate))
    return MinimizedValue(name=name, label=label, log_rate=log_rate)


def rate_of(name: str, prepared: Prepared, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
    """Return the cost of a million tokens, or the energy of one, per second of each candidate's step [n]."""
    tokens = prepared.problem.setting.job.tokens_per_step
    if name == COST:
        return _price_per_hour(prepared, grid) / HOUR_S * TOKENS_PRICED / tokens
    assert name == ENERGY, "the step time and memory have no rate"
    cluster = prepared.problem.cluster
    power_w = mean_power_w(cluster, grid, estimate, counts_idle=prepared.request.economics.pays_idle_hosts)
    assert power_w is not None, "a study of energy knows the power of every device"
    return power_w / tokens


def _price_per_hour(prepared: Prepared, grid: ConfigGrid) -> FloatArray:
    """Return the price of the hosts that each candidate pays for, for one hour [n]."""
    cluster, prices = prepared.problem.cluster, prepared.request.economics.prices
    assert prices is not None, "a study of costs has prices"
    found = np.zeros(len(grid))
    for hosts, at in grid.by_host_order():
        price = prices.per_hour(cluster if prepared.request.economics.pays_idle_hosts else cluster.reordered(hosts))
        assert price is not None, "a study of costs has a price of every device"
        found[at] = price
    return found
