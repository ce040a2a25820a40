"""Time rehearsals of Llama 3: CPU time of import, building and steps, memory, and 30 candidates.

    python -m benchmarks.speed.rehearsals [--repeats 3] [--leaders 30] [--jobs 2] [--json]

Runs tests/support/rehearsal/pretrain.py above megatron-core's wheel and Transformer Engine's Python code
(`make frameworks` installs both), as `meshtune rehearse` runs a study's program. Times are medians. Targets: at most
2 s and 450 MB for a stage of 64 ranks after the import; 4,096 ranks at most twice 64; 30 candidates in 90 s on two
cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.support.rehearsal import megatron_study
from tests.support.rehearsal.megatron_study import ENGINE
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.program import Program
from tuner.rehearsal.run import Case, rehearse

FLAGS = (
    *("--group-query-attention", "--num-query-groups", "8", "--swiglu", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--rotary-base", "500000"),
    *("--untie-embeddings-and-output-weights", "--seq-length", "8192", "--max-position-embeddings", "8192"),
    *("--vocab-size", "128256", "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--no-gradient-accumulation-fusion", "--sequence-parallel", "--micro-batch-size", "1"),
    *("--train-iters", "5", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer", "--mock-data"),
)
SIZES: Mapping[str, tuple[int, int, int, int]] = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64)}
"""Layers, hidden size, size of the MLP and heads (Llama 3: arXiv 2407.21783, table 3)."""
LAYOUTS: Mapping[str, tuple[str, int, int, int, int, int]] = {
    "8B, 64 ranks, pp=4 tp=2": ("8B", 64, 128, 4, 2, 1),
    "8B, 64 ranks, tp=4": ("8B", 64, 128, 1, 4, 1),
    "70B, 64 ranks, pp=4 tp=8 vpp=5": ("70B", 64, 32, 4, 8, 5),
    "70B, 4,096 ranks, pp=4 tp=8 vpp=5": ("70B", 4096, 2048, 4, 8, 5),
}
"""Model, ranks, batch, pp, tp and chunks of a stage."""
MOST = 1_000
"""More micro-batches than a schedule needs: it says itself how many it makes."""


def case_of(name: str, rank: int = 0) -> Case:
    """Return the rehearsal of a layout as one rank."""
    model, world, batch, pp, tp, vpp = LAYOUTS[name]
    layers, hidden, ffn, heads = SIZES[model]
    words: list[Any] = ["--num-layers", layers, "--hidden-size", hidden, "--ffn-hidden-size", ffn]
    words += ["--num-attention-heads", heads, "--global-batch-size", batch]
    words += ["--pipeline-model-parallel-size", pp, "--tensor-model-parallel-size", tp]
    words += ["--num-layers-per-virtual-pipeline-stage", layers // pp // vpp] if vpp > 1 else []
    script = Path(megatron_study.__file__).with_name("pretrain.py")
    program = Program(
        interpreter=sys.executable,
        script=script,
        module=None,
        arguments=(*FLAGS, *map(str, words)),
        directory=script.parent,
        environment={"PYTHONPATH": str(ENGINE), "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    return Case(program=program, world=world, rank=rank, stage=rank * pp // world, most_micro_batches=MOST)


def rehearsed(cases: list[Case], jobs: int = 1) -> list[RankAnswer]:
    """Rehearse cases, all of which must be accepted.

    Raises:
        ConfigError: one is not.
    """
    device = find_cluster("dgx-h100").devices[0]
    found = list(rehearse(cases, device=device, jobs=jobs, environment=os.environ, unconfined=True))
    for one in found:
        if one.verdict != "accepted":
            raise ConfigError(f"is {one.verdict}: {one.error}", key="rehearsal", value=one.rank)
    return found


def row(name: str, repeats: int) -> dict[str, Any]:
    """Time a layout's first stage."""
    tell(f"rehearsing {name}")
    found = rehearsed([case_of(name)] * repeats)
    seconds = {part: statistics.median(one.cpu_parts_s[part] for one in found) for part in found[0].cpu_parts_s}
    steps = [taken for part, taken in seconds.items() if part.startswith("step")]
    made, of_step = found[0].micro_batches or (0, 0)
    return {
        "layout": name,
        "import_s": seconds["import"],
        "build_s": seconds["build"],
        "step_1_s": steps[0],
        "further_s": sum(steps[1:]),
        "case_s": seconds["case"],
        "mb": max(one.resident_bytes for one in found) / 1e6,
        "made": f"{made}/{of_step}",
        "operators": found[0].operators,
        "peak_gib": (found[0].peak_bytes or 0) / 2**30,
    }


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Time all layouts, and many candidates at once."""
    figures: dict[str, Any] = {"rows": [row(name, given.repeats) for name in LAYOUTS]}
    if given.leaders:
        tell(f"rehearsing {given.leaders} candidates, {given.jobs} at once")
        began = time.perf_counter()
        rehearsed([case_of("8B, 64 ranks, pp=4 tp=2")] * given.leaders, given.jobs)
        figures["leaders_s"] = time.perf_counter() - began
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    publish(figures["rows"], as_json=False)
    if "leaders_s" in figures:
        print(f"all candidates: {figures['leaders_s']:.1f} s")


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = benchmark_parser("speed.rehearsals", __doc__)
    parser.add_argument("--repeats", type=count_at_least(1), default=3, help="rehearsals of a layout (3)")
    parser.add_argument("--leaders", type=count_at_least(0), default=30, help="candidates in a row (30)")
    parser.add_argument("--jobs", type=count_at_least(1), default=2, help="candidates at once (2)")
    given = parser.parse_args()
    if not ENGINE.is_dir():
        tell("Transformer Engine's Python code is not installed: make frameworks")
        return 0
    return answer("rehearsals", given, measured, show)


if __name__ == "__main__":
    sys.exit(main())
