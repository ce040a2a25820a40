"""Reference with which a study compares its best configuration: the current configuration, or else a baseline.

The baseline is chosen by the rule in tuner/forecast/baseline.py. Like the current configuration, it is a candidate and
the first trial. A study stores it when it is first opened, so that the comparison never changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from costmodels.job.parallel_config import ParallelConfig, Value
from tuner.forecast.baseline import baseline_position
from tuner.forecast.prepared import Prepared
from tuner.subject.problem import Problem

if TYPE_CHECKING:  # Optuna takes long to load, and a ranking needs none of it
    from optuna import Study

    from tuner.storage.record import TrialRecord

Role = Literal["current", "baseline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Configuration to compare with.

    Attributes:
        role: Role of the configuration: in use today (current), or chosen by the rule (baseline).
        config: Configuration of the reference.
        values: Value of each dimension of a candidate.
    """

    role: Role
    config: ParallelConfig
    values: Mapping[str, Value]

    @property
    def in_words(self) -> str:
        """Name of the reference in a sentence."""
        return "the current configuration" if self.role == "current" else "the baseline"

    def step_time_s(self, records: Sequence[TrialRecord]) -> float | None:
        """Return its measured step time [s]; None without one."""
        from tuner.storage.record import step_time_of  # noqa: PLC0415 # it loads Optuna

        return step_time_of(records, self.values)


def reference_among(prepared: Prepared) -> Reference | None:
    """Return the reference of a new study; None without a current configuration if no baseline is wanted or fits."""
    problem = prepared.problem
    if problem.current is not None:
        return _make_reference(problem, "current", problem.current)
    if not prepared.request.search.baseline:
        return None
    space = prepared.candidates.space
    if not len(space.grid):
        return None
    position = baseline_position(
        space.grid,
        space.memory.fits(problem.options.memory_headroom),
        devices_per_domain=problem.cluster.devices_per_domain,
        defaults=problem.subject.defaults,
    )
    return None if position is None else _make_reference(problem, "baseline", space.grid.config(position))


def reference_of(problem: Problem, study: Study) -> Reference | None:
    """Return the reference of a stored study."""
    from tuner.storage.record import BASELINE  # noqa: PLC0415 # it loads Optuna

    if problem.current is not None:
        return _make_reference(problem, "current", problem.current)
    stored = study.user_attrs.get(BASELINE)
    return None if stored is None else _make_reference(problem, "baseline", problem.config_of(stored))


def keep_baseline(study: Study, reference: Reference | None) -> None:
    """Store the baseline in its study, if that has no trials yet."""
    from tuner.storage.record import BASELINE  # noqa: PLC0415 # it loads Optuna

    if reference is None or reference.role != "baseline" or BASELINE in study.user_attrs:
        return
    if not study.get_trials(deepcopy=False):
        study.set_user_attr(BASELINE, dict(reference.values))


def _make_reference(problem: Problem, role: Role, chosen: ParallelConfig) -> Reference:
    complete = problem.with_knobs(chosen)
    return Reference(role=role, config=complete, values=complete.values(problem.dimensions))
