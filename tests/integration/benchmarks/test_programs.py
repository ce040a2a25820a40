"""Start the benchmarks that no other test starts, each in a small form, so that none of them rots."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.support import screenshots
from hardware.dynamics import Trace
from tests.support.benchmark_runs import ROOT
from tests.support.studies.report_pages import run
from tuner.study_file.config import load_study

TESTED = Path(__file__).parents[2]


def on_one_host(study):
    """Return a program's study of one host and a small model in place of its large one."""
    lines = {"model:": "model: llama-7b", "cluster:": "cluster: {name: dgx-a100, hosts: 1}"}
    job = {"job:": "job: {sequence_length: 4096, global_batch_size: 64}"}
    small = lines | job
    if "{{" in study:  # the program fills in a template
        small = {key: line.replace("{", "{{").replace("}", "}}") for key, line in small.items()}
    return "\n".join(small.get(line.partition(" ")[0], line) for line in study.splitlines())


def only(name):
    """Return a function that keeps one item of a mapping, under a name that is not left out for being small."""
    return lambda items: {"one": items[name]}


def first(values):
    """Return a function that yields the first of a generator's values."""
    return lambda: islice(values(), 1)


def on_two_hosts(cases):
    """Return the first of the mixed clusters with one host of each kind."""
    return (replace(cases[0], groups=tuple((name, 1, nic) for name, _, nic in cases[0].groups)),)


def first_events(read):
    """Return a function that reads the first events of a trace."""
    return lambda *given: Trace(events=read(*given).events[:4])


SMALL = {
    "search.knob_search": (("--knobs", 2, "--seeds", 1, "--trials", 2, "--peers", "random"), {}),
    "endurance.load": (("--trials", 10, "--parallel", 4, "--storages", "sqlite", "--unopened"), {"STUDY": on_one_host}),
    "endurance.long_study": (("--trials", 2), {"STUDY": on_one_host}),
    "calibration.host_time": ((), {"TESTS": lambda tests: tests[1:]}),
    "judges.micro_batches": (
        ("--rounds", 1),
        {"PRECISIONS": lambda _: ("bf16",), "CONFIGS": lambda configs: configs[2:3], "HIDDEN": lambda _: 128},
    ),
    "judges.mixed_clusters": (
        ("--cases", 1),
        {"SIMULATED": lambda _: 1, "BATCH_PER_DEVICE": lambda _: 1, "CASES": on_two_hosts},
    ),
    "judges.torch_traffic": (("--programs", "perceptron_small"), {}),
    "papers.branch_and_bound": (("--limit", 1, "--workers", 1), {"_pipelines": first, "_workloads": first}),
    "papers.flexparallel": ((), {}),
    "judges.placements": (("--names", "ppo-7b-16", "--time_limit", 5), {}),
    "judges.published_placements": (("--rows", 1), {}),
    "speed.command_line": (("--help_repeats", 1, "--repeats", 1), {"COMMANDS": lambda commands: commands[:1]}),
    "speed.jax_graphs": (("--repeats", 1), {"benchmarks.zoo.FACTORIES": only("gemma_small")}),
    "speed.late_trials": (("--at", 5, "--trials", 2), {"STUDY": on_one_host}),
    "speed.predictions": (("--repeats", 1), {"NAMES": lambda _: ("llama-7b-8",)}),
    "speed.sampler": (("--repeats", 1, "--sizes", 1), {}),
    "speed.space": (
        ("--repeats", 1),
        {"STUDIES": lambda studies: SimpleNamespace(glob=lambda _: [studies / "llama-7b-8.yaml"])},
    ),
    "speed.torch_graphs": (("--repeats", 1), {"benchmarks.zoo.torch_modules.FACTORIES": only("llama_small")}),
    "search.failing_trials": (("--worlds", "16", "--seeds", 1, "--trials", 3), {}),
    "search.failure_classifiers": (("--worlds", "16", "--seeds", 1), {"TRIED": lambda sizes: sizes[:1]}),
    "search.trained_knobs": (("--seeds", 1, "--steps", 1, "--pairs", 4), {}),
    "search.training_losses": (("--trials", 2, "--steps", 1), {}),
    "judges.two_fidelities": (("--studies", "8b-slow-nic", "--top", 4), {}),
    "search.two_values": (("--groups", 1, "--seeds", 1, "--trials", 5, "--workers", 1), {}),
    "judges.watched_day": (("--days", 0, "--trials", 2, "--restart", 120), {"read_trace": first_events}),
    "endurance.storage_cost": (("--at", 0, "--trials", 2, "--storages", "sqlite"), {"STUDY": on_one_host}),
}
"""Options that make a program small, and functions that make the values of some of its names smaller."""

NEEDS = {
    "judges.micro_batches": "jax",
    "speed.jax_graphs": "jax",
    "judges.torch_traffic": "torch",
    "speed.torch_graphs": "torch",
    "speed.sampler": "torch",
    "search.trained_knobs": "torch",
    "search.training_losses": "torch",
}
ELSEWHERE = {
    "judges.package_steps": "needs packages that the project does not install; tests compile the zoo's steps so",
    "judges.planned_trainer": "trains for minutes, as root; test_trainer_study.py trains by the same plans",
    "support.ranks_on_hosts": "starts the ranks of planned_trainer, in namespaces that test_shaped_links.py makes",
    "judges.foreign_programs": "needs repositories that the project does not ship; the tests of rehearsals run such",
    "judges.rehearsed_peaks": "needs a tree of Megatron-LM; test_megatron.py rehearses what it found",
    "judges.replayed_steps": "rehearses published runs for minutes; test_megatron.py replays a step from all stages",
    "search.rehearsed_search": "rehearses a whole space; test_search.py searches with rehearsals",
    "speed.rehearsals": "rehearses Llama 3 70B for minutes; test_megatron.py rehearses smaller models",
    "judges.gpu_schedules": "needs XLA's compiler for GPUs, of 183 MB; tests of costmodels/xla test its reader",
    "calibration.fit_kernels": "reads sources of 5 MB that the project does not ship",
    "support.screenshots": "is tested at the end of this file",
    "support.fuzz_blindly": "is the process that benchmarks.endurance.fuzz --blind starts",
    "support.fuzz_target": "is the process that benchmarks.endurance.fuzz starts",
    "support.torch_knob_program": "is the process that benchmarks.search.trained_knobs starts",
}


def programs():
    """Return the names of all programs under benchmarks/."""
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    found = [file for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(ROOT / "benchmarks").with_suffix("").parts) for file in found]


@pytest.mark.parametrize("name", SMALL)
def test_a_program_runs(name, monkeypatch, capsys):
    """A small form of the program ends with status 0 and prints one JSON object."""
    if (needed := NEEDS.get(name)) and find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    program = importlib.import_module(f"benchmarks.{name}")
    options, changes = SMALL[name]
    for target, change in changes.items():
        place, _, attribute = target.rpartition(".")
        owner = importlib.import_module(place) if place else program
        monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    monkeypatch.setattr(sys, "argv", [name, *map(str, options), "--json"])

    assert not program.main()
    assert json.loads(capsys.readouterr().out)


def test_every_program_is_started_by_a_test():
    """Each program stands in the table above, or a test of its own imports or starts it."""
    tests = [file for file in TESTED.rglob("test_*.py") if file.name != Path(__file__).name]
    texts = "\n".join(file.read_text(encoding="utf-8") for file in tests)
    started = {*SMALL, *ELSEWHERE}

    def is_tested(program):
        folder, _, name = program.rpartition(".")
        package = f"benchmarks.{folder}" if folder else "benchmarks"
        return f"{package}.{name}" in texts or f"from {package} import {name}" in texts or f'"{program}"' in texts

    assert [program for program in programs() if program not in started and not is_tested(program)] == []


def test_pictures_are_taken(tmp_path, monkeypatch):
    """The pictures of a report are drawn into the folder that is named."""
    if shutil.which("chromium") is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    command = screenshots._meshtune

    def quick(verb, *options):
        """Run three trials without Ray in place of the whole study."""
        if verb == "run":
            run(load_study(screenshots.STUDY, storage=options[-1]), 3)
        else:
            command(verb, *options)

    monkeypatch.setattr(screenshots, "_meshtune", quick)
    monkeypatch.setattr(screenshots, "SHOTS", screenshots.SHOTS[1:])
    screenshots.main(["--out", str(tmp_path)])

    assert {file.stem for file in tmp_path.glob("*.png")} == {shot.name for shot in screenshots.SHOTS}
