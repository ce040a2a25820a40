"""Pipelines for the tests of the planners."""

import numpy as np

from tuner.planners.pipeline.stages import Pipeline


def random_pipeline(rng, *, num_layers, num_stages, num_kinds=2, num_types=1, room=1.3):
    """Draw a pipeline with random times and sizes.

    Args:
        rng: Source of all random numbers.
        num_layers: Number of layers, L.
        num_stages: Number of stages, S.
        num_kinds: Number of layer kinds, K.
        num_types: Number of device types, T.
        room: Memory of a device, relative to the average need of a stage without recomputation.
    """
    num_micro_batches = int(rng.integers(1, 9))
    layer_type = rng.integers(0, num_types, num_layers)
    layer_s = rng.uniform(0.01, 0.03, (num_kinds, num_types)) * rng.uniform(1.0, 2.5, (num_kinds, 1))
    kept_bytes, state_bytes = rng.uniform(0.3, 0.8, num_types), rng.uniform(0.5, 1.5, num_types)
    in_flight = np.minimum(num_micro_batches, num_stages - np.arange(num_stages)).astype(np.float64)
    needed = (state_bytes + in_flight.mean() * kept_bytes)[layer_type].sum() / num_stages + 0.3
    supply = rng.integers(0, num_stages + 1, num_kinds)
    supply[0] = max(supply[0], num_stages - supply[1:].sum())
    return Pipeline(
        layer_type=layer_type,
        layer_s=layer_s,
        recompute_s=layer_s * rng.uniform(0.2, 0.4, (num_kinds, num_types)),
        first_s=rng.uniform(0.0, 0.02, num_kinds),
        last_s=rng.uniform(0.0, 0.04, num_kinds),
        stage_s=rng.uniform(0.0, 0.005, num_kinds),
        hop_s=rng.uniform(0.0, 0.004, (num_kinds, num_kinds)),
        state_bytes=state_bytes,
        kept_bytes=kept_bytes,
        recomputed_bytes=kept_bytes * 0.1,
        first_bytes=0.2,
        last_bytes=0.3,
        working_bytes=0.1,
        capacity_bytes=needed * room * rng.uniform(0.8, 1.3, num_kinds),
        supply=supply,
        in_flight=in_flight,
        num_micro_batches=num_micro_batches,
        vpp=int(rng.integers(1, 4)),
    )


def changed(pipeline, **changes):
    """Return a copy of the pipeline with other values in some fields."""
    fields = {name: getattr(pipeline, name) for name in Pipeline.__dataclass_fields__}
    return Pipeline(**(fields | changes))
