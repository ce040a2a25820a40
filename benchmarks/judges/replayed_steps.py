"""Compare the replayed time of rehearsed steps, and the closed form's, with published runs of Megatron-LM.

    python -m benchmarks.judges.replayed_steps [--measured A.csv ...] [--devices 64] [--json]

Each run in 16 bits is rehearsed as the first rank of each of its stages, and what these ran is priced and replayed in
the event simulator (tuner/rehearsal/replay.py). Rows show the measured step and the ratio of both predictions to it,
the last one the median of the absolute errors on the same runs. The shipped profile was fitted, by the closed form,
to much of configs/measured/runs: neither is tested by these.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.rehearsed_layouts import FRAMEWORKS, LIMIT_S, environment_for, program_for
from benchmarks.support.shipped_runs import shipped_runs
from benchmarks.support.timing import USERS_MISTAKE, benchmark_parser, count_at_least, publish, tell
from costmodels.calibration.fidelity import is_clean, settings_of
from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.setting import Setting
from costmodels.step.step_time import estimate_step
from hardware.io.errors import ConfigError
from tuner.rehearsal.replay import replayed_step
from tuner.rehearsal.run import cases_of, enough_micro_batches, one_rank_a_stage, rehearse

FRAMEWORK = "megatron-core"


def comparable(paths: Sequence[Path], devices: int) -> list[tuple[MeasuredRun, Setting]]:
    """Return the timed runs of Megatron-LM in 16 bits on up to so many devices, whose model is a plain decoder.

    Runs of unfused attention are left out, of which no flag tells the program. What userbuffers hide beside products
    counts as exposed in the replay.
    """
    runs, _ = read_measured_and_skipped(paths, Path())
    kept, settings, _ = settings_of(runs, {})
    return [
        (run, measured.setting)
        for run, measured in zip(kept, settings, strict=True)
        if run.step_time_s is not None
        and not run.is_failed
        and is_clean(run)
        and measured.setting.runtime.rule_set == "megatron"
        and measured.setting.runtime.fused_attention
        and measured.setting.job.precision in ("bf16", "fp16")
        and measured.setting.job.model.decoder is not None
        and run.devices <= devices
    ]


def rows_of(found: Sequence[tuple[MeasuredRun, Setting]]) -> Iterator[dict[str, Any]]:
    """Rehearse the runs, and yield a row for each."""
    framework, cases = FRAMEWORKS[FRAMEWORK], []
    for run, setting in found:
        program, config = program_for(framework, setting, run.config), run.config
        cases.append(cases_of(program, config, one_rank_a_stage(config), enough_micro_batches(config), has_order=True))
    answers = rehearse(
        [case for own in cases for case in own],
        device=found[0][1].cluster.devices[0],
        limit_s=LIMIT_S,
        unconfined=True,
        has_order=True,
        environment=environment_for(framework),
    )
    for (run, setting), own in zip(found, cases, strict=True):
        said = [next(answers) for _ in own]
        name = {"run": f"{run.source} {run.model.name}", "devices": run.devices, "config": _in_words(run.config)}
        wrong = next((answer for answer in said if answer.verdict != "accepted"), None)
        if wrong is not None:
            tell(f"{name}: {wrong.verdict}: {wrong.error}")
            continue
        number = setting.job.global_batch_size // (run.config.dp * run.config.mbs)
        replayed = replayed_step(setting, run.config, said, number)
        closed_s = float(estimate_step(setting, ConfigGrid.from_configs([run.config])).step_time_s[0])
        measured_s = run.step_time_s or 0.0
        assert replayed is not None, "all stages were rehearsed with their order"
        ratios = {"replayed": replayed.step_s / measured_s, "closed form": closed_s / measured_s}
        row = name | {"measured_s": measured_s} | ratios
        tell(str(row))
        yield row


def _in_words(config: ParallelConfig) -> str:
    names = ("pp", "tp", "dp", "cp", "vpp", "ep", "mbs")
    told = [f"{name}={getattr(config, name)}" for name in names if getattr(config, name) > 1]
    return ",".join([*told, *([config.recompute] if config.recompute != "none" else [])])


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median absolute error of both predictions."""
    return {name: statistics.median(abs(row[name] - 1) for row in rows) for name in ("replayed", "closed form")}


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each run; return the exit status."""
    parser = benchmark_parser("judges.replayed_steps", __doc__)
    parser.add_argument("--measured", nargs="+", type=Path, default=shipped_runs(), metavar="CSV")
    parser.add_argument("--devices", type=count_at_least(1), default=64, help="largest number of devices of a run (64)")
    given = parser.parse_args(arguments)
    if missing := FRAMEWORKS[FRAMEWORK].missing():
        tell(f"{missing} is not installed: `make frameworks` installs it")
        return USERS_MISTAKE
    try:
        found = comparable(given.measured, given.devices)
    except ConfigError as error:
        tell(f"replayed_steps: {error}")
        return USERS_MISTAKE
    rows = list(rows_of(found)) if found else []
    if not rows:
        tell("replayed_steps: no such run")
        return USERS_MISTAKE
    if given.json:
        print(json.dumps({"rows": rows, "median_error": errors(rows)}, indent=2))
    else:
        publish(
            [*rows, {"run": "median absolute error", "devices": "", "config": "", "measured_s": "", **errors(rows)}],
            as_json=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
