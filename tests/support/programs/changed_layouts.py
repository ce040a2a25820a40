"""Changes of a tensor's layout on real ranks; a module of its own, because ranks import it by name."""

import itertools
import math

LAYOUTS = (-1, -2, 0, 1)
"""What an axis may do to a matrix: hold it whole, hold parts of a sum, or cut one of its dims."""

MESHES = {(4,): 12, (2, 2): 144}
"""Meshes of four ranks, with their changes from any layout to any without sums."""

DTYPES = ("float64", "int64", "bfloat16", "bool", "complex64")


def changes(num_axes):
    """All changes of a matrix's layout on a mesh, those that change nothing included."""
    return [
        (before, after)
        for before in itertools.product(LAYOUTS, repeat=num_axes)
        for after in itertools.product([each for each in LAYOUTS if each != -2], repeat=num_axes)
    ]


def change_all(place, sizes, dtype="float64"):
    """Change a matrix's layout in every way, and tell for each whether the part is right, and the recording."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from costmodels.sharding.exports.torch_ranks import Rank
    from tests.support.programs.recorded_ranks import _groups

    with _groups(place) as (recorder, _):
        rank = Rank.on(init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)])))
        shape = (8, 16)
        whole = torch.arange(math.prod(shape)).reshape(shape) % 7
        whole = (whole % 2 if dtype == "bool" else whole).to(getattr(torch, dtype))
        if dtype == "complex64":
            whole = ((1 + 2j) * whole).conj()  # which torch keeps as a mark on the numbers as they were
        for before, after in changes(len(sizes)):
            part = rank.cut(whole, tuple(-1 if dim == -2 else dim for dim in before))
            if dtype == "bool" and -2 in before:
                continue
            if any(dim == -2 and rank.place[axis] for axis, dim in enumerate(before)):
                part = torch.zeros_like(part)  # the first rank of each group has the whole sum
            recorder.start()
            found = rank.move(part, shape, before, after)
            recording = recorder.stop()
            is_right = (found.is_contiguous() or before == after) and torch.equal(found, rank.cut(whole, after))
            place.tell((before, after, is_right, recording))
