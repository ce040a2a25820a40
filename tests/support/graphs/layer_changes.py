"""Synthetic layer changes that fit the shape of any configuration."""

from dataclasses import replace

import numpy as np

from costmodels.job.layer_change import KEYS, PLANNED_BLOCKS, LayerChange
from costmodels.step.breakdown import EXPOSED_PARTS

NEUTRAL = LayerChange(
    tp=1,
    cp=1,
    up=1,
    ep=1,
    expert_tp=0,
    mbs=1,
    sequence_parallel=True,
    plan="descent",
    compute=((1.0,) * len(PLANNED_BLOCKS),) * 2,
    exposed=((1.0,) * len(PLANNED_BLOCKS),) * len(EXPOSED_PARTS),
    added_s=(((0.0,) * len(PLANNED_BLOCKS),) * len(EXPOSED_PARTS),) * 2,
    once_s=(0.0,) * len(PLANNED_BLOCKS),
)
"""Changes nothing."""


def change_for(config, **values):
    """Build a change with the shape of a configuration from arrays as in LayerChange; omitted ones change nothing."""
    shape = {name: getattr(config, name) for name in KEYS}
    return replace(NEUTRAL, **shape, **{name: _frozen(np.asarray(value).tolist()) for name, value in values.items()})


def random_change(config, seed, *, seconds=1e-4):
    """Draw a random change: 0.3 to 1.5 times the compute, reduced communication, and some additional seconds."""
    rng, blocks, parts = np.random.default_rng(seed), len(PLANNED_BLOCKS), len(EXPOSED_PARTS)
    return change_for(
        config,
        compute=rng.uniform(0.3, 1.5, (2, blocks)),
        exposed=rng.uniform(0, 1, (parts, blocks)),
        added_s=rng.uniform(0, seconds, (2, parts, blocks)) * (rng.random((2, parts, blocks)) < 0.5),
        once_s=rng.uniform(-100 * seconds, 100 * seconds, blocks),
    )


def at(*places, shape, value):
    """Return an array of zeros with one value set."""
    found = np.zeros(shape)
    found[places] = value
    return found


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
