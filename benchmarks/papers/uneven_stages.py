"""Compare jointly planned layers and recomputation per stage with even stages that all recompute alike.

    python -m benchmarks.papers.uneven_stages [--json]

This is BMPipe's part of ManuMatic's Table 3: qwen2.5-72b on 64 Ascend 910B at sequences of 32K, in every layout with
more than one stage. Even stages recompute nothing if that fits, else everything. The other stages are those that branch
and bound proves to be the best under the same limit of memory (`tuner.planners.pipeline.stage_problem.best_stages`), or
the even ones if these are predicted to be no slower. Both are predicted by the closed form, and simulated.

The paper prints one figure for BMPipe together with a pinned sharding of matrix products: 225 tokens/s, beside 173 of a
hand-tuned plan and 155 of D-Rec. It states neither batch nor degrees; the batch here is assumed.

Exactness: the same problem for shortened models, with memory between the needs of full and of no recomputation, is
solved by a mixed integer program too, and by trying every plan if these are few. So is the problem of the best layouts.
Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish, tell
from benchmarks.support.workers import mapper
from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import DEGREES, ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.simulator.simulated_step import simulate_step
from costmodels.step.memory.peak import estimate_memory
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tests.oracles.stage_exhaustive import plan_stages_exhaustively
from tests.oracles.stage_milp import plan_stages_by_milp
from tuner.planners.engine.branch_and_bound import branch_and_bound
from tuner.planners.engine.outcome import Known, Limits
from tuner.planners.pipeline.stage_problem import best_stages, pipeline_of
from tuner.planners.pipeline.stage_search import StagesProblem
from tuner.planners.pipeline.stages import Pipeline
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for

HEADROOM = 0.08
PAPER = {"ManuMatic + BMPipe": 225, "Expert-Fine-tuned": 173, "D-Rec (auto)": 155}
"""Throughput in ManuMatic's Table 3 [tokens/s].

The figures apparently count one device: 64 devices together can do sixty times as much.
"""
AT_ONCE = 16
NUM_SHOWN = 10
FEW_PLANS = 8
"""Number of layers up to which all plans are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One layout with even stages and with its best stages.

    Attributes:
        config: Layout with even stages and without recomputation.
        even: Layout with even stages as it fits, or None if it does not.
        best: Layout with its best stages, or `even`; None if nothing fits.
        known: Proof status of the best stages.
        even_s: Predicted and simulated step time of `even` [s]; inf if it is None.
        best_s: Predicted and simulated step time of `best` [s]; inf if it is None.
    """

    config: ParallelConfig
    even: ParallelConfig | None
    best: ParallelConfig | None
    known: Known
    even_s: tuple[float, float]
    best_s: tuple[float, float]

    def gain(self, simulated: bool) -> float:
        """Return the gain in throughput by the best stages; inf if only these fit."""
        return self.even_s[simulated] / self.best_s[simulated] - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit status."""
    parser = benchmark_parser("papers.uneven_stages", __doc__)
    parser.add_argument("--batch", type=count_at_least(1), default=32, help="sequences of a step (32, assumed)")
    parser.add_argument("--hosts", type=count_at_least(1), default=8, help="hosts of eight devices (8)")
    parser.add_argument("--pp", type=count_at_least(2), nargs="+", help="numbers of stages (all that are possible)")
    parser.add_argument("--workers", type=count_at_least(1), default=2, help="worker processes (2)")
    return answer("uneven_stages", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the figures of all layouts, and those of exactness."""
    setting, layouts = _layouts(given.batch, given.hosts, given.pp)
    tell(f"{len(layouts):,} layouts")
    tasks = [layouts[at : at + AT_ONCE] for at in range(0, len(layouts), AT_ONCE)]
    found: list[Compared] = []
    with mapper(given.workers) as each:
        for number, compared in enumerate(each(partial(_compare_all, setting), tasks), start=1):
            found += compared
            if number % 20 == 0:
                tell(f"{number * AT_ONCE:,} of {len(layouts):,} layouts")
    tokens = setting.job.tokens_per_step / setting.cluster.num_devices
    figures = summary(found, tokens)
    exact = list(_exactness(setting, found))
    settings = {"batch": given.batch, "devices": setting.cluster.num_devices, "headroom": HEADROOM}
    return {"settings": settings, "paper": PAPER, **figures, "exactness": exact}


def _layouts(batch: int, hosts: int, stages: Sequence[int] | None) -> tuple[Setting, list[ParallelConfig]]:
    """Enumerate all layouts with more than one stage that the runtime can launch."""
    job = TrainingJob(
        model=find_model("qwen2.5-72b"),
        sequence_length=32768,
        global_batch_size=batch,
        precision="bf16",
        zero_stage=1,
        recompute="none",
    )
    options = SpaceOptions(memory_headroom=HEADROOM, allowed=(("pp", tuple(stages)),) if stages else ())
    setting = setting_for(job, find_cluster("ascend-910b", hosts=hosts), find_runtime("mindspeed"), options)
    grid, _ = enumerate_space(setting, options)
    return setting, [grid.config(at) for at in np.flatnonzero(grid.pp > 1).tolist()]


def _compare_all(setting: Setting, layouts: Sequence[ParallelConfig]) -> list[Compared]:
    return [compared(setting, layout) for layout in layouts]


def compared(setting: Setting, layout: ParallelConfig) -> Compared:
    """Evaluate a layout with even stages and with its best ones."""
    # Recomputation costs time, so even stages use it only if they do not fit without it.
    candidates = (layout, replace(layout, recompute="full"))
    even = next((config for config in candidates if _fits(setting, config)), None)
    planned, outcome = best_stages(setting, layout, memory_headroom=HEADROOM, may_reorder=False)
    best = even
    if outcome.best is not None and _fits(setting, planned):
        best = planned if even is None or _predicted_s(setting, planned) < _predicted_s(setting, even) else even
    return Compared(
        config=layout,
        even=even,
        best=best,
        known=outcome.known,
        even_s=_both_s(setting, even),
        best_s=_both_s(setting, best),
    )


def _fits(setting: Setting, config: ParallelConfig) -> bool:
    grid = ConfigGrid.from_configs([config])
    return bool(estimate_memory(setting, grid).fits(HEADROOM)[0])


def _predicted_s(setting: Setting, config: ParallelConfig) -> float:
    grid = ConfigGrid.from_configs([config])
    memory = estimate_memory(setting, grid)
    return float(estimate_step(setting, grid, memory=memory).step_time_s[0])


def _both_s(setting: Setting, config: ParallelConfig | None) -> tuple[float, float]:
    """Return the step times by the closed form and by the simulator [s]."""
    if config is None:
        return math.inf, math.inf
    grid = ConfigGrid.from_configs([config])
    memory = estimate_memory(setting, grid)
    simulated = simulate_step(setting, config, memory=memory)
    return _predicted_s(setting, config), simulated.step_time_s


def summary(found: Sequence[Compared], tokens: float) -> dict[str, Any]:
    """Summarise the gains of layouts, and that of the fastest layout.

    Args:
        found: Compared layouts.
        tokens: Number of tokens of one step per device.
    """
    # Gains need both times; layouts where only uneven stages fit are counted separately.
    both = [one for one in found if one.even is not None and one.best is not None]
    if not both:
        raise ConfigError("leaves no layout whose even stages fit", key="--pp")
    # Predicted and simulated times are pairs, indexed by False and True.
    ways = {"closed_form": False, "simulator": True}
    fastest = {
        way: {
            "even": _fastest_row(min(both, key=lambda one: one.even_s[at]), tokens, at, of_best=False),
            "best": _fastest_row(min(found, key=lambda one: one.best_s[at]), tokens, at, of_best=True),
        }
        for way, at in ways.items()
    }
    shown = sorted(both, key=lambda one: one.best_s[False])[:NUM_SHOWN]
    return {
        "layouts": len(found),
        "even_fit": len(both),
        "even_without_recomputation": sum(one.even == one.config for one in both),
        "only_uneven_fit": sum(one.even is None and one.best is not None for one in found),
        "proven": sum(one.known in (Known.OPTIMAL, Known.INFEASIBLE) for one in found),
        "even_kept": sum(one.best == one.even for one in both),
        "gains": {way: _gains([one.gain(at) for one in both]) for way, at in ways.items()},
        "fastest": fastest,
        "gain_of_fastest": {
            way: own["even"]["step_time_s"] / own["best"]["step_time_s"] - 1 for way, own in fastest.items()
        },
        "top": [_top_row(one, tokens) for one in shown],
    }


def _gains(gains: Sequence[float]) -> dict[str, float]:
    shares = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0}
    return {name: float(np.quantile(gains, share)) for name, share in shares.items()}


def _fastest_row(one: Compared, tokens: float, simulated: bool, *, of_best: bool) -> dict[str, Any]:
    config, seconds = (one.best, one.best_s) if of_best else (one.even, one.even_s)
    assert config is not None, "the fastest one fits"
    return {
        **_config_json(config),
        "step_time_s": seconds[simulated],
        "tokens_per_s_per_device": tokens / seconds[simulated],
    }


def _config_json(config: ParallelConfig) -> dict[str, Any]:
    """Return the degrees, and the layers and recomputed layers of each stage, summed over its chunks."""
    given = config.assignment
    return {
        "config": config.values(DEGREES),
        "recompute": config.recompute,
        "layers": _sum_by_stage(given.layers, config.pp),
        "recomputed": _sum_by_stage(given.recomputed, config.pp),
    }


def _sum_by_stage(of_virtual: Sequence[int], pp: int) -> list[int]:
    """Sum values of virtual stages over the chunks of each stage."""
    return np.array(of_virtual, dtype=np.int64).reshape(-1, pp).sum(axis=0).tolist() if of_virtual else []


def _top_row(one: Compared, tokens: float) -> dict[str, Any]:
    assert one.best is not None, "what is fastest fits"
    return {
        **_config_json(one.best),
        "even_s": one.even_s[False],
        "best_s": one.best_s[False],
        "gain": one.gain(simulated=False),
        "even_simulated_s": one.even_s[True],
        "best_simulated_s": one.best_s[True],
        "simulated_gain": one.gain(simulated=True),
        "tokens_per_s_per_device": tokens / one.best_s[False],
    }


def _exactness(setting: Setting, found: Sequence[Compared]) -> Iterator[dict[str, Any]]:
    """Compare our optimum with that of HiGHS, and with the best of all plans if these are few."""
    fastest = min((one for one in found if one.best is not None), key=lambda one: one.best_s[False])
    for num_layers, pp in ((FEW_PLANS, 2), (FEW_PLANS, 4), (12, 4), (16, 2), (16, 4)):
        job = replace(setting.job, model=setting.job.model.changed(num_layers=num_layers))
        # The shortened models use tp=8 and fill the devices with context parallelism.
        layout = replace(fastest.config, pp=pp, vpp=1, tp=8, cp=setting.cluster.num_devices // (8 * pp), up=1, dp=1)
        # From memory that forces full recomputation to memory that needs none.
        for share in (0.0, 0.3, 0.7, 1.0):
            pipeline = _pipeline(replace(setting, job=job), layout, share)
            yield _exact_row(f"{num_layers} layers on {pp} stages, {share:.0%}", pipeline, num_layers <= FEW_PLANS)
    for one in sorted((one for one in found if one.best != one.even), key=lambda one: one.best_s[False])[:3]:
        pipeline = pipeline_of(setting, one.config, memory_headroom=HEADROOM, may_recompute=True)
        yield _exact_row(f"80 layers: {_degrees(one.config.values(DEGREES))}", pipeline, is_small=False)


def _pipeline(setting: Setting, layout: ParallelConfig, share: float) -> Pipeline:
    """Build a problem whose memory lies between the needs of even stages with (0) and without (1) recomputation."""
    pipeline = pipeline_of(setting, layout, memory_headroom=0.0, may_recompute=True)
    # Even stages hold the layers rounded up; the fullest stage determines the memory needed.
    each = -(-pipeline.num_layers // pipeline.num_stages)
    kept, again = (
        max(
            pipeline.fixed_bytes(stage)
            + each * float(pipeline.state_bytes[0] + pipeline.in_flight[stage] * bytes_of_layer[0])
            for stage in range(pipeline.num_stages)
        )
        for bytes_of_layer in (pipeline.kept_bytes, pipeline.recomputed_bytes)
    )
    return replace(pipeline, capacity_bytes=np.full_like(pipeline.capacity_bytes, again + share * (kept - again)))


def _exact_row(name: str, pipeline: Pipeline, is_small: bool) -> dict[str, Any]:
    tell(name)
    ours = branch_and_bound(StagesProblem(pipeline), limits=Limits(time_s=60))
    highs = plan_stages_by_milp(pipeline, limits=Limits(time_s=60))
    every = plan_stages_exhaustively(pipeline) if is_small else None
    ours_s, highs_s = (math.inf if own.best is None else own.best.cost for own in (ours, highs))
    return {
        "problem": name,
        "known": ours.known.name,
        "step_s": ours_s,
        "seconds": ours.seconds,
        "highs": highs.known.name,
        "highs_over_ours": highs_s / ours_s if math.isfinite(ours_s) else None,
        "highs_seconds": highs.seconds,
        "every_plan_over_ours": every.step_s / ours_s if every is not None and math.isfinite(ours_s) else None,
        "recomputed": sum(stage.num_recomputed for stage in ours.best.solution.stages) if ours.best else None,
    }


def show(figures: dict[str, Any]) -> None:
    """Print the tables, each below its title."""
    settings = figures["settings"]
    print(f"qwen2.5-72b on {settings['devices']} Ascend 910B, 32K tokens, batch {settings['batch']} (assumed)\n")
    for name in ("layouts", "even_fit", "even_without_recomputation", "only_uneven_fit", "proven", "even_kept"):
        print(f"{figures[name]:>8,}  {name.replace('_', ' ')}")
    print(
        "\nGain of the best stages over even ones in the same layout; of the fastest layout over the fastest even one\n"
    )
    publish(
        [
            {"by": way, **{name: _percent(gain) for name, gain in gains.items()}}
            | {"of fastest": _percent(figures["gain_of_fastest"][way])}
            for way, gains in figures["gains"].items()
        ],
        as_json=False,
    )
    print("\nThe fastest\n")
    publish(
        [
            {"by": way, "stages": name} | _format_row(own)
            for way, both in figures["fastest"].items()
            for name, own in both.items()
        ],
        as_json=False,
    )
    print("\nThe ten layouts that are fastest with their best stages\n")
    publish([_format_row(row) for row in figures["top"]], as_json=False)
    paper = ", ".join(f"{name} {rate}" for name, rate in figures["paper"].items())
    print(f"\nManuMatic's Table 3, tokens/s: {paper}\n\nExactness\n")
    publish(figures["exactness"], as_json=False)


def _format_row(row: dict[str, Any]) -> dict[str, Any]:
    """Format a row."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if name == "config":
            cells[name] = _degrees(value)
        elif name in ("layers", "recomputed"):
            cells[name] = "/".join(map(str, value)) or "-"
        else:
            cells[name] = _percent(value) if "gain" in name else value
    return cells


def _degrees(config: dict[str, Any]) -> str:
    """Format the degrees that are larger than 1."""
    return " ".join(f"{name}{value}" for name, value in config.items() if value != 1)


def _percent(share: float) -> str:
    return f"{share:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
