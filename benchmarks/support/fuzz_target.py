"""Fuzz one target in this process, guided by coverage of the four packages, for a number of inputs or seconds.

    python -m benchmarks.support.fuzz_target NAME --inputs N --seconds S --folder DIR

`python -m benchmarks.endurance.fuzz` starts such processes one after the other. The folder gets the corpus, the counts
and the defects (fuzz_reader.py). An input that takes longer than LIMIT_S, or that ends the process, ends the run as
well; libFuzzer then leaves the input as `timeout-*` or `crash-*`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["hardware", "costmodels", "trials", "tuner"]):
    from benchmarks.support.fuzz_reader import LIMIT_S, Reader
    from tests.fuzz.target import Target
    from tests.fuzz.targets import TARGETS

LONGEST = 20_000
"""Maximum size of an input [bytes]."""


def fuzz(target: Target, *, inputs: int, seconds: int, folder: Path) -> None:
    """Fuzz the target; libFuzzer ends the process, so this does not return."""
    corpus, seeds = folder / "corpus", target.seeds()
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)

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
        Reader(target, folder).read,
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
