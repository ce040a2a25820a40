"""Small placement problems whose options are drawn, not priced."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import find_cluster
from tuner.place.answer import place
from tuner.place.exports.registry import launchable_by
from tuner.place.layouts import Layout
from tuner.place.options import Option, Pool, kinds_of
from tuner.place.placement_file import read_placement
from tuner.place.search.problem import problem_of
from tuner.place.workload import EMBEDDINGS, WEIGHTS, Edge, Generation, Module, Workload

LENGTHS = Generation(
    prompts=8, responses_per_prompt=1, prompt_tokens=64, response_tokens=64, longest_response_tokens=64
)


def module(name, job="infer", *, shares=None, model="llama3-8b", batch=8, length=128, **further):
    """Return a module of a small batch."""
    given = {"optimizer_steps": 1, "generation": LENGTHS if job == "generate" else None, "layout": (), "devices": None}
    return Module(
        name=name,
        job=job,
        training=TrainingJob(model=find_model(model), sequence_length=length, global_batch_size=batch),
        runtime=find_runtime("megatron-core"),
        shares=shares,
        **(given | further),
    )


def option(kind, times_s, *, idle_bytes=0.0, busy_bytes=0.0, parts=1, micro_batches=1):
    """Return an option of a kind of device set."""
    layout = Layout(
        config=ParallelConfig(dp=kind.devices),
        times_s=tuple(times_s),
        state_bytes=idle_bytes,
        weight_bytes=idle_bytes,
        moved_bytes=idle_bytes,
        busy_bytes=busy_bytes,
        parts=parts,
        micro_batches=micro_batches,
    )
    return Option(
        kind=kind,
        layout=layout,
        leaves=False,
        times_s=tuple(times_s),
        moves_s=(0.0,) * len(times_s),
        idle_bytes=idle_bytes,
        busy_bytes=busy_bytes,
    )


def drawn_problem(rng):
    """Draw a problem of two or three units on up to three hosts: their options, flow, gangs and memory."""
    hosts, cells = [(1, 4), (2, 1), (2, 2), (3, 1)][int(rng.integers(4))]
    pools = (Pool(hosts=hosts, cells=cells, devices=1, capacity_bytes=10.0),)
    if hosts == 3:
        larger = Pool(hosts=1, cells=1, devices=2, capacity_bytes=8.0, weight=float(rng.uniform(0.2, 1.0)))
        pools = (Pool(hosts=2, cells=1, devices=1, capacity_bytes=10.0), larger)
    kinds = kinds_of(pools)
    modules = [module("a", rng.choice(["infer", "generate"])), module("b", "train"), module("c")]
    if rng.random() < 0.4:
        modules[2] = replace(modules[2], shares=1)
    edges = [
        Edge(source=source, target=target, sends="tokens", data_bytes=float(rng.choice([0.0, 5e10])))
        for source, target in ((0, 1), (0, 2), (1, 2))
        if rng.random() < 0.5
    ]
    if modules[0].job == "generate" and rng.random() < 0.7:
        edges.append(Edge(source=1, target=0, sends=WEIGHTS, data_bytes=float(rng.choice([1e9, 3e11]))))
    elif modules[2].shares is None and rng.random() < 0.5:
        edges = [edge for edge in edges if (edge.source, edge.target) != (1, 2)]
        edges.append(Edge(source=1, target=2, sends=EMBEDDINGS, data_bytes=float(rng.choice([0.0, 5e10]))))
    workload = Workload(
        name="drawn",
        cluster=find_cluster("dgx-h100", 3),
        modules=tuple(modules),
        edges=tuple(edges),
        headroom=0.0,
        overlap_steps=int(rng.integers(2)),
        pools=bool(rng.random() < 0.3),
        together=((0, 1),) if rng.random() < 0.2 else (),
        apart=((0, 2),) if rng.random() < 0.2 and modules[2].shares is None else (),
    )
    options = []
    for at, one in enumerate(modules):
        runs = 0 if one.shares is not None else sum(workload.unit_of[of] == at for of in range(3))
        own = []
        for kind in kinds:
            for _ in range(int(rng.integers(1, 3)) if runs else 0):
                idle = float(rng.integers(0, 6))
                own.append(
                    option(
                        kind,
                        rng.uniform(1, 9, size=runs) / kind.devices**0.7,
                        idle_bytes=idle,
                        busy_bytes=idle + float(rng.integers(0, 5)),
                        parts=int(rng.choice([1, 2])),
                        micro_batches=int(rng.choice([1, 4])),
                    )
                )
        options.append(tuple(own))
    return problem_of(workload, pools, kinds, tuple(options))


PLACEMENTS = Path(__file__).parents[3] / "configs" / "placements"


@functools.cache
def placed_rl(framework=None, overlap_steps=0):
    """Return the priced problem of PPO on 16 devices, and a good placement of it that a framework can launch."""
    workload = replace(read_placement(PLACEMENTS / "ppo-7b-16.yaml"), overlap_steps=overlap_steps)
    answer = place(launchable_by(workload, framework) if framework else workload, time_s=2.0, gap=0.05)
    return answer.problem, answer.state
