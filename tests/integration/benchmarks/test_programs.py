"""Start the benchmarks that no other test starts, each in a small form, so that none of them rots."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import screenshots
from tests.support.benchmark_runs import ROOT, run_from_root

TESTED = Path(__file__).parents[2]
SMALL = {
    "papers.branch_and_bound": ("--limit", 2, "--workers", 1),
    "papers.flexparallel": (),
    "speed.command_line": ("--help_repeats", 1, "--repeats", 1),
    "speed.jax_graphs": ("--repeats", 1),
    "speed.predictions": ("--repeats", 1),
    "speed.sampler": ("--repeats", 1, "--sizes", 1),
    "speed.space": ("--repeats", 1),
    "speed.torch_graphs": ("--repeats", 1),
    "load": ("--trials", 20, "--parallel", 4, "--storages", "sqlite", "--unopened"),
    "storage_cost": ("--at", 0, "--trials", 2, "--storages", "sqlite"),
}
"""Options that make a program small."""

NEEDS = {"speed.jax_graphs": "jax", "speed.torch_graphs": "torch", "speed.sampler": "torch"}
ELSEWHERE = {
    "calibration.fit_kernels": "reads sources of 5 MB that the project does not ship",
    "support.fuzz_target": "is the process that benchmarks.fuzz starts",
}


def programs():
    """Return the names of all programs under benchmarks/."""
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    found = [file for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts) for file in found]


@pytest.mark.parametrize("program", SMALL)
def test_a_program_runs(program):
    """A small form of the program ends with status 0 and prints one JSON object."""
    if (needed := NEEDS.get(program)) and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    done = run_from_root(program, *SMALL[program], "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_every_program_is_started_by_a_test():
    """Each program stands in the table above, or a test of its own imports or starts it."""
    tests = [file for file in TESTED.rglob("test_*.py") if file.name != Path(__file__).name]
    texts = "\n".join(file.read_text(encoding="utf-8") for file in tests)
    started = {*SMALL, *ELSEWHERE, "screenshots"}

    def is_tested(program):
        folder, _, name = program.rpartition(".")
        package = f"benchmarks.{folder}" if folder else "benchmarks"
        return f"{package}.{name}" in texts or f"from {package} import {name}" in texts or f'"{program}"' in texts

    assert [program for program in programs() if program not in started and not is_tested(program)] == []


def test_pictures_are_taken(tmp_path):
    """The pictures of a report are drawn into the folder that is named."""
    if shutil.which("chromium") is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    screenshots.main(["--out", str(tmp_path)])

    assert {file.stem for file in tmp_path.glob("*.png")} == {shot.name for shot in screenshots.SHOTS}
