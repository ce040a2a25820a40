"""Map the device groups of XLA's collectives to axes of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from benchmarks.support.sent_bytes import ODD_GROUPS, Axes
from trials.jax_training.xla_groups import Groups


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> Axes:
    """Return the axes along which the devices of a group differ, or ODD_GROUPS if no axes make these groups."""
    shape = tuple(mesh.values())
    differ = {
        axis
        for group in groups
        for axis, places in enumerate(np.unravel_index(np.array(group), shape))
        if len(set(places.tolist())) > 1
    }
    # Groups along whole axes contain every combination of places on these axes.
    count = math.prod(shape[axis] for axis in differ)
    if any(len(group) != count for group in groups):
        return ODD_GROUPS
    return tuple(name for axis, name in enumerate(mesh) if axis in differ)
