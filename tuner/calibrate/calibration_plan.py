"""Plan of a calibration: the operators and collectives to measure, and their order.

Every call of the study's candidates has a share of their predicted steps. A measured shape also informs nearby shapes,
as in the operator surrogate: with weight exp(-d^2/2), where d is the distance of their features in units of the length
scales. The next call is the one that adds the most informed share per second of measuring. This is the greedy solution
of the facility location problem (Nemhauser, Wolsey and Fisher 1978). Letters: s shapes, f features.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.blocks.operator import OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.setting import Setting
from costmodels.operators.isolated import IsolatedCall, isolated_call_s, isolated_role
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.surrogates.error_terms import StepTerms, step_terms
from costmodels.surrogates.shape_features import feature_values, features_of
from hardware.arrays import FloatArray

MOST_CALLS = 64
"""Largest number of calls of one kind and phase: a surrogate's cost grows with their cube, and more add little."""

MOST_COMPARED = 1000
"""Largest number of shapes of one role that are compared with each other: those with the largest shares."""

CALL_S = 0.03
COLLECTIVE_S = 0.15
"""Times of a short call and a short collective with data, warm-up and repetitions [s]; measured on a server CPU."""

RUNS = 7.0
"""Number of runs of a long call, warm-up included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Call of the candidates' steps that can be measured.

    Attributes:
        call: Isolated call of an operator or collective.
        share: Mean share of the call in the candidates' predicted steps.
        predicted_s: Time predicted by the formula, t_hat [s].
    """

    call: IsolatedCall
    share: float
    predicted_s: float

    @property
    def cost_s(self) -> float:
        """Approximate time that measuring the call takes [s]."""
        return (COLLECTIVE_S if self.call.is_collective else CALL_S) + RUNS * self.predicted_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Calls of a study's candidates.

    Attributes:
        wanted: Calls that can be measured on this machine.
        left_out: Share of the candidates' steps in calls that cannot be measured here.
    """

    wanted: tuple[Wanted, ...]
    left_out: float


def calls_of(setting: Setting, grid: ConfigGrid, memory: MemoryEstimate | None = None, *, most_ranks: int) -> Calls:
    """Collect the calls that the steps of all candidates consist of, for groups of at most so many ranks.

    The candidates' predicted memory is ignored where it is None.
    """
    terms = step_terms(setting, grid, memory=memory)
    shares: dict[IsolatedCall, float] = {}
    left_out = 0.0
    for term, of_shapes in zip(terms.terms, _mean_shares(terms), strict=True):
        role = isolated_role(term.name, term.kind, setting.job.model)
        for shape, share in zip(term.shape.tolist(), of_shapes.tolist(), strict=True):
            call = IsolatedCall(
                kind=term.kind,
                phase=term.phase or Phase.FORWARD,
                role=role or "",
                precision=term.precision or setting.job.precision,
                shape=tuple(shape),
            )
            # A collective of several hosts (shape[2] > 1) cannot run on one machine.
            if role is None or call.group_size > most_ranks or (call.is_collective and shape[2] > 1):
                left_out += share
            else:
                shares[call] = shares.get(call, 0.0) + share
    found = ((call, share, isolated_call_s(call, setting.cluster)) for call, share in shares.items() if share > 0)
    wanted = tuple(Wanted(call=call, share=share, predicted_s=time_s) for call, share, time_s in found if time_s)
    return Calls(wanted=wanted, left_out=left_out)


def calibration_plan(wanted: Sequence[Wanted], seconds: float) -> list[Wanted]:
    """Select the calls to measure in about `seconds`, in order; a longer plan begins with the shorter one."""
    by_role: dict[tuple[OpKind, Phase, str], list[Wanted]] = {}
    for one in wanted:
        by_role.setdefault((one.call.kind, one.call.phase, one.call.role), []).append(one)
    parts = [_Part(some) for some in by_role.values()]
    # Lazy greedy: worths only shrink as calls are chosen, so an outdated entry of the heap is an upper bound.
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
        # Calls chosen since this entry was queued may have informed part of it: queue it again if another is ahead.
        worth = part.worth(at)
        if queue and worth < -queue[0][0]:
            heapq.heappush(queue, (-worth, number, at))
            continue
        part.choose(at)
        plan.append(chosen)
        counts[key] = counts.get(key, 0) + 1
        spent_s += chosen.cost_s
    return plan


class _Part:
    """Calls of one role, and the share of each that the chosen calls inform."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.calls = sorted(wanted, key=lambda one: -one.share)[:MOST_COMPARED]
        kind = self.calls[0].call.kind
        lengths = np.array([feature.length for feature in features_of(kind)])
        # Similarity of every pair of shapes: exp(-d^2/2), d in units of the surrogate's length scales.
        at = feature_values(kind, np.array([one.call.shape for one in self.calls])) / lengths  # [s, f]
        self.alike = np.exp(-0.5 * ((at[:, None] - at[None]) ** 2).sum(axis=2)).astype(np.float32)
        self.share = np.array([one.share for one in self.calls])
        self.cost_s = np.array([one.cost_s for one in self.calls])
        self.told = np.zeros(len(self.calls))

    def worth(self, at: int) -> float:
        """Compute the share of the steps that measuring a call would newly inform, per second."""
        more = np.maximum(self.alike[at] - self.told, 0.0)
        return float(self.share @ more / self.cost_s[at])

    def choose(self, at: int) -> None:
        self.told = np.maximum(self.told, self.alike[at])


def _mean_shares(terms: StepTerms) -> list[FloatArray]:
    """Compute the elasticity of the step time to each shape of each term, averaged over all candidates, each [s]."""
    # Elasticities are kept per bundle of shapes; `shapes` distributes each bundle over its shapes.
    of_bundles = np.asarray(terms.elasticities.mean(axis=0), dtype=np.float64).ravel()
    of_shapes = np.asarray(terms.shares.T @ of_bundles)
    return np.split(of_shapes, np.cumsum([len(term.shape) for term in terms.terms])[:-1])
