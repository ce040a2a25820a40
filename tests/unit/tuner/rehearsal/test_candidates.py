"""Candidates of rehearsals, what tells them apart, and their answers."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.job.parallel_config import ParallelConfig
from hardware.device import find_device
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.candidates import Candidate, CandidateAnswer, by_program, whole_answers
from tuner.rehearsal.identity import identity_of
from tuner.rehearsal.program import Program
from tuner.rehearsal.readiness import reason_it_is_not
from tuner.rehearsal.run import cases_of

CONFIG = ParallelConfig(pp=2, tp=2, dp=2)


def program(folder: Path, *arguments: str, text: str = "import torch\n", name: str = "train.py") -> Program:
    """A program in a folder."""
    (folder / name).write_text(text)
    return Program(
        interpreter=sys.executable,
        script=folder / name,
        module=None,
        arguments=arguments,
        directory=folder,
        environment={"A": "1"},
    )


def candidate(one: Program, key: str = "") -> Candidate:
    """A candidate of two stages."""
    return Candidate(key=key, cases=cases_of(one, CONFIG, (0, 4), 4))


def answer(rank, verdict, **known):
    """An answer of a rank."""
    return RankAnswer(rank=rank, stage=rank // 4, verdict=verdict, parts={}, invented={}, **known)


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (("accepted", "accepted"), "accepted"),
        (("accepted", "unknown"), "unknown"),
        (("unknown", "refused"), "refused"),
        (("refused", "accepted"), "refused"),
    ],
)
def test_the_worst_stage_decides(verdicts, worst):
    """Refused is worse than unknown, and that than accepted."""
    stages = [answer(4 * at, verdict, error=verdict, peak_bytes=at) for at, verdict in enumerate(verdicts)]

    found = CandidateAnswer.of_stages("key", stages)

    assert (found.verdict, found.error) == (worst, worst)
    assert found.peaks_bytes == (0, 1)


def test_an_answer_is_read_as_it_was_written():
    """JSON and back; what is no answer of this version is none."""
    whole = CandidateAnswer(
        key="k", verdict="refused", error="ValueError: no\nmore", where=("a:1 f",), peaks_bytes=(None,)
    )

    assert CandidateAnswer.from_json(whole.as_json()) == whole
    assert whole.in_words == "ValueError: no (a:1 f)"
    for broken in ({}, {"verdict": "maybe"}, {"peaks_bytes": 3}, {"peaks_bytes": ["1"]}, {"where": None}):
        assert CandidateAnswer.from_json(whole.as_json() | broken if broken else {}) is None


def test_answers_are_dealt_out_to_their_candidates(tmp_path):
    """Two ranks each; a candidate whose last rank did not answer has none."""
    group = [candidate(program(tmp_path), key) for key in "abc"]
    ranks = [
        answer(0, "accepted"),
        answer(4, "refused"),
        answer(0, "accepted"),
        answer(4, "accepted"),
        answer(0, "refused"),
    ]

    assert [(one.key, one.verdict) for one in whole_answers(group, ranks)] == [("a", "refused"), ("b", "accepted")]


def test_programs_with_other_arguments_share_an_import(tmp_path):
    """Arguments and variables may differ within a group; another script begins another."""
    first, second = program(tmp_path, "--tp=1"), program(tmp_path, "--tp=2")
    other = program(tmp_path, name="other.py")

    groups = by_program([candidate(first, "a"), candidate(other, "b"), candidate(second, "c")])

    assert [[one.key for one in group] for group in groups] == [["a", "c"], ["b"]]


def test_what_runs_differently_has_another_key(tmp_path):
    """Arguments, variables, ranks, micro-batches, device and the text of the program each change it; nothing else."""
    device, other = find_device("H100"), find_device("A100")
    one = program(tmp_path, "--tp=1")
    base = cases_of(one, CONFIG, (0, 4), 4)

    def key(cases=base, on=device, environment=os.environ):
        return identity_of(cases, on, environment)

    changed = [
        key(cases_of(replace(one, arguments=("--tp=2",)), CONFIG, (0, 4), 4)),
        key(cases_of(replace(one, environment={"A": "2"}), CONFIG, (0, 4), 4)),
        key(cases_of(one, CONFIG, (0,), 4)),
        key(cases_of(one, CONFIG, (0, 4), None)),
        key(on=other),
        key(cases_of(program(tmp_path, "--tp=1", name="longer.py"), CONFIG, (0, 4), 4)),
    ]
    assert len({key(), *changed}) == len(changed) + 1
    assert key(environment={**os.environ, "ELSEWHERE": "1"}) == key()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import argparse, os\nfrom pathlib import Path\n", "nothing beside Python"),
        ("import os\nimport torch\n", ""),
        ("from megatron.training import pretrain\n", ""),
        ("from .model import build\n", ""),
        ("import model_of_mine\n", ""),
        ("this is no Python\n", ""),
    ],
)
def test_a_program_of_python_alone_is_not_rehearsed(tmp_path, text, reason):
    """A script that imports nothing installed is no program of torch; whatever else is in it, it may be one."""
    (tmp_path / "own" / "torch").mkdir(parents=True)
    found = reason_it_is_not(program(tmp_path, text=text), {"PYTHONPATH": str(tmp_path / "own")})

    assert reason in found
    assert bool(found) is bool(reason)


def test_an_interpreter_without_torch_is_told(tmp_path):
    """Torch is looked for where the interpreter finds packages, and in PYTHONPATH."""
    interpreter = tmp_path / "env" / "bin" / "python3"
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages" / "numpy").mkdir(parents=True)
    (tmp_path / "own" / "torch").mkdir(parents=True)
    one = replace(program(tmp_path), interpreter=str(interpreter))

    assert "torch is not installed" in reason_it_is_not(one, {})
    assert reason_it_is_not(replace(one, environment={"PYTHONPATH": str(tmp_path / "own")}), {}) == ""
