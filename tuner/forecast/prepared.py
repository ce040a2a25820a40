"""Study that is ready to be predicted, ranked and run: its request, with the sharding plans of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from costmodels.job.proxy_job import Reduction
from hardware.io.errors import ConfigError
from trials.backend import AbstractBackend
from tuner.forecast.candidates import Candidates, candidates_in
from tuner.space.enumeration import Space
from tuner.study_file.request import StudyRequest
from tuner.subject.problem import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Study with its layers planned, made by `prepare` (tuner/forecast/planned_candidates.py).

    Attributes:
        request: Request of the study file, as it stands there.
        problem: Problem of the request, with the planned layers and the dimension `plan` if some differ.
        is_left_to_plan: Whether only leading shapes of layers are planned, and a run plans the others beside its
            trials.
    """

    request: StudyRequest
    problem: Problem
    is_left_to_plan: bool = False

    @cached_property
    def backend(self) -> AbstractBackend:
        """Backend of the trials, which run the planned layers."""
        backend = self.request.trials.backend
        if not self.problem.layer_plans:
            return backend
        return backend.with_layer_changes(self.problem.setting.runtime.layer_changes)

    @property
    def backend_of_run(self) -> AbstractBackend:
        """Backend that a run occupies hosts for: those of its smaller jobs where no trial runs at full size."""
        proxy = self.request.trials.proxy
        if proxy is None or not self.request.trials.only_proxies:
            return self.backend
        job = self.problem.setting.job
        layers, batch = job.model.num_layers, job.global_batch_size
        return self.backend.reduced(Reduction(hosts=proxy.hosts, layers=layers, global_batch_size=batch))

    @cached_property
    def space(self) -> Space:
        """Candidates of the problem with their memory.

        Raises:
            ConfigError: There are too many to predict, or the current configuration is no candidate.
        """
        try:
            return self.problem.space()
        except ConfigError as error:
            raise error.in_file(self.request.file) from None

    @cached_property
    def candidates(self) -> Candidates:
        """Candidates of the problem with all predictions; see `space` for the errors."""
        return candidates_in(self.space, self.problem.subject)
