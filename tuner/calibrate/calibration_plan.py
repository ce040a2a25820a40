"""Which operators and collectives a calibration measures, and in which order, so that what it takes is well spent.

Every call of the study's candidates has a share of their predicted steps. A measured shape tells of the shapes near it
too, as the operator surrogate sees them: exp(-d^2/2), d being their distance in its features over their length scales.
The next call is the one that adds most of the share that is told of, per second that measuring it takes (a greedy
solution of facility location, Nemhauser, Wolsey and Fisher 1978). Letters: s shapes, f features.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.operators.isolated import LoneCall, lone_call_s, lone_role
from costmodels.operators.layer_operators import OpKind, Phase
from costmodels.step.memory import MemoryEstimate
from costmodels.surrogates.error_terms import StepTerms, step_terms
from costmodels.surrogates.shape_features import feature_values, features_of
from hardware.arrays import FloatArray

MOST_CALLS = 64
"""Calls of one kind and phase that are measured: a surrogate's cost grows with their cube, and more teach little."""

MOST_COMPARED = 1000
"""Shapes of one role that are compared with each other, those with the largest shares."""

CALL_S = 0.03
COLLECTIVE_S = 0.15
"""What a short call takes with its data, its warm-up and its repetitions; measured on a server CPU."""

RUNS = 7.0
"""Runs of a long call, warm-up included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A call of the candidates' steps.

    Attributes:
        call: The call.
        share: Share of the candidates' predicted steps, in the mean.
        predicted_s: t_hat [s].
    """

    call: LoneCall
    share: float
    predicted_s: float

    @property
    def cost_s(self) -> float:
        """About how long measuring it takes [s]."""
        return (COLLECTIVE_S if self.call.is_collective else CALL_S) + RUNS * self.predicted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The calls of a study's candidates.

    Attributes:
        wanted: Those that can be measured here.
        left_out: Share of the candidates' steps that belongs to others.
    """

    wanted: tuple[Wanted, ...]
    left_out: float


def calls_of(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate | None = None, *, most_ranks: int) -> Calls:
    """The calls that the steps of all candidates consist of.

    Args:
        setting: Job, cluster and runtime.
        grid: The candidates.
        memory: What is predicted of their memory; None where it is no issue.
        most_ranks: Ranks of the largest group that can be formed here.
    """
    terms = step_terms(setting, grid, memory=memory)
    shares: dict[LoneCall, float] = {}
    left_out = 0.0
    for term, of_shapes in zip(terms.terms, _mean_shares(terms), strict=True):
        role = lone_role(term.name, term.kind, setting.job.model)
        for shape, share in zip(term.shape.tolist(), of_shapes.tolist(), strict=True):
            call = LoneCall(
                kind=term.kind,
                phase=term.phase or Phase.FORWARD,
                role=role or "",
                precision=term.precision or setting.job.precision,
                shape=tuple(shape),
            )
            if role is None or call.group_size > most_ranks or (call.is_collective and shape[2] > 1):
                left_out += share
            else:
                shares[call] = shares.get(call, 0.0) + share
    found = ((call, share, lone_call_s(call, setting.cluster)) for call, share in shares.items() if share > 0)
    wanted = tuple(Wanted(call=call, share=share, predicted_s=time_s) for call, share, time_s in found if time_s)
    return Calls(wanted=wanted, left_out=left_out)


def calibration_plan(wanted: Sequence[Wanted], seconds: float) -> list[Wanted]:
    """The calls to measure in about `seconds`, in order; that of more seconds begins with that of fewer."""
    by_role: dict[tuple[OpKind, Phase, str], list[Wanted]] = {}
    for one in wanted:
        by_role.setdefault((one.call.kind, one.call.phase, one.call.role), []).append(one)
    parts = [_Part(some) for some in by_role.values()]
    queue = [(-part.worth(at), number, at) for number, part in enumerate(parts) for at in range(len(part.calls))]
    heapq.heapify(queue)
    plan: list[Wanted] = []
    counts: dict[tuple[OpKind, Phase], int] = {}
    spent_s = 0.0
    while queue:
        _, number, at = heapq.heappop(queue)
        part = parts[number]
        chosen = part.calls[at]
        key = (chosen.call.kind, chosen.call.phase)
        if counts.get(key, 0) >= MOST_CALLS or spent_s + chosen.cost_s > seconds:
            continue
        worth = part.worth(at)  # what was chosen since may have told some of it
        if queue and worth < -queue[0][0]:
            heapq.heappush(queue, (-worth, number, at))
            continue
        part.choose(at)
        plan.append(chosen)
        counts[key] = counts.get(key, 0) + 1
        spent_s += chosen.cost_s
    return plan


class _Part:
    """The calls of one role, and how much of each is told by those chosen so far."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.calls = sorted(wanted, key=lambda one: -one.share)[:MOST_COMPARED]
        kind = self.calls[0].call.kind
        lengths = np.array([feature.length for feature in features_of(kind)])
        at = feature_values(kind, np.array([one.call.shape for one in self.calls])) / lengths  # [s, f]
        self.alike = np.exp(-0.5 * ((at[:, None] - at[None]) ** 2).sum(axis=2)).astype(np.float32)
        self.share = np.array([one.share for one in self.calls])
        self.cost_s = np.array([one.cost_s for one in self.calls])
        self.told = np.zeros(len(self.calls))

    def worth(self, at: int) -> float:
        """Share of the steps that measuring a call adds to what is told of, per second."""
        more = np.maximum(self.alike[at] - self.told, 0.0)
        return float(self.share @ more / self.cost_s[at])

    def choose(self, at: int) -> None:
        """Counts a call as measured."""
        self.told = np.maximum(self.told, self.alike[at])


def _mean_shares(terms: StepTerms) -> list[FloatArray]:
    """Elasticity of the step to each shape of each term, in the mean over all candidates, each [r]."""
    of_bundles = np.asarray(terms.elasticities.mean(axis=0), dtype=np.float64).ravel()
    of_shapes = np.asarray(terms.shares.T @ of_bundles)
    return np.split(of_shapes, np.cumsum([len(term.shape) for term in terms.terms])[:-1])
