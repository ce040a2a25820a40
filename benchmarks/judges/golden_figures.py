"""Compare this version's figures with recorded ones to the last bit; exit status 1 names what differs.

    python -m benchmarks.judges.golden_figures [--only PART ...] [--write] [--folder FOLDER] [--whole FOLDER] [--json]

Parts: predictions of all measured rows; ranks of the example studies; exports; answers of stored studies; plans;
simulated steps; sequences of trials from fixed seeds; own steps in JAX and torch. benchmarks/support/golden_parts.py
says what each asks. `--write` records the figures anew in benchmarks/golden/. It runs a stored study only if its
storage is missing there, so that storages of earlier versions stay; to record one anew, delete its file.

Floats are recorded with all digits, and each group of figures with a digest over everything. If a digest differs while
the values shown are equal, run `--whole FOLDER` on both versions and compare the two folders.

The linear algebra is told to use one thread. Figures still depend on the processor and on the versions of numpy, scipy,
scikit-learn, JAX and torch: numpy's exponentials and OpenBLAS's products take other instructions on other processors,
and may differ in the last digit. Record on the machine on which you compare, if the first comparison there differs.

CPU time per part goes to stderr; exit status 2 reports a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.golden_parts import PARTS, record_studies
from benchmarks.support.timing import benchmark_parser, tell

FOLDER = Path(__file__).parents[1] / "golden"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SHOWN = 12
"""Differences of a part that are printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare or write the figures, and return the exit status."""
    given = _arguments(argv)
    os.environ |= dict.fromkeys(THREADS, "1")  # numpy, which reads it, is not loaded yet
    found: dict[str, list[str]] = {}
    for name in given.only or PARTS:
        part = PARTS[name]
        if not part.is_possible:
            tell(f"{name}: left out, since {part.needs} is not installed")
            continue
        began_s = time.process_time()
        with _empty_folder():
            if given.write and name == "stored":
                record_studies(given.folder / "stored")
            figures = {
                figure.name: _recorded(figure.whole, figure.shown, _file(given.whole, name, figure.name))
                for figure in part.figures(given.folder / "stored")
            }
        file = given.folder / f"{name}.json"
        if given.write:
            file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            found[name] = []
        elif file.exists():
            found[name] = list(differences(json.loads(file.read_text(encoding="utf-8")), figures))
        else:
            found[name] = ["nothing is recorded; --write records it"]
        verdict = "written" if given.write else f"{len(found[name])} differences" if found[name] else "equal"
        tell(f"{name}: {len(figures)} groups of figures, {verdict}, {time.process_time() - began_s:.1f} CPU s")
    if given.json:
        print(json.dumps({"differences": found}, indent=2))
    else:
        _print(found)
    return int(any(found.values()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("judges.golden_figures", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="record the figures instead of comparing them")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="folder of the recorded figures (benchmarks/golden)"
    )
    parser.add_argument("--whole", type=Path, metavar="FOLDER", help="also write all figures there, without digests")
    given = parser.parse_args(argv)
    given.folder = given.folder.resolve()
    given.whole = given.whole and given.whole.resolve()
    return given


@contextlib.contextmanager
def _empty_folder() -> Iterator[None]:
    """Work in an empty folder, without the settings of the user's environment."""
    settings = {name: os.environ.pop(name) for name in ("MESHTUNE_STORAGE", "RAY_ADDRESS") if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="meshtune-") as folder, contextlib.chdir(folder):
        yield
    os.environ |= settings


def _file(folder: Path | None, part: str, name: str) -> Path | None:
    safe = "".join(letter if letter.isalnum() or letter in "-_.=," else "_" for letter in name)
    return folder and folder / part / f"{safe}.json"


def _recorded(whole: Any, shown: Any, file: Path | None) -> dict[str, Any]:
    """Return what is recorded of some figures, as JSON gives it back; write the whole figures to a file, if any."""
    text = json.dumps(whole)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    recorded: dict[str, Any] = json.loads(json.dumps({"digest": digest, "shown": shown}))
    return recorded


def differences(recorded: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield one line for each value that differs, with its place; numbers differ if any digit does."""
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        above = f"{place} / " if place else ""
        for key in recorded:
            if key in now:
                yield from differences(recorded[key], now[key], f"{above}{key}")
            else:
                yield f"{above}{key}: is missing now"
        yield from (f"{above}{key}: is new" for key in now if key not in recorded)
        if list(recorded) != list(now) and set(recorded) == set(now):
            yield f"{place}: the keys have another order"
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        for at, (one, other) in enumerate(zip(recorded, now, strict=True)):
            yield from differences(one, other, f"{place} / {at}")
    elif json.dumps(recorded) != json.dumps(now):
        yield f"{place}: {_short(recorded)} was recorded, and now it is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _print(found: Mapping[str, Sequence[str]]) -> None:
    for name, lines in found.items():
        for line in lines[:SHOWN]:
            print(f"{name}: {line}")
        if len(lines) > SHOWN:
            print(f"{name}: and {len(lines) - SHOWN:,} more")


if __name__ == "__main__":
    sys.exit(main())
