"""Placement of the models in a file, for the command and for Python users: read, search, check, export."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardware.io.errors import ConfigError
from tuner.place.answer import Answer, answer_json, check_answer, place
from tuner.place.exports.registry import export_placement, launchable_by
from tuner.place.exports.roles import Export
from tuner.place.placement_file import read_placement

TIME_LIMIT_S, GAP = 30.0, 0.01
"""Default time of a search [s], and default gap at which it ends."""


def place_models(
    file: Path | str,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    framework: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Place the models of a placement file on its cluster, and return what `meshtune place --json` prints.

    Args:
        file: Path of the placement file.
        time_limit_s: Longest time of the search; the best so far is the answer [s].
        gap: Gap between step time and lower bound at which the search ends.
        framework: Search only placements that this RL framework can launch (`verl` or `openrlhf`), and return its
            arguments under `export`.
        on_progress: Function that is told what takes seconds.

    Returns:
        The placement, its timeline, the lower bound and the baselines; `step_time_s` is None if none was found.

    Raises:
        ConfigError: The file or an argument is wrong, or a module fits on no set of devices.
    """
    for key, value, is_valid, rule in (
        ("time_limit_s", time_limit_s, time_limit_s > 0, "must be a number above 0"),
        ("gap", gap, gap >= 0, "must be a number of at least 0"),
    ):
        if not (math.isfinite(value) and is_valid):
            raise ConfigError(rule, key=key, value=value)
    answer, exported = place_file(
        Path(file), time_s=time_limit_s, gap=gap, framework=framework, option="framework", on_progress=on_progress
    )
    return placed_json(answer, exported)


def place_file(
    file: Path, *, time_s: float, gap: float, framework: str | None, option: str, on_progress: Callable[[str], None]
) -> tuple[Answer, Export | None]:
    """Search the best placement of a file, and write it as the arguments of a framework.

    Args:
        file: Placement file.
        time_s: Longest time of the search [s].
        gap: Gap to the lower bound at which the search ends.
        framework: Framework that has to be able to launch the placement; None for no export.
        option: Option or argument that names the framework, for messages.
        on_progress: Function that is told what takes seconds.

    Raises:
        ConfigError: The file is wrong, the framework cannot launch it, or a module fits on no set of devices.
    """
    workload = read_placement(file)
    if framework is not None:
        workload = launchable_by(workload, framework, option=option)
    answer = place(workload, time_s=time_s, gap=gap, on_progress=on_progress)
    check_answer(answer)
    if framework is None or answer.state is None:
        return answer, None
    return answer, export_placement(answer.problem, answer.state, framework)


def placed_json(answer: Answer, exported: Export | None) -> dict[str, Any]:
    """Return an answer and its export as an object."""
    told = {"export": {"lines": list(exported.lines), "notes": list(exported.notes)}} if exported else {}
    return answer_json(answer) | told
