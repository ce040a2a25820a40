"""Compare the closed form with the event simulator on the leaders of studies of unlike devices.

    python -m benchmarks.judges.two_fidelities [--studies NAME ...] [--top 30] [--drawn 10] [--seed 1] [--json]

For each study, the `top` candidates with the shortest predicted steps are simulated. The table gives Kendall's tau
between both orders, how much longer the closed form's first takes in the simulator than the simulator's best leader,
the range of the ratio of both step times, and the time of the simulations. `ranking_s` is the time in which `rank`
simulates the same leaders (leaders.py), and `ranking_error` the largest share by which its step times differ from those
of whole steps. The named studies were looked at when the closed form was written; `--drawn` adds studies that a random
generator draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.support.timing import publish, tell
from costmodels.simulator.leaders import simulated_times_s
from costmodels.simulator.simulated_step import simulate_step
from tuner.forecast.candidates import candidates_of, ranking
from tuner.study_file.config import load_study
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem

_A100, _V100, _H100, _L20, _R4090 = "dgx-a100", "v100-pcie", "dgx-h100", "l20", "rtx4090d"
STUDIES: Mapping[str, tuple[str, int, int, Mapping[str, Any]]] = MappingProxyType(
    {
        "7b-a100-v100": ("llama-7b", 128, 2048, {_A100: 1, _V100: 1}),
        "13b-a100-v100": ("llama-13b", 256, 2048, {_A100: 2, _V100: 2}),
        "8b-h100-a100": ("llama3-8b", 256, 4096, {_H100: 1, _A100: 3}),
        "70b-h100-a100": ("llama3-70b", 512, 4096, {_H100: 4, _A100: 4}),
        "7b-4090-l20": ("llama-7b", 64, 2048, {_R4090: 1, _L20: 1}),
        "13b-4090-l20": ("gpt-13b", 128, 2048, {_R4090: 2, _L20: 2}),
        "22b-4090-v100": ("gpt-22b", 256, 2048, {_R4090: 2, _V100: 2}),
        "34b-h100-l20": ("llama2-34b", 256, 4096, {_H100: 2, _L20: 2}),
        "moe-h100-a100": ("mixtral-8x7b", 256, 4096, {_H100: 2, _A100: 2}),
        "8b-slow-nic": ("llama3-8b", 128, 4096, {_H100: 2, "slow": 2}),
    }
)
"""Model, global batch, sequence length, and hosts of each kind."""
_SLOW = {
    "device": "H100-SXM-80",
    "devices_per_host": 8,
    "nic_links": [{"kind": "ethernet", "bandwidth_gb_per_s": 3, "latency_us": 15}],
}
"""Hosts with the devices of others, and a slow network."""
_MODELS = ("llama-7b", "llama3-8b", "llama2-13b", "qwen2.5-7b", "gpt-22b", "llama2-34b", "mixtral-8x7b", "llama3-70b")
_KINDS = (_A100, _V100, _H100, _L20, _R4090, "dgx-h200", "ascend-910b")


def drawn_studies(number: int, seed: int) -> dict[str, tuple[str, int, int, Mapping[str, Any]]]:
    """Draw studies of two kinds of hosts; models of more than 30 billion parameters get four hosts of each kind."""
    random = np.random.default_rng(seed)
    found = {}
    for at in range(number):
        model = str(random.choice(_MODELS))
        first, second = (str(kind) for kind in random.choice(_KINDS, 2, replace=False))
        hosts = 4 if model in ("llama2-34b", "mixtral-8x7b", "llama3-70b") else int(random.choice([1, 2]))
        batch, length = int(random.choice([64, 128, 256, 512])), int(random.choice([2048, 4096]))
        found[f"{at + 1}-{model}-{first}-{second}"] = (model, batch, length, {first: hosts, second: hosts})
    return found


def study_of(name: str, of: tuple[str, int, int, Mapping[str, Any]], folder: Path) -> StudyRequest:
    """Write the study's file and load it."""
    model, batch, length, hosts = of
    groups = [(_SLOW if kind == "slow" else {"name": kind}) | {"hosts": number} for kind, number in hosts.items()]
    for at, group in enumerate(groups):
        group["name"] = group.get("name", f"group{at}")
    keys = {
        "name": name,
        "model": model,
        "cluster": {"groups": groups},
        "job": {"sequence_length": length, "global_batch_size": batch},
        "runtime": "megatron-core",
        "trial": {"backend": "simulated"},
    }
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(keys))
    return load_study(file)


def compare(problem: Problem, top: int) -> dict[str, Any]:
    """Simulate a study's leaders; return how the two orders and step times differ."""
    candidates = candidates_of(problem)
    leaders = ranking(problem, candidates)[:top]
    grid, memory = candidates.space.grid, candidates.space.memory
    begun_s = time.perf_counter()
    simulated = np.array(
        [
            simulate_step(problem.setting, grid.config(at), memory=memory.take(np.array([at]))).step_time_s
            for at in leaders.tolist()
        ]
    )
    simulate_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    ranked = simulated_times_s(problem.setting, grid, leaders, memory=memory)
    ranking_s = time.perf_counter() - begun_s
    closed = candidates.estimate.step_time_s[leaders]
    ratio = closed / simulated
    return {
        "candidates": len(grid),
        "tau": float(kendalltau(closed, simulated).statistic),
        "first_behind": float(simulated[0] / simulated.min() - 1),
        "least_ratio": float(ratio.min()),
        "largest_ratio": float(ratio.max()),
        "simulate_s": simulate_s,
        "ranking_s": ranking_s,
        "ranking_error": float(np.abs(ranked / simulated - 1).max()),
    }


def rows(names: list[str], top: int, drawn: int, seed: int) -> Iterator[dict[str, Any]]:
    """Compare the two fidelities in each study."""
    with tempfile.TemporaryDirectory() as folder:
        for name, of in ({name: STUDIES[name] for name in names} | drawn_studies(drawn, seed)).items():
            tell(f"{name} ...")
            yield {"study": name} | compare(study_of(name, of, Path(folder)).problem, top)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.judges.two_fidelities",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--studies", nargs="*", choices=list(STUDIES), default=list(STUDIES), help="default: all")
    parser.add_argument("--top", type=int, default=30, help="leaders to simulate; default 30")
    parser.add_argument("--drawn", type=int, default=0, help="further studies that are drawn; default 0")
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawn studies; default 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    publish(list(rows(asked.studies, asked.top, asked.drawn, asked.seed)), as_json=asked.json)


if __name__ == "__main__":
    main()
