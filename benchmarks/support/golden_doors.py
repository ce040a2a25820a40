"""Doors by which the golden figures reach the program: the command line, and few functions that have no command.

Only this file knows names inside the packages, so a change of the internals changes this file and no figure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

CLOCKS = frozenset({"search_s", "driver_ended_at", "last_heard_s", "seconds_since"})
"""Keys of answers that hold readings of a clock."""

PROGRESS = "planned "
"""Beginning of lines on stderr that come as often as the machine is slow."""


def ask(*words: object) -> dict[str, Any]:
    """Return a command's exit status, its JSON and its messages, without the project's path.

    Args:
        words: Words of the command line behind `meshtune`; `--json` is added.
    """
    from tuner.cli.main import main  # noqa: PLC0415 # after the number of threads is set

    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["meshtune", *map(str, words), "--json"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = before
    said = [line for line in _without_root(err.getvalue()).splitlines() if not line.startswith(PROGRESS)]
    answer = _without_root(out.getvalue())
    return {"status": status, "answer": _without_clocks(json.loads(answer)) if answer else None, "messages": said}


def _without_root(text: str) -> str:
    return text.replace(str(ROOT), "PROJECT").replace(os.getcwd(), "HERE")  # noqa: PTH109 # as commands write it


def _without_clocks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clocks(inner) for key, inner in value.items() if key not in CLOCKS}
    return [_without_clocks(inner) for inner in value] if isinstance(value, list) else value


def measured_predictions(files: Sequence[Path]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each source of measured runs with the predictions of its rows, in the order of the files."""
    from costmodels.calibration.fidelity import by_setting, predict_unstated, settings_of  # noqa: PLC0415
    from costmodels.calibration.measured_runs import read_measured_and_unstated  # noqa: PLC0415
    from costmodels.job.parallel_config import ConfigGrid  # noqa: PLC0415
    from costmodels.step.memory.peak import estimate_memory  # noqa: PLC0415
    from costmodels.step.step_time import estimate_step  # noqa: PLC0415

    runs, unstated, left_out = read_measured_and_unstated(files, Path())
    kept, settings, skipped = settings_of(runs, {})
    rows: list[dict[str, Any]] = [{} for _ in kept]
    for measured, at in by_setting(settings).items():
        grid = ConfigGrid.from_configs([kept[position].config for position in at])
        memory = estimate_memory(measured.setting, grid)
        step = estimate_step(measured.setting, grid, memory=memory)
        counted = measured.peak_bytes(grid, memory)
        for row, position in enumerate(at):
            rows[position] = {
                "config": str(kept[position].config),
                "step_time_s": float(step.step_time_s[row]),
                "breakdown_s": _row(step.breakdown_s, row),
                "peak_memory_bytes": float(memory.peak_bytes[row]),
                "memory_bytes": _row(memory.parts_bytes, row),
                "counted_bytes": float(counted[row]),
            }
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run, row in zip(kept, rows, strict=True):
        by_source[run.source].append(row)
    yield from by_source.items()
    ranges, _ = predict_unstated(unstated, {})
    yield (
        "rows without their recomputation",
        [{"config": str(one.run.config), "step_time_s": dict(one.step_time_s), "fits": one.fits} for one in ranges],
    )
    yield "rows left out", [dict(left_out), dict(skipped)]


def _row(parts: Mapping[str, Any], row: int) -> dict[str, float]:
    return {name: float(values[row]) for name, values in parts.items()}


def run_here(study: Path, storage: str, changes: Sequence[str] = ()) -> None:
    """Run a study in this process, without Ray, one poll after the other."""
    from tests.support.studies.in_process_executor import InProcessExecutor  # noqa: PLC0415
    from tuner import load_study, run_study  # noqa: PLC0415

    config = load_study(study, overrides=list(changes), storage=storage)
    executor = InProcessExecutor(config.trials.backend, config.search.parallel_trials)
    run_study(config, on_progress=lambda _: None, executor=executor)
