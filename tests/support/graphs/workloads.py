"""Workloads for the tests of the planners."""

import dataclasses

import numpy as np

from hardware.link import Link
from tuner.planners.scheduling.problem import DeviceLink, Fusion, Split, Workload


def link(source, target, *, bandwidth=1.0, latency_s=0.0, group=None, ports=()):
    """Build a link with this bandwidth [bytes/s]."""
    return DeviceLink(
        source=source,
        target=target,
        link=Link(kind="other", bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, exclusive_group=group),
        ports=ports,
    )


def workload(exec_s, edges=(), **changes):
    """Build one model of operators with these times [V, D], one byte on each edge, and ample memory."""
    exec_s = np.array(exec_s, dtype=np.float64)
    num_ops, num_devices = exec_s.shape
    fields = {
        "model_of": np.zeros(num_ops, dtype=np.int64),
        "weights": np.ones(1),
        "memory_bytes": np.ones(num_ops),
        "data_bytes": np.ones(len(edges)),
        "capacity_bytes": np.full(num_devices, 1e9),
        "links": (),
    }
    return Workload(exec_s=exec_s, edges=np.array(edges, dtype=np.int64).reshape(-1, 2), **(fields | changes))


def changed(of, **changes):
    """Return a copy of the workload with other values in some fields."""
    fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
    return Workload(**(fields | changes))


def random_workload(rng, *, num_ops, num_devices=2, num_splits=0, num_fusions=0, releases=False):
    """Draw a workload of one or two models with random dependencies, times, sizes and links.

    In a third of the workloads the devices are alike, in a third memory is short, and in a third all links of a device
    pass one port that sends and one that receives. In another third two operators share a home. If memory is released,
    it is always short, and most of it belongs to what is released.
    """
    num_models = int(rng.integers(1, min(2, num_ops) + 1))
    are_alike, is_tight, has_ports, has_mates = rng.random(4) < 1 / 3
    model_of = np.sort(np.r_[np.arange(num_models), rng.integers(0, num_models, num_ops - num_models)])
    edges = [
        (u, v)
        for v in range(num_ops)
        for u in range(v)
        if model_of[u] == model_of[v] and rng.random() < rng.choice([0.3, 0.7])
    ]
    own_s = rng.uniform(1.0, 4.0, (num_ops, 1))
    exec_s = own_s * (1.0 if are_alike else rng.uniform(0.6, 2.0, (num_ops, num_devices))) * np.ones((1, num_devices))
    memory_bytes, data_bytes = (
        rng.uniform(1.0, 3.0, num_ops),
        rng.uniform(0.5, 6.0, len(edges)) * rng.choice([0.1, 1.0]),
    )
    links = []
    for source, target in np.argwhere(~np.eye(num_devices, dtype=bool)).tolist():
        ports = ((source, "out"), (target, "in")) if has_ports else ()
        links.append(link(source, target, bandwidth=4.0, latency_s=0.1, group="one way or the other", ports=ports))
        if not are_alike:
            group = None if rng.random() < 0.5 else "one way or the other"
            links.append(link(source, target, bandwidth=2.0, latency_s=0.05, group=group, ports=ports))
    working_bytes = rng.uniform(0.0, 3.0, num_ops) if releases else None
    if working_bytes is not None:
        memory_bytes, is_tight = memory_bytes / 4, True
    needed = memory_bytes.sum() + 1.5 * data_bytes.sum() + (3.0 if releases else 0.0)
    direct = [(u, v) for u, v in edges if not any((u, w) in edges and _reaches(edges, w, v) for w in range(u + 1, v))]
    return workload(
        exec_s,
        edges,
        model_of=model_of,
        weights=rng.uniform(0.5, 2.0, num_models),
        memory_bytes=memory_bytes,
        data_bytes=data_bytes,
        working_bytes=working_bytes,
        capacity_bytes=needed * rng.uniform(0.4, 0.8, num_devices) if is_tight else np.full(num_devices, needed),
        links=tuple(links),
        mates=(tuple(sorted(rng.choice(num_ops, 2, replace=False).tolist())),) if has_mates and num_ops > 1 else (),
        splits=tuple(
            Split(
                op=int(op),
                parts=2,
                part_s=tuple((exec_s[op] * rng.uniform(0.45, 0.7)).tolist()),
                gather_s=tuple(map(tuple, rng.uniform(0.0, 0.6, (num_devices, num_devices)).tolist())),
                received_bytes=float(rng.uniform(0.0, 2.0)) if releases and rng.random() < 0.5 else None,
            )
            for op in rng.choice(num_ops, min(num_splits, num_ops), replace=False)
        ),
        fusions=tuple(
            Fusion(
                first=u,
                second=v,
                exec_s=tuple(((exec_s[u] + exec_s[v]) * rng.uniform(0.6, 1.1)).tolist()),
                memory_bytes=float(memory_bytes[u] + memory_bytes[v]),
            )
            for u, v in direct[:num_fusions]
        ),
    )


def _reaches(edges, start, end):
    return start == end or any(_reaches(edges, v, end) for u, v in edges if u == start and v <= end)
