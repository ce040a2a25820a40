"""Ranking of a study's candidates by what its trials have taught: measured step times, and posterior means."""

from __future__ import annotations

import numpy as np
from optuna import Study

from tuner.forecast.prepared import Prepared
from tuner.forecast.ranked import Ranked, by_objective
from tuner.search.observations import observations_on
from tuner.search.prior import OnProgress
from tuner.storage.history import past_of


def learned_ranking(prepared: Prepared, study: Study, *, on_progress: OnProgress) -> Ranked | None:
    """Return the ranking by the posterior means after a study's trials; None if none has told anything.

    Args:
        prepared: Study.
        study: Its stored counterpart.
        on_progress: Function that is told what takes seconds.

    Raises:
        ConfigError: The storage or the history cannot be read.
    """
    candidates = prepared.candidates
    grid, memory = candidates.space.grid, candidates.space.memory
    observations = observations_on(grid, study.get_trials(deepcopy=False))
    if not observations.num_ended:
        return None
    everywhere = np.arange(len(grid))
    posterior = prepared.problem.subject.prior(grid, past_of(prepared.request), on_progress=on_progress)
    expected = posterior.expected(observations, everywhere)
    ran = np.isin(everywhere, sorted(observations.explored))
    room = np.log((1 - prepared.problem.options.memory_headroom) * memory.capacity_bytes)
    fits = ((expected.log_needed <= room) | ran) & ~expected.is_broken
    step_time_s, is_measured = np.exp(expected.log_step_s), np.zeros(len(grid), dtype=np.bool_)
    completed = observations.measured[observations.num_completed > 0]
    # what was measured is told as measured, and not drawn towards the prediction
    step_time_s[completed] = np.exp(observations.log_step_s[observations.num_completed > 0])
    is_measured[completed] = True
    # the peak errs by the same factor as the memory that is needed
    peak_bytes = memory.peak_bytes * np.exp(expected.log_needed) / posterior.predicted.needed_bytes
    ranked = Ranked(
        order=np.lexsort((step_time_s, ~fits)),
        step_time_s=step_time_s,
        peak_bytes=peak_bytes,
        fits=fits,
        is_measured=is_measured,
        is_simulated=np.zeros(len(grid), dtype=np.bool_),
        num_trials=observations.num_ended,
    )
    return by_objective(prepared, ranked)
