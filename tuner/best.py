"""The answer of a study: its fastest measured configuration; before any, what proxies suggest or the model predicts."""

from __future__ import annotations

from dataclasses import dataclass

from optuna import Study

from costmodels.parallel import ParallelConfig
from tuner.candidates import candidates_of, predicted, ranking
from tuner.config import StudyConfig
from tuner.extrapolation import Extrapolated, extrapolated_of
from tuner.record import best_record, read_records, step_time_of
from tuner.storage import find_study


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """A configuration and how its step time is known.

    Attributes:
        config: The configuration.
        step_time_s: Its step time.
        source: "measured", "synthetic" or "predicted".
        gain_over_expert: The expert's step time over this one, by the same source; None without an expert's.
        extrapolated: The proxies that it rests on, where no trial has run at full size.
        source_in_words: The source, and what its step times count.
    """

    config: ParallelConfig
    step_time_s: float
    source: str
    gain_over_expert: float | None
    extrapolated: Extrapolated | None = None
    source_in_words: str = "predicted"

    @property
    def known_in_words(self) -> str:
        """How the step time is known."""
        return self.extrapolated.in_words if self.extrapolated else self.source_in_words


def best_configuration(config: StudyConfig) -> Best | None:
    """The best that is known of a study; None if no configuration works."""
    return best_known(config, find_study(config.storage, config.name))


def best_known(config: StudyConfig, study: Study | None) -> Best | None:
    """The same of a study that was opened already; None is one that was never run."""
    records = read_records(study) if study is not None else []
    best = best_record(records)
    if best is not None and best.step_time_s is not None:
        expert = config.expert.values(config.dimensions) if config.expert else None
        expert_s = step_time_of(records, expert)
        return Best(
            config=config.config_of(best.params),
            step_time_s=best.step_time_s,
            source=config.backend.origin,
            source_in_words=config.backend.source_in_words,
            gain_over_expert=expert_s / best.step_time_s if expert_s else None,
        )
    extrapolated = extrapolated_of(study.user_attrs) if study is not None else None
    if extrapolated is not None:
        return Best(
            config=config.config_of(extrapolated.config),
            step_time_s=extrapolated.step_time_s,
            source="predicted",
            gain_over_expert=None,
            extrapolated=extrapolated,
        )
    candidates = candidates_of(config)
    if not len(candidates.space.grid):
        return None
    fastest = int(ranking(config, candidates)[0])
    step_time_s = float(candidates.estimate.step_time_s[fastest])
    gain = predicted(config, config.expert)["step_time_s"] / step_time_s if config.expert else None
    return Best(
        config=candidates.space.grid.config(fastest), step_time_s=step_time_s, source="predicted", gain_over_expert=gain
    )
