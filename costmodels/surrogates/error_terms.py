"""The step as a sum of terms that may err on their own, for joint draws over every candidate (FlexParallel eq. 5a).

A term is an operator on one kind of device, or the call of a collective. If the terms take exp(e_i) times as long as
predicted, the step takes

    1 + sum_i  elasticity_i (exp(e_i) - 1),    elasticity_i = d log(step time) / d log(time of term i)

times as long: exactly, where the step is a sum of times; to first order, where terms hide behind others. What overlaps
and what the pipeline hides is in the elasticities: an operator of a stage that waits has none. They are differences of
`estimate_step`, one for each bundle of terms that lengthen the step alike; inside a bundle each term has its share of
the bundle's time. Where two stages take equally long, both have the elasticity of the longest; so a candidate's
elasticities are scaled to that of all terms together, and an error that all terms share is exact. What is no term (the
host, the optimizer, the overhead) is taken to be right.

With errors of 10% from term to term the sum is within 1% of `estimate_step` with the same errors for 19 of 20
candidates (see tests); of the others some terms come out of hiding, or into it.

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

from costmodels.job.parallel_config import ConfigGrid
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.operators.kernels import (
    CollectiveTime,
    KernelTime,
    collective_s,
    execution_s,
    kernel_s,
    remembered_kernel_s,
)
from costmodels.operators.layer_operators import (
    Block,
    Collective,
    Operator,
    OpKind,
    Phase,
    attention_core,
    is_core,
    is_recomputed,
    step_operators,
    unique_shapes,
    unique_tokens,
)
from costmodels.step.communication import layer_collectives, layer_uses
from costmodels.step.memory import MemoryEstimate
from costmodels.step.placement import local_parameters, pipelines, place
from costmodels.step.step_time import estimate_step
from costmodels.step.transfers import transfer_collectives, transfer_executions
from costmodels.step.weight_traffic import weight_collectives, weight_executions
from hardware.arrays import FloatArray, IntArray
from hardware.device import Device
from hardware.distinct import distinct_rows

LOG_STEP = 0.05
"""Change of a bundle's log time over which elasticities are taken: about the errors that they are used for."""

LEAST_ELASTICITY = 1e-5
"""Smaller ones are taken as none: an error of a factor two would move the step by 1e-5. So are negative ones, which are
rare and hardly below zero (a longer forward pass can leave the backward pass more to hide behind): then no errors,
however large, make a step's time negative."""

CHUNK = 4096
"""Candidates that are summed at once, so that the draws of some rows stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Term:
    """What takes a part of the step, and may be mispriced.

    Attributes:
        name: Name of the operator or the collective.
        kind: Its kind.
        phase: Forward or backward; None for a collective, which takes as long in both.
        device: Name of the device that the operator runs on; empty for a collective.
        precision: Type of its arithmetic; empty for a collective.
        shape: Its distinct shapes [r, d]; see `operators.Operator.shape` and `operators.Collective.shape`. Where stages
            send messages of unlike size, that of the stage that takes longest.
        time_s: Predicted time of one execution, or one message, of each shape [r].
        row: The shape that each candidate has [n].
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
    """The terms of a step of n candidates.

    Attributes:
        terms: The terms.
        shares: Share that each shape of all terms, one after the other, has of the time of each bundle's rows.
        elasticities: Elasticity of each candidate's step time to its row of each bundle.
    """

    terms: tuple[Term, ...]
    shares: csr_array
    elasticities: csr_array

    def elasticity(self, index: int) -> FloatArray:
        """Elasticity of the step time to one term [n]."""
        starts = np.cumsum([0, *(len(term.shape) for term in self.terms)])
        is_of_term = np.zeros(starts[-1], dtype=np.float32)
        is_of_term[starts[index] : starts[index + 1]] = 1.0
        return np.asarray(self.elasticities @ (self.shares @ is_of_term), dtype=np.float64)

    @property
    def covered(self) -> FloatArray:
        """Elasticity of the step time to all terms together [n]; what is left to 1 is no term.

        It may be a little more than 1 where a collective is partly hidden behind what is no term.
        """
        return np.asarray(self.elasticities.sum(axis=1), dtype=np.float64)

    def log_change(self, log_errors: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """Change of log(step time) [M, n] if each term takes exp(`log_errors`) times as long, for each shape [M, r]."""
        assert [errors.shape[1] for errors in log_errors] == [len(term.shape) for term in self.terms], (
            "each term has an error for each of its shapes"
        )
        of_shapes = np.expm1(np.concatenate([errors.T.astype(np.float32, copy=False) for errors in log_errors]))
        of_bundles = self.shares @ of_shapes
        num_candidates = self.elasticities.shape[0]
        change = np.empty((of_shapes.shape[1], num_candidates), dtype=np.float32)
        for start in range(0, num_candidates, CHUNK):
            change[:, start : start + CHUNK] = (self.elasticities[start : start + CHUNK] @ of_bundles).T
        return np.log1p(change, out=change)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Member:
    """A term as one bundle sees it: its shape, the time of one execution, and all its time, for every row [b]."""

    name: str
    kind: OpKind
    phase: Phase | None
    device: str
    precision: str
    shape: FloatArray
    time_s: FloatArray
    total_s: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bundle:
    """Terms that lengthen the step alike.

    Attributes:
        members: The terms.
        row: The bundle's row of each candidate [n].
        at: Where the candidates stand that it may matter to.
        is_longer: Whether an operator on a device is one of the bundle, and takes a little longer.
        collective_time: Times of collectives, those of the bundle a little longer.
    """

    members: Sequence[_Member]
    row: IntArray
    at: IntArray
    is_longer: Callable[[Operator, Device], bool] = lambda *_: False
    collective_time: CollectiveTime = collective_s


def step_terms(
    setting: Setting,
    grid: ConfigGrid,
    *,
    memory: MemoryEstimate | None = None,
) -> StepTerms:
    """The terms of the step of every candidate [n]; see `estimate_step` for the arguments."""
    kernel_time = remembered_kernel_s()
    base_s = estimate_step(setting, grid, kernel_time=kernel_time, memory=memory).step_time_s
    bundles = chain(
        _operator_bundles(setting, grid),
        _collective_bundles(setting, grid),
    )

    def elasticity_at(
        at: IntArray, is_longer: Callable[[Operator, Device], bool], collective_time: CollectiveTime
    ) -> FloatArray:
        longer = estimate_step(
            setting,
            grid.take(at),
            kernel_time=_longer_kernels(kernel_time, is_longer),
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
        elasticity.add(at, num_rows + bundle.row[at], of_bundle[matters])
        total_s = np.sum([member.total_s for member in bundle.members], axis=0)
        for member in bundle.members:
            first, row = _distinct_shapes(member.shape)
            share.add(num_rows + np.arange(len(row)), num_shapes + row, member.total_s / total_s)
            terms.append(_term(member, first, row[bundle.row]))
            num_shapes += len(first)
        num_rows += len(total_s)
    everywhere = np.arange(len(grid))
    of_all = elasticity_at(everywhere, lambda *_: True, _longer_collectives(lambda _: True))
    return StepTerms(
        terms=tuple(terms),
        shares=share.matrix(num_rows, num_shapes),
        elasticities=_summing_to(of_all, elasticity.matrix(len(grid), num_rows)),
    )


def _term(member: _Member, first: IntArray, row: IntArray) -> Term:
    """The term of a member whose distinct shapes stand at `first` [r], of which the candidates have `row` [n]."""
    return Term(
        name=member.name,
        kind=member.kind,
        phase=member.phase,
        device=member.device,
        precision=member.precision,
        shape=member.shape[first],
        time_s=member.time_s[first],
        row=row.astype(np.int32),
    )


def _summing_to(total: FloatArray, elasticities: csr_array) -> csr_array:
    """The elasticities, each row scaled to its `total` [n]; rows without any stay so."""
    found = np.asarray(elasticities.sum(axis=1), dtype=np.float64)
    factor = np.divide(total, found, out=np.zeros_like(total), where=found > 0)
    scaled = elasticities.copy()
    scaled.data *= np.repeat(factor, np.diff(scaled.indptr)).astype(np.float32)
    return scaled


def _operator_bundles(setting: Setting, grid: ConfigGrid) -> Iterator[_Bundle]:
    """Operators of one block, phase and device beside which the same communication hides."""
    job, runtime = setting.job, setting.runtime
    shapes, shape_of = unique_shapes(grid)
    tokens, token_of = unique_tokens(job, shapes)
    outside = [operator for operator in step_operators(job, runtime, tokens) if not is_core(operator)]
    parts = (
        (outside, tokens, token_of[shape_of]),
        (attention_core(job, runtime, shapes), shapes, shape_of),
    )
    everywhere = np.arange(len(grid))
    for device in setting.cluster.devices:
        for operators, rows, row in parts:
            by_effect: dict[tuple[Block, Phase | None, bool, bool], list[Operator]] = {}
            for operator in operators:
                by_effect.setdefault(_effect(job, runtime, operator), []).append(operator)
            for together in by_effect.values():
                yield _Bundle(
                    members=[_operator_member(job, device, runtime, rows, operator) for operator in together],
                    row=row,
                    at=everywhere,
                    is_longer=_is_one_of({operator.name for operator in together}, device),
                )


def _effect(job: TrainingJob, runtime: RuntimeProfile, operator: Operator) -> tuple[Block, Phase | None, bool, bool]:
    """Operators with the same answer lengthen the step alike: block, phase, and whether tp or ep traffic hides there.

    The embedding and the head are one for both phases: they are a small part of the step, and it matters little which.
    """
    if operator.block in (Block.EMBEDDING, Block.HEAD):
        return operator.block, None, False, False
    is_product = operator.kind in (OpKind.MATMUL, OpKind.GROUPED_MATMUL) and not is_core(operator)
    hides_tensor = (is_product and runtime.overlaps_tensor) or (
        operator.name.endswith("weight_gradient") and runtime.overlaps_tensor_gradients and not runtime.overlaps_tensor
    )
    hides_experts = is_product and runtime.overlaps_experts and job.model.is_moe
    return operator.block, operator.phase, hides_tensor, hides_experts


def _operator_member(
    job: TrainingJob, device: Device, runtime: RuntimeProfile, rows: ConfigGrid, operator: Operator
) -> _Member:
    seconds = execution_s(operator, device, job, runtime, rows)
    return _Member(
        name=operator.name,
        kind=operator.kind,
        phase=operator.phase,
        device=device.name,
        precision=operator.precision,
        shape=operator.shape,
        time_s=kernel_s(operator, device, job, runtime),
        total_s=seconds * (1.0 + is_recomputed(job, operator, rows)),
    )


def _is_one_of(names: set[str], device: Device) -> Callable[[Operator, Device], bool]:
    return lambda operator, on: operator.name in names and on == device


def _longer_kernels(kernel_time: KernelTime, is_meant: Callable[[Operator, Device], bool]) -> KernelTime:
    """Times of operators, some of them a little longer."""

    def longer_s(operator: Operator, device: Device, job: TrainingJob, runtime: RuntimeProfile) -> FloatArray:
        seconds = kernel_time(operator, device, job, runtime)
        return seconds * math.exp(LOG_STEP) if is_meant(operator, device) else seconds

    return longer_s


def _collective_bundles(setting: Setting, grid: ConfigGrid) -> Iterator[_Bundle]:
    """Each collective by itself, for the candidates that use it."""
    job, runtime = setting.job, setting.runtime
    num_micro_batches = job.global_batch_size // (grid.dp * grid.mbs)
    shapes, shape_of = unique_shapes(grid)
    uses = layer_uses(job, runtime, shapes)
    used = {use.site: np.zeros(len(shapes), dtype=np.bool_) for use in uses}
    for use in uses:
        used[use.site] |= use.count > 0
    used["cp.start"] = used["cp.send_recv"]
    for name, collective in layer_collectives(job, runtime, shapes, place(setting.cluster, shapes)).items():
        yield _of_one(_collective_member([collective]), shape_of, used[name][shape_of])

    layouts = pipelines(setting, grid)
    groups = place(setting.cluster, layouts.weights)
    by_name: dict[str, list[Collective]] = {}
    for pipeline in layouts.each:
        local = local_parameters(job, pipeline.weights, pipeline.stages.blocks)
        here = groups.take(pipeline.weights_at)
        for name, collective in weight_collectives(job, runtime, pipeline.weights, here, local).items():
            by_name.setdefault(name, []).append(collective)
    used = {name: np.zeros(len(grid), dtype=np.bool_) for name in by_name}
    for site, _, count in weight_executions(runtime, grid, num_micro_batches):
        for name in [name for name in (site, f"expert_{site}") if name in by_name]:
            used[name] |= count > 0
    # the rows of all pipelines' weights, as they stand one after the other
    place_of = np.empty(len(layouts.weights), dtype=np.int64)
    place_of[np.concatenate([pipeline.weights_at for pipeline in layouts.each])] = np.arange(len(layouts.weights))
    for name, collectives in by_name.items():
        yield _of_one(_collective_member(collectives), place_of[layouts.weights_of], used[name])

    used = {"pp.start": (grid.vpp > 1) & runtime.overlaps_p2p}
    for name, _, count in transfer_executions(runtime, grid, num_micro_batches):
        used[name] = count > 0
    found = transfer_collectives(job, runtime, grid, groups.take(layouts.weights_of))
    for name, collective in found.items():
        yield _of_one(_collective_member([collective]), np.arange(len(grid)), used[name])


def _collective_member(collectives: Sequence[Collective]) -> _Member:
    """A collective whose rows stand in several ones, one after the other; of stages the one that takes longest."""
    shapes, times_s, totals_s = [], [], []
    for collective in collectives:
        total_s = np.atleast_2d(collective_s(collective))  # [c, b]
        stage = total_s.argmax(axis=0), np.arange(total_s.shape[1])
        shapes.append(np.broadcast_to(collective.shape, (*total_s.shape, 3))[stage])
        times_s.append((total_s / collective.messages)[stage])
        totals_s.append(total_s[stage])
    return _Member(
        name=collectives[0].name,
        kind=collectives[0].kind,
        phase=None,
        device="",
        precision="",
        shape=np.concatenate(shapes),
        time_s=np.concatenate(times_s),
        total_s=np.concatenate(totals_s),
    )


def _of_one(member: _Member, row: IntArray, is_used: NDArray[np.bool_]) -> _Bundle:
    """A bundle of one collective; groups of one rank take no time."""
    takes_time = member.total_s > 0
    return _Bundle(
        members=[replace(member, total_s=np.ones(len(takes_time)))],  # its share of its own time
        row=row,
        at=np.flatnonzero(is_used & takes_time[row]),
        collective_time=_longer_collectives(lambda collective: collective.name == member.name),
    )


def _longer_collectives(is_meant: Callable[[Collective], bool]) -> CollectiveTime:
    """Times of collectives, some of them a little longer."""

    def collective_time(collective: Collective) -> FloatArray:
        seconds = collective_s(collective)
        return seconds * math.exp(LOG_STEP) if is_meant(collective) else seconds

    return collective_time


def _distinct_shapes(shape: FloatArray) -> tuple[IntArray, IntArray]:
    """Where each distinct row of `shape` [b, d] stands first [r], and which of these every row is [b]."""
    return distinct_rows([np.unique(column, return_inverse=True)[1].ravel() for column in shape.T])


class _Entries:
    """Entries of a sparse matrix, collected piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[tuple[IntArray, IntArray, FloatArray]] = []

    def add(self, row: IntArray, column: IntArray, value: FloatArray) -> None:
        self.pieces.append((row.astype(np.int32), column.astype(np.int32), value.astype(np.float32)))

    def matrix(self, rows: int, columns: int) -> csr_array:
        if not self.pieces:
            return csr_array((rows, columns), dtype=np.float32)
        row, column, value = (np.concatenate(pieces) for pieces in zip(*self.pieces, strict=True))
        return csr_array((value, (row, column)), shape=(rows, columns))
