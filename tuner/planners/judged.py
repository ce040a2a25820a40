"""Candidates of a planner between which a compiler decides, and what it makes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.graph import Graph
from costmodels.sharding.overlap import timeline_of
from costmodels.sharding.plan import Plan, cost_of
from hardware.device import Device, find_device
from hardware.io.errors import ConfigError
from tuner.planners.planning import Planned, PlannerOptions, plan_graph
from tuner.planners.sharding.manumatic import PinnedPlan
from tuner.planners.toast.by_hand import data_parallel

KEY = "judge"
"""Key of the judge, as error messages name it."""
ALIKE = 0.005
"""Share by which schedules may differ that count as equally fast (assumed)."""
DATA_PARALLEL = "data parallelism, propagated"
"""Name of the candidate that cuts the batch, and leaves all else to the compiler's propagation."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A plan that a compiler may judge.

    Attributes:
        name: Name of the planner, or of what the compiler is left to do.
        planned: Plan with our price. Where the compiler propagates, only its layouts of arguments and outputs hold.
        is_propagated: Whether the compiler lays out everything between the arguments and the outputs.
    """

    name: str
    planned: Planned
    is_propagated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a compiler makes of a candidate.

    Attributes:
        name: Name of the candidate.
        planned_s: Our price of a step [s].
        planned_bytes: Our peak memory of a device [bytes].
        scheduled_s: Time of the compiler's schedule, replayed [s]; None where it refuses the candidate.
        compute_s: Time of the schedule's kernels [s]; None likewise.
        comm_s: Time of its collectives [s]; None likewise.
        compiled_bytes: Memory of the compiled program: arguments, outputs and temporaries [bytes]; None likewise.
        fits: Whether this is within the limit, or the memory of a device.
        compile_s: Time that the compiler took [s].
        refusal: What the compiler says against the candidate; None if it compiles.
        is_propagated: Whether the compiler lays out everything between the arguments and the outputs.
        is_answer: Whether the candidate is the answer.
    """

    name: str
    planned_s: float
    planned_bytes: float
    scheduled_s: float | None = None
    compute_s: float | None = None
    comm_s: float | None = None
    compiled_bytes: float | None = None
    fits: bool = False
    compile_s: float = 0.0
    refusal: str | None = None
    is_propagated: bool = False
    is_answer: bool = False


def find_judge(name: str) -> Device:
    """Return the device of the catalog for which a judge of this name compiles.

    Raises:
        ConfigError: No device has this name.
    """
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(error.rule, key=KEY, value=name, nearest=error.nearest) from None


def candidates_of(
    found: Planned, graph: Graph, mesh: DeviceMesh, options: PlannerOptions, *, may_propagate: bool
) -> list[Candidate]:
    """Return the planner's plan and others that a compiler may prefer; those that are alike only once.

    Args:
        found: What the planner has found.
        graph: Graph of the step.
        mesh: Mesh that it was planned for.
        options: Options with which it was planned.
        may_propagate: Whether the compiler may lay out what the user has not pinned.
    """

    def priced(plan: Plan) -> Planned:
        cost = cost_of(plan)
        one = PinnedPlan(plan=plan, cost=cost, is_optimum=False, reports=())
        timeline = None if found.timeline is None else timeline_of(plan, cost)
        return replace(found, found=one, timeline=timeline, perturbed=None, bound_s=None, steps=(), unhidden=None)

    answers = [Candidate(name=options.planner, planned=found)]
    if found.unhidden is not None:
        answers.append(Candidate(name=f"{options.planner} without overlap", planned=priced(found.unhidden.plan)))
    if options.planner != "recursive":
        alone = replace(options, planner="recursive", memory_bytes=None, diagnose=False, prove_s=None, overlap=False)
        answers.append(Candidate(name="recursive", planned=priced(plan_graph(graph, mesh, alone).plan)))
    if may_propagate:
        answers.append(Candidate(name=f"arguments of {options.planner}, propagated", planned=found, is_propagated=True))
        plain = priced(data_parallel(graph, found.plan.mesh))
        answers.append(Candidate(name=DATA_PARALLEL, planned=plain, is_propagated=True))
    alike: dict[tuple[bool, bytes], Candidate] = {}
    for each in answers:
        alike.setdefault((each.is_propagated, each.planned.plan.served.tobytes()), each)
    return list(alike.values())


def leaves_layouts(verdicts: Sequence[Verdict]) -> bool:
    """Return whether the answer leaves the layouts inside the step to the compiler."""
    return any(each.is_answer and each.is_propagated for each in verdicts)


def choose(verdicts: Sequence[Verdict]) -> tuple[int, tuple[Verdict, ...]]:
    """Return the number of the answer and the verdicts, the answer's marked.

    The answer has the fastest schedule of those that fit; of schedules that are as fast, the first. Where none fits, it
    needs the least memory. At least one must have been compiled.
    """
    fitting = [(number, one.scheduled_s) for number, one in enumerate(verdicts) if one.fits]
    schedules = {number: scheduled_s for number, scheduled_s in fitting if scheduled_s is not None}
    if schedules:
        limit_s = min(schedules.values()) * (1 + ALIKE)
        best = next(number for number, scheduled_s in schedules.items() if scheduled_s <= limit_s)
    else:
        memory = {number: one.compiled_bytes for number, one in enumerate(verdicts) if one.compiled_bytes is not None}
        assert memory, "no candidate was compiled"
        best = min(memory, key=lambda number: memory[number])
    return best, tuple(replace(each, is_answer=number == best) for number, each in enumerate(verdicts))
