"""Run the plans of TOAST's comparison in trials on eight virtual devices, beside what the evaluator says of them.

    python -m benchmarks.papers.toast_trials [--models NAME ...] [--planners NAME ...] [--rounds N] [--json]

The models are those of `benchmarks.papers.toast_tables` at sizes that a processor trains in a fraction of a second, in
float32, on the mesh data=4,model=2 of one host of processor cores. The planners are those of the table. JAX runs each
plan with every layout pinned, by the virtual clock of trials: the program of one device, timed alone, and XLA's
collectives on the links.

`predicted` and `measured` are the step time of a plan over that of the best manual plan: by `cost_of`, which all
planners minimise, and by the trials. A `tie` lies within --tie of the manual plan in the trials.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from benchmarks.judges.planned_trials import agreement
from benchmarks.papers.toast_planners import PLANNERS, Problem
from benchmarks.support.planned_runs import OPTIONS, cpu_host, distinct, run_backends, sign_of
from benchmarks.support.referee_cases import BASE, widened
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, publish
from benchmarks.zoo import Decoder, GraphNetwork, Mixture, Program, UNet
from costmodels.job.parallel_config import ParallelConfig
from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.frontends.jax.graph import graph_of_jax
from costmodels.sharding.plan import Plan, cost_of
from trials.jax_training.framework import JAX
from trials.own_step import OwnStep
from trials.training.planned import OwnStepBackend

MANUAL = "manual"
CHOICES = (MANUAL, "d_rec", "descent", "unseeded", "seeded")
"""Planners whose plans run; manual ones are run in any case."""


def transformer() -> Program:
    """Build two layers of a dense transformer with one key head, as Gemma 2B."""
    return _in_float32(replace(BASE, model=256, hidden=1024).train_program())


def mixture() -> Program:
    """Build two layers of eight experts."""
    return _in_float32(Mixture(base=BASE, experts=8, capacity=32).train_program())


def graph_network() -> Program:
    """Build two steps of message passing."""
    sizes = {"nodes": 1024, "edges": 8192, "features": 64, "latent": 256, "hidden": 256}
    return _in_float32(GraphNetwork(**sizes, hidden_layers=2, steps=2).train_program())


def unet() -> Program:
    """Build two levels of one block each on images of 32 by 32."""
    return _in_float32(UNet(batch=16, side=32, channels=(64, 128), blocks=1, groups=8, heads=8).train_program())


def decoding() -> Program:
    """Build a decoding step of two layers with cached keys and values."""
    return _in_float32(Decoder(base=replace(BASE, model=512, hidden=2048, batch=64, tokens=1), cached=512).program())


MODELS: Mapping[str, Callable[[], Program]] = {
    factory.__name__: factory for factory in (transformer, mixture, graph_network, unet, decoding)
}


def _in_float32(program: Program) -> Program:
    function, arguments, donated = program
    return function, jax.tree.map(widened, arguments), donated


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenPlan:
    """Plans of a step of MODELS, of which there is one; see `trials/own_step.py`.

    Attributes:
        factory: Factory of the step as `module:function`.
        given: Plan of the step.
    """

    factory: str
    given: Plan
    folder: str = "."

    @property
    def step(self) -> OwnStep:
        """Step of the plans."""
        return OwnStep(world="jax", factory=self.factory, folder=self.folder)

    def step_of(self, config: ParallelConfig) -> OwnStep:  # noqa: ARG002 # the contract's
        """Return the step."""
        return self.step

    def plan(self, config: ParallelConfig) -> Plan:  # noqa: ARG002 # the contract's
        """Return the plan."""
        return self.given

    def step_time_s(self, config: ParallelConfig) -> tuple[float, float]:  # noqa: ARG002 # the contract's
        """Return the predicted time of compute and that of all collectives [s]."""
        cost = cost_of(self.given)
        return float(cost.compute_s.sum()), cost.comm_s

    def peak_memory_bytes(self, config: ParallelConfig) -> float:  # noqa: ARG002 # the contract's
        """Return the predicted peak memory of a device [bytes]."""
        return cost_of(self.given).peak_memory_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios of all plans and return the exit status."""
    parser = benchmark_parser("papers.toast_trials", __doc__)
    parser.add_argument("--models", choices=tuple(MODELS), nargs="+", default=list(MODELS), help="models (all)")
    parser.add_argument("--planners", choices=CHOICES, nargs="+", default=list(CHOICES), help="planners (all)")
    parser.add_argument("--rounds", type=count_at_least(1), default=2, help="trials of each plan (2)")
    parser.add_argument("--tie", type=float, default=0.02, help="difference that trials cannot tell from none (0.02)")
    return answer("toast_trials", parser.parse_args(argv), measure, show)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the plans of all models."""
    rows = [row for name in given.models for row in run_model(name, given)]
    return {"rows": rows, "agreement": agreement(rows)}


def show(figures: dict[str, Any]) -> None:
    """Print all plans and the agreement of the signs."""
    publish(figures["rows"], as_json=False)
    print()
    publish(figures["agreement"], as_json=False)


def run_model(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the plans of one model, and return a row for each plan other than the manual one."""
    plans = plans_of(name, given.planners)
    factory = f"{__spec__.name if __spec__ else __name__}:{name}"
    backends = {
        planner: OwnStepBackend(
            framework=JAX, steps=GivenPlan(factory=factory, given=plan), cluster=plan.mesh.cluster, **OPTIONS
        )
        for planner, plan in plans.items()
    }
    runs = run_backends(name, backends, rounds=given.rounds)
    rows = []
    for planner in plans:
        if planner == MANUAL:
            continue
        predicted = cost_of(plans[planner]).step_time_s / cost_of(plans[MANUAL]).step_time_s
        measured = runs[planner].step_s / runs[MANUAL].step_s
        rows.append(
            {
                "backend": "jax",
                "model": name,
                "planner": planner,
                "manual_s": runs[MANUAL].step_s,
                "predicted": predicted,
                "measured": measured,
                "sign": sign_of(predicted, measured, tie=given.tie),
            }
        )
    return rows


def plans_of(name: str, planners: Sequence[str]) -> dict[str, Plan]:
    """Return the manual plan of a model and those of planners that differ from all before them."""
    function, arguments, donated = MODELS[name]()
    problem = Problem(
        graph=graph_of_jax(function, *arguments, donated=donated),
        mesh=DeviceMesh(names=("data", "model"), sizes=(4, 2), cluster=cpu_host()),
    )
    found = ((planner, PLANNERS[planner](problem).plan) for planner in dict.fromkeys((MANUAL, *planners)))
    return distinct(name, [(planner, plan) for planner, plan in found if plan is not None])


if __name__ == "__main__":
    raise SystemExit(main())
