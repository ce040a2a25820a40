"""Error terms of a step: parts whose predictions may err independently (FlexParallel, equation 5a).

A term is an operator on one kind of device, or one collective. If each term i takes exp(e_i) times as long as
predicted, the step takes

    1 + sum_i  elasticity_i (exp(e_i) - 1),    elasticity_i = d log(step time) / d log(time of term i)

times as long. This is exact if the step is a sum of times, and a first-order approximation if terms hide behind others.
The elasticities account for overlap and pipeline waits: an operator of a stage that waits for others has elasticity 0.
They are finite differences of `estimate_step`, one for each bundle, which is a group of terms with equal effect on the
step. A bundle's elasticity is divided among its terms in proportion to their times. The rest of the step (host,
optimizer, overhead) is assumed to be predicted correctly.

Two stages that take equally long both get the elasticity of the longest stage, which is thus counted twice. Each
candidate's elasticities are therefore scaled to add up to the elasticity of all terms together. An error that all terms
share is then propagated exactly. With errors that differ by 10% between terms, the sum is within 1% of `estimate_step`
with the same errors for 19 of 20 candidates (see tests). For the others, some terms start or stop being hidden.

Letters: n candidates, r distinct shapes of a term, b rows of a bundle, M draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from costmodels.blocks.operator import LAYER_FAMILIES, Operator, OpKind, Phase
from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import (
    CollectiveTime,
    KernelTime,
    cached_kernel_s,
    collective_s,
    execution_s,
    kernel_s,
)
from costmodels.operators.layer_operators import (
    Collective,
    core_operators,
    recomputed_share,
    step_operators,
    unique_shapes,
    unique_tokens,
)
from costmodels.step.communication import layer_collectives, layer_uses
from costmodels.step.memory.peak import MemoryEstimate
from costmodels.step.pipeline.transfers import transfer_collectives, transfer_executions
from costmodels.step.placement import local_parameters, pipelines, place
from costmodels.step.step_time import estimate_step
from costmodels.step.weights.traffic import weight_collectives, weight_executions
from hardware.arrays import FloatArray, IntArray
from hardware.device import Device
from hardware.distinct import distinct_rows

LOG_STEP = 0.05
"""Change of a bundle's log time in the finite differences: about as large as the errors to be propagated."""

LEAST_ELASTICITY = 1e-5
"""Smaller elasticities count as zero: an error of a factor two would change the step by 1e-5. Negative ones count as
zero too, so that no error can make a step's time negative. They are rare and close to zero: a longer forward pass can
leave the backward pass more to hide behind."""

CHUNK = 4096
"""Number of candidates summed at once, so that their draws stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """Part of the step whose predicted time may err.

    Attributes:
        name: Name of the operator or the collective.
        kind: Kind of operator or collective.
        phase: Forward or backward; None for a collective, which takes as long in both.
        device: Name of the device that the operator runs on; empty for a collective.
        precision: Type of its arithmetic; empty for a collective.
        shape: Distinct shapes [r, d]; see `layer_operators.Operator.shape` and `layer_operators.Collective.shape`.
            If stages send messages of different sizes, the shape is that of the slowest stage.
        time_s: Predicted time of one execution, or one message, of each shape [r].
        row: Row of `shape` that each candidate has [n].
    """

    name: str
    kind: OpKind
    phase: Phase | None
    device: str
    precision: str
    shape: FloatArray
    time_s: FloatArray
    row: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTerms:
    """Error terms of the step of n candidates.

    Attributes:
        terms: Terms of the step.
        shares: Share of each term's shape in the time of each row of a bundle [rows of all bundles, shapes of all
            terms]; bundles and terms are concatenated.
        elasticities: Elasticity of each candidate's step time to its row of each bundle [n, rows of all bundles].
    """

    terms: tuple[Term, ...]
    shares: csr_array
    elasticities: csr_array

    def elasticity(self, index: int) -> FloatArray:
        """Return the elasticity of the step time to one term [n]."""
        starts = np.cumsum([0, *(len(term.shape) for term in self.terms)])
        # an indicator of the term's shapes picks its share of every bundle
        is_of_term = np.zeros(starts[-1], dtype=np.float32)
        is_of_term[starts[index] : starts[index + 1]] = 1.0
        return np.asarray(self.elasticities @ (self.shares @ is_of_term), dtype=np.float64)

    @property
    def covered(self) -> FloatArray:
        """Elasticity of the step time to all terms together [n].

        What is missing to 1 belongs to parts of the step that are not terms. The elasticity may slightly exceed 1 if a
        collective is partly hidden behind such a part.
        """
        return np.asarray(self.elasticities.sum(axis=1), dtype=np.float64)

    def log_change(self, log_errors: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Compute the change of log(step time) [M, n] for log errors of each term and shape, each [M, r]."""
        assert [errors.shape[1] for errors in log_errors] == [len(term.shape) for term in self.terms], (
            "each term has an error for each of its shapes"
        )
        # the sum over terms of FlexParallel's equation 5a, as two sparse products: shapes to bundles, bundles to steps
        of_shapes = np.expm1(np.concatenate([errors.T.astype(np.float32, copy=False) for errors in log_errors]))
        of_bundles = self.shares @ of_shapes
        num_candidates = self.elasticities.shape[0]
        change = np.empty((of_shapes.shape[1], num_candidates), dtype=np.float32)
        for start in range(0, num_candidates, CHUNK):
            change[:, start : start + CHUNK] = (self.elasticities[start : start + CHUNK] @ of_bundles).T
        return np.log1p(change, out=change)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bundle:
    """Terms with equal effect on the step, whose elasticity is computed together.

    Attributes:
        members: Terms of the bundle, each with the predicted time of all its executions in a step [b]. All terms have
            the same `row`, and shapes [b, d] that may still repeat.
        at: Positions of candidates whose step may depend on the bundle.
        is_longer: Predicate that tells whether an operator on a device belongs to the bundle.
        collective_time: Function that gives times of collectives, with those of the bundle lengthened by LOG_STEP.
    """

    members: Sequence[tuple[Term, FloatArray]]
    at: IntArray
    is_longer: Callable[[Operator, Device], bool] = lambda *_: False
    collective_time: CollectiveTime = collective_s


def step_terms(setting: Setting, grid: ConfigGrid, *, memory: MemoryEstimate | None = None) -> StepTerms:
    """Compute the error terms of every candidate's step [n]; see `estimate_step` for the arguments."""
    kernel_time = cached_kernel_s()
    base_s = estimate_step(setting, grid, kernel_time=kernel_time, memory=memory).step_time_s
    bundles = chain(_operator_bundles(setting, grid), _collective_bundles(setting, grid))

    def elasticity_at(
        at: IntArray, is_longer: Callable[[Operator, Device], bool], collective_time: CollectiveTime
    ) -> FloatArray:
        # forward difference of the log step time by the log time of the bundle
        longer = estimate_step(
            setting,
            grid.take(at),
            kernel_time=_lengthen_kernels(kernel_time, is_longer),
            collective_time=collective_time,
            memory=None if memory is None else memory.take(at),
        )
        return np.asarray((longer.step_time_s / base_s[at] - 1.0) / math.expm1(LOG_STEP))

    terms: list[Term] = []
    share, elasticity = _Entries(), _Entries()
    num_shapes, num_rows = 0, 0
    for bundle in filter(lambda bundle: len(bundle.at), bundles):
        of_bundle = elasticity_at(bundle.at, bundle.is_longer, bundle.collective_time)
        matters = of_bundle > LEAST_ELASTICITY
        if not matters.any():
            continue
        at = bundle.at[matters]
        row_of = bundle.members[0][0].row.astype(np.int64)
        elasticity.add(at, num_rows + row_of[at], of_bundle[matters])
        # the bundle's elasticity is divided among its members by their shares of its time
        total_s = np.sum([own_s for _, own_s in bundle.members], axis=0)
        for term, own_s in bundle.members:
            first, row = _find_distinct_shapes(term.shape)
            share.add(num_rows + np.arange(len(row)), num_shapes + row, own_s / total_s)
            shape, time_s = term.shape[first], term.time_s[first]
            terms.append(replace(term, shape=shape, time_s=time_s, row=row[row_of].astype(np.int32)))
            num_shapes += len(first)
        num_rows += len(total_s)
    everywhere = np.arange(len(grid))
    of_all = elasticity_at(everywhere, lambda *_: True, _lengthen_collectives(lambda _: True))
    return StepTerms(
        terms=tuple(terms),
        shares=share.matrix(num_rows, num_shapes),
        elasticities=_scale_rows(of_all, elasticity.matrix(len(grid), num_rows)),
    )


def _scale_rows(total: FloatArray, elasticities: csr_array) -> csr_array:
    """Scale each row of the elasticities to sum to its `total` [n]; empty rows stay empty."""
    # two stages that take equally long both have the elasticity of the longest, which counts them twice
    found = np.asarray(elasticities.sum(axis=1), dtype=np.float64)
    factor = np.divide(total, found, out=np.zeros_like(total), where=found > 0)
    scaled = elasticities.copy()
    scaled.data *= np.repeat(factor, np.diff(scaled.indptr)).astype(np.float32)
    return scaled


def _operator_bundles(setting: Setting, grid: ConfigGrid) -> Iterator[_Bundle]:
    """Yield bundles of operators of one block, phase and device that hide the same communication."""
    job, runtime = setting.job, setting.runtime
    # most operators depend only on the tokens of a device, attention on the whole shape: both have few distinct rows
    shapes, shape_of = unique_shapes(grid)
    tokens, token_of = unique_tokens(job, shapes)
    outside = [operator for operator in step_operators(job, runtime, tokens) if not operator.is_core]
    parts = ((outside, tokens, token_of[shape_of]), (core_operators(job, runtime, shapes), shapes, shape_of))
    everywhere = np.arange(len(grid))
    for device in setting.cluster.devices:
        for operators, rows, row in parts:
            by_effect: dict[tuple[str, Phase | None, bool, bool], list[Operator]] = {}
            for operator in operators:
                by_effect.setdefault(_effect_key(job, runtime, operator), []).append(operator)
            for together in by_effect.values():
                yield _Bundle(
                    members=[_operator_member(job, device, runtime, rows, row, operator) for operator in together],
                    at=everywhere,
                    is_longer=_match_operators({operator.name for operator in together}, device),
                )


def _effect_key(job: TrainingJob, runtime: RuntimeProfile, operator: Operator) -> tuple[str, Phase | None, bool, bool]:
    """Return a key that is equal for operators with equal effect on the step.

    The key holds block and phase, and whether tp or ep traffic hides behind the operator. Embedding and head have one
    key for both phases, since they are a small part of the step.
    """
    if operator.family not in LAYER_FAMILIES:
        return operator.block, None, False, False
    is_product = operator.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL) and not operator.is_core
    # communication hides behind matrix products only, and in some runtimes only behind those of weight gradients
    hides_tensor = (is_product and runtime.overlaps_tensor) or (
        operator.name.endswith("weight_gradient") and runtime.overlaps_tensor_gradients and not runtime.overlaps_tensor
    )
    hides_experts = is_product and runtime.overlaps_experts and job.model.is_moe
    return operator.block, operator.phase, hides_tensor, hides_experts


def _operator_member(
    job: TrainingJob, device: Device, runtime: RuntimeProfile, rows: ConfigGrid, row: IntArray, operator: Operator
) -> tuple[Term, FloatArray]:
    seconds = execution_s(operator, device, job, runtime, rows)
    term = Term(
        name=operator.name,
        kind=operator.kind,
        phase=operator.phase,
        device=device.name,
        precision=operator.precision,
        shape=operator.shape,
        time_s=kernel_s(operator, device, job, runtime),
        row=row.astype(np.int32),
    )
    return term, seconds * (1.0 + recomputed_share(job, runtime, operator, rows))


def _match_operators(names: set[str], device: Device) -> Callable[[Operator, Device], bool]:
    return lambda operator, on: operator.name in names and on == device


def _lengthen_kernels(kernel_time: KernelTime, is_meant: Callable[[Operator, Device], bool]) -> KernelTime:
    """Return `kernel_time` with the operators that `is_meant` selects lengthened by LOG_STEP."""

    def longer_s(operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:
        seconds = kernel_time(operator, device, job, runtime)
        return seconds * math.exp(LOG_STEP) if is_meant(operator, device) else seconds

    return longer_s


def _collective_bundles(setting: Setting, grid: ConfigGrid) -> Iterator[_Bundle]:
    """Yield a bundle for each collective, with the candidates that use it."""
    job, cluster, runtime = setting.job, setting.cluster, setting.runtime
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    shapes, shape_of = unique_shapes(grid)
    uses = layer_uses(job, runtime, shapes)
    used = {use.site: np.zeros(len(shapes), dtype=np.bool_) for use in uses}
    for use in uses:
        used[use.site] |= use.count > 0
    used["cp.start"] = used["cp.send_recv"]
    for name, collective in layer_collectives(job, runtime, shapes, place(cluster, shapes)).items():
        yield _single_bundle([collective], shape_of, used[name][shape_of])

    # weight traffic depends on each pipeline's parameters, so its rows come pipeline by pipeline
    layouts = pipelines(setting, grid)
    groups = place(cluster, layouts.weights)
    by_name: dict[str, list[Collective]] = {}
    for pipeline in layouts.each:
        local = local_parameters(job, pipeline.weights, pipeline.stages.pieces)
        here = groups.take(pipeline.weights_at)
        for name, collective in weight_collectives(job, runtime, pipeline.weights, here, local).items():
            by_name.setdefault(name, []).append(collective)
    used = {name: np.zeros(len(grid), dtype=np.bool_) for name in by_name}
    for site, _, count in weight_executions(runtime, grid, num_micro_batches):
        for name in [name for name in (site, f"expert_{site}") if name in by_name]:
            used[name] |= count > 0
    # position of each row of weights in the concatenation of all pipelines' rows
    place_of = np.empty(len(layouts.weights), dtype=np.int64)
    place_of[np.concatenate([pipeline.weights_at for pipeline in layouts.each])] = np.arange(len(layouts.weights))
    for name, collectives in by_name.items():
        yield _single_bundle(collectives, place_of[layouts.weights_of], used[name])

    used = {"pp.start": (grid.vpp > 1) & runtime.overlaps_p2p}
    for name, _, count in transfer_executions(runtime, grid, num_micro_batches):
        used[name] = count > 0
    found = transfer_collectives(job, runtime, grid, groups.take(layouts.weights_of))
    for name, collective in found.items():
        yield _single_bundle([collective], np.arange(len(grid)), used[name])


def _single_bundle(collectives: Sequence[Collective], row: IntArray, is_used: NDArray[np.bool_]) -> _Bundle:
    """Return a bundle of one collective, for candidates whose groups have more than one rank.

    The rows of several `Collective` objects are concatenated. Stages send at the same time, so only the slowest stage
    of each row counts.
    """
    shapes, times_s, totals_s = [], [], []
    for collective in collectives:
        total_s = np.atleast_2d(collective_s(collective))  # [c, b]
        stage = total_s.argmax(axis=0), np.arange(total_s.shape[1])
        shapes.append(np.broadcast_to(collective.shape, (*total_s.shape, 3))[stage])
        times_s.append((total_s / collective.messages)[stage])
        totals_s.append(total_s[stage])
    name = collectives[0].name
    term = Term(
        name=name,
        kind=collectives[0].kind,
        phase=None,
        device="",
        precision="",
        shape=np.concatenate(shapes),
        time_s=np.concatenate(times_s),
        row=row.astype(np.int32),
    )
    takes_time = np.concatenate(totals_s) > 0
    return _Bundle(
        members=[(term, np.ones(len(takes_time)))],  # the only member, so its share of the time is 1
        at=np.flatnonzero(is_used & takes_time[row]),
        collective_time=_lengthen_collectives(lambda collective: collective.name == name),
    )


def _lengthen_collectives(is_meant: Callable[[Collective], bool]) -> CollectiveTime:
    """Return `collective_s` with the collectives that `is_meant` selects lengthened by LOG_STEP."""

    def collective_time(collective: Collective) -> FloatArray:
        seconds = collective_s(collective)
        return seconds * math.exp(LOG_STEP) if is_meant(collective) else seconds

    return collective_time


def _find_distinct_shapes(shape: FloatArray) -> tuple[IntArray, IntArray]:
    """Return the first position of each distinct row of `shape` [b, d], and each row's position among them [b]."""
    return distinct_rows([np.unique(column, return_inverse=True)[1].ravel() for column in shape.T])


class _Entries:
    """Builder of a sparse matrix from pieces in coordinate form."""

    def __init__(self) -> None:
        self.pieces: list[tuple[IntArray, IntArray, FloatArray]] = []

    def add(self, row: IntArray, column: IntArray, value: FloatArray) -> None:
        self.pieces.append((row.astype(np.int32), column.astype(np.int32), value.astype(np.float32)))

    def matrix(self, rows: int, columns: int) -> csr_array:
        if not self.pieces:
            return csr_array((rows, columns), dtype=np.float32)
        row, column, value = (np.concatenate(pieces) for pieces in zip(*self.pieces, strict=True))
        return csr_array((value, (row, column)), shape=(rows, columns))
