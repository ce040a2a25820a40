"""Fuzz one target in this process, guided by coverage of the four packages, for a number of inputs or seconds.

    python -m benchmarks.support.fuzz_target NAME --inputs N --seconds S --folder DIR

`python -m benchmarks.fuzz` starts such processes one after the other. The folder gets the corpus, `tally` with the
current counts, and every distinct defect: its input and a description. An input that takes longer than LIMIT_S, or that
ends the process, ends the run as well; libFuzzer then leaves the input as `timeout-*` or `crash-*`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from random import Random

import atheris

from benchmarks.support.fuzz_tally import Tally

with atheris.instrument_imports(include=["hardware", "costmodels", "trials", "tuner"]):
    from tests.fuzz.target import Defect, Target, defect_of
    from tests.fuzz.targets import TARGETS

LIMIT_S = 5
MOST_BYTES = 3 * 2**30
"""Address space that inputs may take beyond what the process begins with [bytes]."""
MOST_AT_ONCE = 512 * 2**20
"""Largest growth of peak resident memory that one input may cause [bytes]."""
LONGEST = 20_000
"""Maximum size of an input [bytes]."""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))


def _keep(folder: Path, defect: Defect, data: bytes) -> None:
    """Write a defect, unless the same defect is already known with a shorter input."""
    name = hashlib.sha256(defect.kind.encode()).hexdigest()[:12]
    before = folder / f"defect-{name}.input"
    if not before.exists() or before.stat().st_size > len(data):
        before.write_bytes(data)
        told = {"kind": defect.kind, "text": defect.text[-4000:]}
        (folder / f"defect-{name}.json").write_text(json.dumps(told), encoding="utf-8")


def fuzz(target: Target, *, inputs: int, seconds: int, folder: Path) -> None:
    """Fuzz the target; libFuzzer ends the process, so this does not return."""
    corpus, workplace, seeds = folder / "corpus", folder / "workplace", target.seeds()
    for each in (corpus, workplace):
        each.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    tally = Tally(folder / "tally")
    _limit_memory()

    def run(data: bytes) -> None:
        peak_bytes, begun_s = _peak_bytes(), time.monotonic()
        accepted, defect = defect_of(target, data, workplace)
        took_s = time.monotonic() - begun_s
        if defect is None and _peak_bytes() - peak_bytes > MOST_AT_ONCE:
            defect = Defect(kind="memory", text=f"takes {(_peak_bytes() - peak_bytes) / 2**20:.0f} MiB more")
        if defect is None and took_s > LIMIT_S:
            defect = Defect(kind="slow", text=f"takes {took_s:.1f} s")
        if defect is not None:
            _keep(folder, defect, data)
        tally.add(accepted=accepted, took_s=took_s)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)  # noqa: S311 # libFuzzer gives the seed
        if rng.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        # inputs that coverage keeps are mostly refused early, so half of the mutations start from a valid one
        return target.mutation(rng.choice(seeds) if rng.random() < 0.5 else data, rng, seeds)[:most]

    atheris.Setup(
        [
            sys.argv[0],
            f"-runs={inputs}",
            f"-max_total_time={seconds}",
            f"-max_len={LONGEST}",
            f"-timeout={LIMIT_S + 1}",
            f"-artifact_prefix={folder}/",
            "-rss_limit_mb=0",
            "-reduce_inputs=0",  # a short study file is read no further than a missing key
            str(corpus),
        ],
        run,
        custom_mutator=mutated,
    )
    atheris.Fuzz()


def main() -> None:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    fuzz(TARGETS[options.name], inputs=options.inputs, seconds=options.seconds, folder=options.folder)


if __name__ == "__main__":
    main()
