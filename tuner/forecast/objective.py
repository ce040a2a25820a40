"""Objective of a study: the rates by which the step times of its candidates become costs and energies."""

from __future__ import annotations

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.step.energy import mean_power_w
from costmodels.step.step_time import StepEstimate
from hardware.arrays import FloatArray
from hardware.time_units import HOUR_S
from tuner.forecast.candidates import Candidates
from tuner.search.objectives import COST, ENERGY, GIB, MEMORY, STEP_TIME, MinimizedValue, Objective, label_of
from tuner.study_file.request import StudyRequest

TOKENS_PRICED = 1e6
"""Number of tokens whose cost is a value: a single token costs too little to read."""


def objective_of(config: StudyRequest, candidates: Candidates) -> Objective | None:
    """Return what a study minimizes; None for the step time alone."""
    if config.problem.objective == (STEP_TIME,):
        return None
    pairs = zip(config.problem.objective, labels_of(config), strict=True)
    return Objective(values=tuple(_value(name, label, config, candidates) for name, label in pairs))


def labels_of(config: StudyRequest) -> list[str]:
    """Return the names of the values that a study minimizes, with their units."""
    return [
        label_of(name, config.economics.prices.currency if config.economics.prices else "")
        for name in config.problem.objective
    ]


def _value(name: str, label: str, config: StudyRequest, candidates: Candidates) -> MinimizedValue:
    grid, memory = candidates.space.grid, candidates.space.memory
    if name == STEP_TIME:
        log_rate = np.zeros(len(grid))
    elif name == MEMORY:
        log_rate = np.log(memory.peak_bytes / GIB)
    else:
        log_rate = np.log(rate_of(name, config, grid, candidates.estimate))
    return MinimizedValue(name=name, label=label, log_rate=log_rate)


def rate_of(name: str, config: StudyRequest, grid: ConfigGrid, estimate: StepEstimate) -> FloatArray:
    """Return the cost of a million tokens, or the energy of one, per second of each candidate's step [n]."""
    tokens = config.problem.setting.job.tokens_per_step
    if name == COST:
        return _price_per_hour(config, grid) / HOUR_S * TOKENS_PRICED / tokens
    assert name == ENERGY, "the step time and memory have no rate"
    cluster = config.problem.cluster
    power_w = mean_power_w(cluster, grid, estimate, counts_idle=config.economics.pays_idle_hosts)
    assert power_w is not None, "a study of energy knows the power of every device"
    return power_w / tokens


def _price_per_hour(config: StudyRequest, grid: ConfigGrid) -> FloatArray:
    """Return the price of the hosts that each candidate pays for, for one hour [n]."""
    cluster, prices = config.problem.cluster, config.economics.prices
    assert prices is not None, "a study of costs has prices"
    found = np.zeros(len(grid))
    for hosts, at in grid.by_host_order():
        price = prices.per_hour(cluster if config.economics.pays_idle_hosts else cluster.reordered(hosts))
        assert price is not None, "a study of costs has a price of every device"
        found[at] = price
    return found
