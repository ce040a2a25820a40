"""Pipeline problem as a mixed integer program, solved by HiGHS independently of our bounds.

Letters as in `stages`. Variables and constraints, each with the method that makes it:

- z[s, k] is 1 if kind k serves stage s: one kind per stage, no more stages than its supply (`_kinds`).
- n[s, k, t] is the number of layers of type t on stage s if k serves it, r[s, k, t] the number of recomputed ones: r <=
  n, and n <= the layers of type t times z (`_layers`). Splitting n by kind makes times exact without a large constant.
- y[s, l] is 1 if stage s ends before layer l: the layers of each type on the stages up to s are those before l
  (`_cuts`). Where all layers are alike the numbers alone decide, and there are no cuts.
- memory: a stage holds at most the capacity of its kind (`_memory`).
- h[s] is at least hop[k, k'] (z[s, k] + z[s + 1, k'] - 1), the transfer to the next stage (`_hops`).
- slowest is at least each stage's time (`_slowest`); the objective is (m - 1/v) slowest + (sum of times and h) / v.
"""

from __future__ import annotations

import numpy as np

from tuner.planners.engine.mixed_integer import MixedInteger, Terms
from tuner.planners.engine.outcome import Limits, Outcome
from tuner.planners.pipeline.stages import Pipeline, StagePlan, plan_of


def plan_stages_by_milp(pipeline: Pipeline, *, limits: Limits | None = None) -> Outcome[StagePlan]:
    """Find the best plan of a pipeline with HiGHS; nodes in `limits` are those of its own tree."""
    return _StageProgram(pipeline).solve(limits or Limits())


class _StageProgram:
    """Integer program of one pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Add all variables and constraints."""
        self.pipeline = pipeline
        self.program = MixedInteger()
        shape = (pipeline.num_stages, pipeline.num_kinds)
        typed = (*shape, pipeline.num_types)
        most = np.bincount(pipeline.layer_type, minlength=pipeline.num_types)
        self.z = self.program.variables(shape, upper=1.0, integer=True)
        self.n = self.program.variables(typed, upper=most, integer=True)
        self.r = self.program.variables(typed, upper=most, integer=True)
        self.h = self.program.variables((pipeline.num_stages - 1,))
        self.slowest = self.program.variables(())
        self.most = most
        self._kinds()
        self._layers()
        self._cuts()
        self._memory()
        self._hops()
        self._slowest()

    def _kinds(self) -> None:
        """Give each stage one kind, within the supply."""
        for stage in range(self.pipeline.num_stages):
            self.program.add([(var, 1.0) for var in self.z[stage]], at_least=1.0, at_most=1.0)
            if self.pipeline.kinds is not None:
                self.program.add([(self.z[stage, self.pipeline.kinds[stage]], 1.0)], at_least=1.0)
        for kind in range(self.pipeline.num_kinds):
            self.program.add([(var, 1.0) for var in self.z[:, kind]], at_most=float(self.pipeline.supply[kind]))

    def _layers(self) -> None:
        """Distribute the layers of each type over stages."""
        for stage, kind, type_ in np.ndindex(self.n.shape):
            at = (stage, kind, type_)
            self.program.add([(self.n[at], 1.0), (self.z[stage, kind], -float(self.most[type_]))], at_most=0.0)
            self.program.add([(self.r[at], 1.0), (self.n[at], -1.0)], at_most=0.0)
        for stage in range(self.pipeline.num_stages):
            self.program.add([(var, 1.0) for var in self.n[stage].flat], at_least=1.0)
        for type_ in range(self.pipeline.num_types):
            count = float(self.most[type_])
            self.program.add([(var, 1.0) for var in self.n[:, :, type_].flat], at_least=count, at_most=count)

    def _cuts(self) -> None:
        """Keep the layers in their order."""
        if self.pipeline.num_types == 1:
            return
        before = self.pipeline.layers_before()
        cuts = self.program.variables((self.pipeline.num_stages - 1, len(before)), upper=1.0, integer=True)
        for stage, cut in enumerate(cuts):
            self.program.add([(var, 1.0) for var in cut], at_least=1.0, at_most=1.0)
            for type_ in range(self.pipeline.num_types):
                placed: Terms = [(var, 1.0) for var in self.n[: stage + 1, :, type_].flat]
                ends: Terms = [(var, -float(count)) for var, count in zip(cut, before[:, type_], strict=True)]
                self.program.add(placed + ends, at_least=0.0, at_most=0.0)

    def _memory(self) -> None:
        """Limit the memory of each stage."""
        pipeline = self.pipeline
        for stage in range(pipeline.num_stages):
            terms: Terms = [(var, -float(pipeline.capacity_bytes[kind])) for kind, var in enumerate(self.z[stage])]
            for kind, type_ in np.ndindex(self.n.shape[1:]):
                kept = pipeline.in_flight[stage] * pipeline.kept_bytes[type_]
                saved = kept - pipeline.in_flight[stage] * pipeline.recomputed_bytes[type_]
                terms.append((self.n[stage, kind, type_], float(pipeline.state_bytes[type_] + kept)))
                terms.append((self.r[stage, kind, type_], -float(saved)))
            # in units of the largest capacity: HiGHS takes 1e-7 of a unit for nothing
            scale = float(pipeline.capacity_bytes.max())
            scaled = [(var, factor / scale) for var, factor in terms]
            self.program.add(scaled, at_most=-pipeline.fixed_bytes(stage) / scale)

    def _hops(self) -> None:
        """Bound the transfers between stages."""
        for stage, hop in enumerate(self.h):
            for kind, after in np.ndindex(self.pipeline.hop_s.shape):
                hop_s = float(self.pipeline.hop_s[kind, after])
                both = [(self.z[stage, kind], -hop_s), (self.z[stage + 1, after], -hop_s)]
                self.program.add([(hop, 1.0), *both], at_least=-hop_s)

    def _slowest(self) -> None:
        """Bound the slowest stage, and add the objective."""
        of_slowest, of_sum = self.pipeline.weights
        self.program.cost([(self.slowest[()], of_slowest), *((hop, of_sum) for hop in self.h)])
        for stage in range(self.pipeline.num_stages):
            terms = self._time(stage)
            self.program.cost([(var, of_sum * factor) for var, factor in terms])
            self.program.add([(self.slowest[()], 1.0), *((var, -factor) for var, factor in terms)], at_least=0.0)

    def _time(self, stage: int) -> Terms:
        """Return the time of a stage as a linear expression."""
        terms: Terms = [(var, self.pipeline.fixed_s(kind, stage)) for kind, var in enumerate(self.z[stage])]
        for kind, type_ in np.ndindex(self.n.shape[1:]):
            terms.append((self.n[stage, kind, type_], float(self.pipeline.layer_s[kind, type_])))
            terms.append((self.r[stage, kind, type_], float(self.pipeline.recompute_s[kind, type_])))
        return terms

    def solve(self, limits: Limits) -> Outcome[StagePlan]:
        """Solve the program, and read the plan from its variables."""

        def read(values: np.ndarray) -> tuple[float, StagePlan]:
            kinds = values[self.z].argmax(axis=1).tolist()
            num_layers = values[self.n].round().astype(np.int64).sum(axis=(1, 2)).tolist()
            recomputed = values[self.r].round().astype(np.int64).sum(axis=1).tolist()
            plan = plan_of(self.pipeline, kinds, num_layers, recomputed)
            return plan.step_s, plan

        return self.program.solve(limits, read)
