"""Mesh axes along which a layer of a candidate is sharded, and what of experts each of them cuts."""

from __future__ import annotations

from costmodels.job.parallel_config import ParallelConfig

EXPERT_FFN = ("expert_ffn", "ffn", "slots")
"""Factors of the experts' inner size. Additions of biases know names of dims alone; that behind the second product,
which has no inner size, is cut by slots, into which partial sums are scattered."""


def layer_axes(config: ParallelConfig) -> dict[str, int] | None:
    """Return the mesh axes for a layer of a candidate, the slowest first, without axes of one device.

    `dp` is among them as far as experts are distributed over it. The rest of it only adds gradients up.

    Returns:
        None where experts are distributed over a part of an axis.
    """
    inner = {"cp": config.cp, "up": config.up, "tp": config.tp}
    inside = config.cp * config.up * config.tp
    dealt = config.ep * _expert_tensor(config) if config.ep > 1 else 1
    if dealt > inside and dealt % inside:
        return None
    axes = {"dp": max(dealt // inside, 1), **inner}
    found = {name: size for name, size in axes.items() if size > 1}
    return found if config.ep == 1 or expert_factors(found, config) is not None else None


def expert_factors(axes: dict[str, int], config: ParallelConfig) -> dict[str, tuple[str, ...]] | None:
    """Return the factors of experts that each axis cuts; None where `expert_tp` or `ep` ends inside an axis."""
    # Neighbouring ranks share an expert: the fastest axes cut its ffn, the next ones distribute experts.
    left = [(EXPERT_FFN, _expert_tensor(config)), (("experts",), config.ep)]
    found: dict[str, tuple[str, ...]] = {}
    for name, size in reversed(axes.items()):
        while left and left[0][1] == 1:
            left.pop(0)
        if not left:
            break
        factors, ways = left[0]
        if ways % size:
            return None
        found[name] = factors
        left[0] = (factors, ways // size)
    return found if all(ways == 1 for _, ways in left) else None


def _expert_tensor(config: ParallelConfig) -> int:
    """Return the tensor parallelism of experts, which is that of the layer unless the candidate says otherwise."""
    return config.expert_tp or config.tp
