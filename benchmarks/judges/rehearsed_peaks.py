"""Rehearse the training cases of Megatron-LM's CI, and hold their peaks against those that were measured.

    python -m benchmarks.judges.rehearsed_peaks --measured DIR --megatron DIR [--engine DIR] [--device H100] [--json]

DIR of `--measured` has megatron_lm_ci_golden.csv, whose rows name files of golden values in a tree of Megatron-LM,
which is the DIR of `--megatron`. Each case runs as its CI starts it: unmodified `pretrain_gpt.py`, all flags and
variables of its `model_config.yaml` but those of files, the last rank of its world, which writes the memory to the log.
Data are mock data, and the tokenizer is one of the same size.

Columns: rehearsed is the peak of the first two steps with the workspaces of cuBLAS; measured that of the same two steps
where the second was recorded, and that of the whole run else, which are golden values of older versions; run the error
against the whole run; predicted the cost model's, where it knows the run. The summary has a row for each kind of case.

The exit status is 1 if a case is refused or unknown. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.megatron_cases import FILE, CiCase, read_cases
from benchmarks.support.timing import benchmark_parser
from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.measured_runs import read_measured_and_unstated
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.run import rehearse

PROGRAM = "judges.rehearsed_peaks"
MISSED = 1
LIMIT_S = 7200.0
"""Longest time for all cases of one device [s]."""
MIB = 2**20
PERCENTILES = {"median": 50, "nine of ten": 90, "largest": 100}
"""Percentiles of the error; asked are 1% in the median and 3% in nine of ten, where the second step was recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A case with its peaks.

    Attributes:
        case: Its name, software and device.
        kinds: Kinds of cases to which it belongs, for the summary.
        verdict: Verdict of the rehearsal.
        error: What the program said, or what is missing.
        rehearsed_mib: Peak of two steps.
        measured_mib: Measured peak of two steps if it was recorded, else of the run.
        run_mib: Measured peak of the run.
        predicted_mib: Peak that the cost model predicts; None where it has no model.
        parts_mib: Rehearsed peak by purpose.
    """

    case: str
    kinds: tuple[str, ...]
    verdict: str
    error: str | None
    rehearsed_mib: float | None
    measured_mib: float
    run_mib: float
    predicted_mib: float | None
    parts_mib: dict[str, float]

    @property
    def error_share(self) -> float | None:
        """Rehearsed over measured, less one."""
        return None if self.rehearsed_mib is None else self.rehearsed_mib / self.measured_mib - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each case, and return the exit status."""
    given = _arguments(argv)
    cases, left_out = read_cases(given.measured, given.megatron)
    cases = [one for one in cases if given.device in one.device.name and any(text in one.name for text in given.only)]
    cases = [one for one in cases if given.software in ("all", one.environment)]
    predicted = _predictions(given.measured / FILE)
    rows = []
    for device in sorted({one.device.name for one in cases}):
        own = [one for one in cases if one.device.name == device]
        path = os.pathsep.join(filter(None, (str(given.engine), os.environ.get("PYTHONPATH"))))
        runs = [one.as_rank(given.megatron, path) for one in own]
        answers = rehearse(runs, device=own[0].device, limit_s=LIMIT_S, unconfined=True, environment=os.environ)
        for case, answer in zip(own, answers, strict=True):
            rows.append(_row(case, answer, predicted.get(case.place)))
            if not given.json:
                _print_row(rows[-1])
    if given.json:
        found = {"rows": [asdict(row) for row in rows], "left_out": left_out, "kinds": _summary(rows)}
        print(json.dumps(found, indent=2))
    else:
        for name, reason in left_out.items():
            print(f"left out: {name}: {reason}")
        for kind, found in _summary(rows).items():
            told = "; ".join(f"{name} {_shown(found[name])}" for name in ("rehearsed", "predicted") if name in found)
            print(f"{kind}: {found['accepted']} of {found['cases']} accepted; {told}")
    return MISSED if any(row.verdict != "accepted" for row in rows) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser(PROGRAM, __doc__)
    parser.add_argument("--measured", type=Path, required=True, metavar="DIR", help=f"folder with {FILE}")
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="tree of Megatron-LM")
    parser.add_argument(
        "--engine",
        type=Path,
        default=Path(sys.prefix) / "transformer-engine",
        metavar="DIR",
        help="folder with Transformer Engine's Python code (that of `make frameworks`)",
    )
    parser.add_argument("--device", default="", help="part of a device's name (all)")
    parser.add_argument("--software", default="dev", help="software of the CI: dev, lts, all (dev)")
    parser.add_argument("--only", nargs="+", default=("",), metavar="TEXT", help="parts of the names of cases (all)")
    return parser.parse_args(argv)


def _predictions(file: Path) -> dict[str, float]:
    """Return the peaks that the cost model predicts, by the places of their rows."""
    runs, _, _ = read_measured_and_unstated([file], Path())
    known, settings, _ = settings_of(runs, {})
    found = predict(known, settings).peak_memory_bytes
    return {Path(run.place).name: float(size) for run, size in zip(known, found, strict=True)}


def _row(case: CiCase, answer: RankAnswer, predicted_bytes: float | None) -> Row:
    peak = answer.allocated_bytes if answer.verdict == "accepted" else None
    return Row(
        case=f"{case.name} ({case.environment}, {case.device.name})",
        kinds=_kinds(case),
        verdict=answer.verdict,
        error=None if answer.error is None else f"{answer.error} {list(answer.where[-2:])}",
        rehearsed_mib=None if peak is None else peak / MIB,
        measured_mib=(case.two_steps_bytes or case.peak_bytes) / MIB,
        run_mib=case.peak_bytes / MIB,
        predicted_mib=None if predicted_bytes is None else predicted_bytes / MIB,
        parts_mib={name: size / MIB for name, size in answer.parts.items()},
    )


def _print_row(row: Row) -> None:
    if row.rehearsed_mib is None:
        print(f"{row.verdict}: {row.case}: {row.error}", flush=True)
        return
    predicted = (
        "" if row.predicted_mib is None else f"{row.predicted_mib:10.1f} {row.predicted_mib / row.run_mib - 1:+7.1%}"
    )
    print(
        f"{row.rehearsed_mib:10.1f} {row.measured_mib:10.1f} {row.rehearsed_mib - row.measured_mib:+8.1f} "
        f"{row.error_share:+7.2%} {row.rehearsed_mib / row.run_mib - 1:+7.2%} {predicted:18} {row.case}",
        flush=True,
    )


def _shown(errors: dict[str, float]) -> str:
    return ", ".join(f"{word} {share:.2%}" for word, share in errors.items())


def _kinds(case: CiCase) -> tuple[str, ...]:
    """Return the kinds of a case: by what was recorded, and by what its model does."""
    recorded = "second step recorded" if case.two_steps_bytes else "older golden values"
    given = dict(zip(case.flags, case.flags[1:], strict=False))
    has = {
        "experts": "--num-experts" in given,
        "context parallel": int(given.get("--context-parallel-size", 1)) > 1,
        "FP8": "--fp8-format" in given,
    }
    return ("all", recorded, *(f"{recorded}, {name}" for name in [*filter(has.get, has)] or ["dense"]))


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the errors of each kind of case, rehearsed and predicted."""
    found: dict[str, Any] = {}
    for kind in sorted({kind for row in rows for kind in row.kinds}):
        own = [row for row in rows if kind in row.kinds]
        errors = {
            "rehearsed": [abs(row.error_share) for row in own if row.error_share is not None],
            "predicted": [abs(row.predicted_mib / row.run_mib - 1) for row in own if row.predicted_mib],
        }
        found[kind] = {"cases": len(own), "accepted": len(errors["rehearsed"])} | {
            name: {word: round(float(np.percentile(each, share)), 4) for word, share in PERCENTILES.items()}
            for name, each in errors.items()
            if each
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
