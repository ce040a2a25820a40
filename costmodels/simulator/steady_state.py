"""Steady state of a pipeline: whether a simulated step repeats itself exactly, and how long one repetition takes.

The simulation is deterministic. What follows a moment depends on the tasks at work, on what is left of each, and on the
tasks that have ended. If a later moment differs from it by the numbers of the micro-batches only, what happens between
the two happens again, for as long as the order of the passes goes on alike. Under 1F1B it does until the first stage
has run its last forward pass, because no stage is ahead of the first one in forward passes. So a step of more
micro-batches takes a whole number of repetitions longer, and is the same before and after them.

Letters: l kinds of tasks that are alike but for their micro-batch, m micro-batches, k kinds of replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.simulator.events import Timeline
from costmodels.simulator.step_tasks import Label, Role, StepTasks
from costmodels.step.pipeline.passes import Kind
from hardware.arrays import FloatArray, IntArray

_ROUNDING = 1e-11
"""Largest difference between equal times, as a share of one repetition."""
_AMPLIFIED = 1e-7
"""Largest difference that may have grown from rounding, as a share of one repetition. Transfers that share links can
amplify differences from one to the next; such a pipeline repeats itself roughly, but not exactly."""


def repetition_s(tasks: StepTasks, timeline: Timeline, size: int) -> float | None:
    """Return the time that `size` further micro-batches add to a step [s]; None if the step does not repeat itself.

    Args:
        tasks: Tasks of a step of one kind of replicas under 1F1B.
        timeline: Times at which they ran.
        size: Number of micro-batches after which the order of passes is the same again.
    """
    times = _times_of(tasks, timeline)
    # The two moments: the end of the first stage's last forward pass, and that of the one `size` micro-batches before.
    first_s, second_s = times.end_s[times.last_forward[0], [-1 - size, -1]].tolist()
    lasts_s = second_s - first_s
    near_s, amplified_s = _ROUNDING * lasts_s, _AMPLIFIED * lasts_s
    if not 0 < lasts_s < np.inf:
        return None
    # What is left of a task at a moment follows from what ran beside it since its begin.
    at_work = (times.start_s < first_s - near_s) & (times.end_s > first_s + near_s)
    since_s = float(times.start_s[at_work].min(initial=first_s))
    if ((times.other_start_s < second_s - near_s) & (times.other_end_s > since_s + near_s)).any():
        return None
    # Each task that runs before the first moment must have a counterpart before the second one.
    starts_s = times.start_s[:, :-size], times.start_s[:, size:] - lasts_s
    ends_s = times.end_s[:, :-size], times.end_s[:, size:] - lasts_s
    counts = (np.minimum(*starts_s) < first_s - near_s) & (np.maximum(*ends_s) > since_s + near_s)
    lately = (ends_s[0] > first_s - lasts_s) & (ends_s[0] < first_s)
    differ_s = np.abs(ends_s[0][lately] - ends_s[1][lately])
    is_alike = (
        not ((differ_s > near_s) & (differ_s < amplified_s)).any()
        and (np.abs(starts_s[0][counts] - starts_s[1][counts]) <= near_s).all()
        and (np.abs(np.minimum(ends_s[0], first_s) - np.minimum(ends_s[1], first_s))[counts] <= near_s).all()
        and (times.route[:, :-size] == times.route[:, size:])[counts].all()
        # Micro-batches without a counterpart have ended, or have not begun.
        and (times.end_s[:, :size] - lasts_s <= since_s + near_s).all()
        and (times.start_s[:, -size:] >= first_s - near_s).all()
    )
    return lasts_s if is_alike else None


def last_round_s(tasks: StepTasks, timeline: Timeline, size: int) -> float:
    """Return the time between the first stage's last forward pass and that of `size` micro-batches before [s].

    Of several kinds of replicas, it is that of the slowest, which the others wait for.

    Args:
        tasks: Tasks of a step in which all kinds of replicas have the same number of micro-batches.
        timeline: Times at which they ran.
        size: Number of micro-batches after which the order of passes is the same again.
    """
    times = _times_of(tasks, timeline)
    ends_s = times.end_s[times.last_forward]
    return float((ends_s[:, -1] - ends_s[:, -1 - size]).max())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Times:
    """Times of a step's tasks by micro-batch, and of those that run once.

    Attributes:
        start_s: Begin of each task that every micro-batch has [s], [l, m]; -inf, or late inf, where one lacks it.
        end_s: End of each of these tasks [s], [l, m].
        route: Number of the route that each of these tasks took [l, m].
        last_forward: Row of the first stage's forward passes through its last chunk, of each kind of replicas [k].
        other_start_s: Begin of each other task: of traffic of weights, and of passes that are cut because of it [s].
        other_end_s: End of each other task [s].
    """

    start_s: FloatArray
    end_s: FloatArray
    route: IntArray
    last_forward: IntArray
    other_start_s: FloatArray
    other_end_s: FloatArray


def _times_of(tasks: StepTasks, timeline: Timeline) -> _Times:
    rows: dict[Label, int] = {}
    row_of: dict[int, int] = {}
    # Like tasks share one object, so that few labels are compared.
    for key, label in {id(label): label for label in tasks.like}.items():
        is_whole_pass = label.role in (Role.PASS, Role.HOP) and label.piece < 0
        row_of[key] = rows.setdefault(label._replace(micro_batch=-1), len(rows)) if is_whole_pass else -1
    row, micro_batch = np.array([row_of[id(label)] for label in tasks.like]), np.array(tasks.micro_batch)
    repeated = row >= 0
    at = row[repeated], micro_batch[repeated]
    num_micro_batches = int(micro_batch.max()) + 1

    def table(column: FloatArray) -> FloatArray:
        # Only the first and the last micro-batch lack tasks that others have.
        found = np.full((len(rows), num_micro_batches), np.inf)
        found[:, : num_micro_batches // 2] = -np.inf
        found[at] = column[repeated]
        return found

    route = np.zeros((len(rows), num_micro_batches), dtype=np.int64)
    route[at] = timeline.route[repeated]
    config = tasks.config
    return _Times(
        start_s=table(timeline.start_s),
        end_s=table(timeline.end_s),
        route=route,
        last_forward=np.array(
            [
                rows[Label(Role.PASS, kind, 0, Kind.FORWARD, virtual=(config.vpp - 1) * config.pp)]
                for kind in range(tasks.num_kinds)
            ]
        ),
        other_start_s=timeline.start_s[~repeated],
        other_end_s=timeline.end_s[~repeated],
    )
