"""Predictions for Python users: of one configuration, and of the fastest ones, as the commands print them in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodels.job.parallel_config import ParallelConfig, Value, parse_config
from hardware.io.errors import ConfigError
from tuner.answers.candidates import Candidates, candidates_of, predict_with_errors, ranking, tokens_per_s_per_device
from tuner.answers.planned_candidates import plan_layers
from tuner.space.enumeration import launchable
from tuner.study_file.config import StudyConfig, load_study


def predict(study: StudyConfig | Path | str, config: ParallelConfig | Mapping[str, Value] | str) -> dict[str, Any]:
    """Return the predicted step time and memory of one configuration, as `meshtune predict --json` prints them.

    Args:
        study: Study, or path of its file.
        config: Configuration, in the searched space or not: `"pp=4,tp=8,dp=2"`, a mapping of such values, or a
            ParallelConfig. Left-out dimensions are 1, or fixed by the study.

    Raises:
        ConfigError: The study is wrong, or the configuration cannot be launched on its cluster.
    """
    loaded = _load(study)
    if isinstance(config, str):
        chosen = parse_config(config, loaded.config_defaults, option="config")
    elif isinstance(config, ParallelConfig):
        chosen = config
    else:
        chosen = ParallelConfig(**(loaded.config_defaults | dict(config)))  # type: ignore[arg-type] # checked there
    if not launchable(loaded.setting, chosen):
        raise ConfigError(
            f"cannot be launched on the {loaded.setting.cluster.num_devices} devices of the study",
            file=loaded.file,
            key="config",
            value=str(chosen),
            nearest="rank() lists configurations that can",
        )
    return predict_with_errors(plan_layers(loaded, chosen), chosen)


def rank(study: StudyConfig | Path | str, *, top: int | None = 10) -> list[dict[str, Any]]:
    """Return the candidates of a study in the order of their predicted step times, the fastest first.

    Args:
        study: Study, or path of its file.
        top: Number of candidates to return; None for all.

    Returns:
        For each candidate its dimensions, step_time_s [s], peak_memory_bytes, fits and tokens_per_s_per_device.

    Raises:
        ConfigError: The study is wrong.
    """
    planned = plan_layers(_load(study))
    return rank_candidates(planned, candidates_of(planned), top)


def rank_candidates(config: StudyConfig, candidates: Candidates, top: int | None = None) -> list[dict[str, Any]]:
    """Return the first `top` candidates of the ranking as plain values; all of them for None."""
    # plain Python numbers, so that rows are JSON as they are
    step_time_s, grid, memory = candidates.estimate.step_time_s, candidates.space.grid, candidates.space.memory
    fits = memory.fits(config.options.memory_headroom)
    return [
        {
            **grid.values(int(position)),
            "step_time_s": float(step_time_s[position]),
            "peak_memory_bytes": int(memory.peak_bytes[position]),
            "fits": bool(fits[position]),
            "tokens_per_s_per_device": tokens_per_s_per_device(config.setting, float(step_time_s[position])),
        }
        for position in ranking(config, candidates)[:top]
    ]


def _load(study: StudyConfig | Path | str) -> StudyConfig:
    return study if isinstance(study, StudyConfig) else load_study(study)
