"""Read changed inputs of one target in this process, without regard to coverage, for a number of inputs or seconds.

    python -m benchmarks.support.fuzz_blindly NAME --seed SEED --first N --inputs N --seconds S --folder DIR

`python -m benchmarks.endurance.fuzz --blind SEED` starts such processes one after the other. The seed and the number of
an input determine it: a good input, changed in its form or, one time in five, in its bytes. The folder gets the counts
and the defects (fuzz_reader.py), and `current`, the input that is being read, which is at fault if it ends the process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

from benchmarks.support.fuzz_reader import LIMIT_S, Reader
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from trials.command.patience import at_most


def fuzz(target: Target, *, seed: int, numbers: range, seconds: int, folder: Path) -> None:
    """Read the inputs of these numbers."""
    end_s = time.monotonic() + seconds
    reader, seeds = Reader(target, folder), target.seeds()
    for number in numbers:
        if time.monotonic() > end_s:
            break
        rng = Random(f"{seed}/{number}")  # noqa: S311 # inputs are to be repeatable
        mutation = target.pick_mutation(rng)
        data = mutation(rng.choice(seeds), rng, seeds)
        (folder / "current").write_bytes(data)
        with at_most(LIMIT_S + 1):
            reader.read(data)
    (folder / "current").unlink(missing_ok=True)


def main() -> None:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.inputs)
    fuzz(TARGETS[options.name], seed=options.seed, numbers=numbers, seconds=options.seconds, folder=options.folder)


if __name__ == "__main__":
    main()
