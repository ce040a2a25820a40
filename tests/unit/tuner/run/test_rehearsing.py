"""Rehearsals beside a run, whose answers come from the test in place of a process."""

import os
import sys
from dataclasses import dataclass, field

import pytest

from tests.support.studies.in_process_executor import InProcessExecutor
from trials.backend import Observation, Status
from tuner.rehearsal.candidates import CandidateAnswer
from tuner.run.loop import run_study
from tuner.run.rehearsing import MOST_LATE, MOST_UNKNOWN, WAIT_S, Rehearsals
from tuner.storage.rehearsals import read_rehearsals
from tuner.study_file.config import load_study

STUDY = """
name: rehearsed
model: llama-7b
cluster: {{name: dgx-a100, hosts: 1}}
job: {{sequence_length: 4096, global_batch_size: 64}}
space: {{pp: [1, 2], cp: [1], up: [1], vpp: [1], mbs: [1, 2]}}
search: {{draws: 20, max_trials: 6, seed: 1, baseline: false}}
trial:
  backend: command
  command: [{python}, train.py, "{{pp}}", "{{tp}}", "{{mbs}}"]
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A function that loads the study with changes, each time as its own command would; torch seems to be installed."""
    (tmp_path / "packages" / "torch").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    (tmp_path / "study.yaml").write_text(STUDY.format(python=sys.executable))
    (tmp_path / "train.py").write_text("import torch\n")
    return lambda *changes: load_study(
        tmp_path / "study.yaml", overrides=changes, storage=f"sqlite:///{tmp_path / 'study.db'}"
    )


class Steps:
    """Trials that all run, the faster the larger dp is."""

    origin = "measured"

    def measure(self, config, **_):
        """As the executor calls it."""
        return Observation(status=Status.OK, step_times_s=(8.0 / config.dp + config.pp,) * 3, origin="measured")


@dataclass
class Script:
    """Answers of rehearsals by the arguments pp, tp and mbs of the program.

    Attributes:
        answer: Function that returns the verdict of such arguments, its error, and its peak on each stage [bytes].
        asked: Arguments that were asked for, in order.
        silent: Whether nothing is ever answered.
    """

    answer: object
    asked: list[tuple[int, ...]] = field(default_factory=list)
    silent: bool = False

    def __call__(self, candidates, **_):
        """Begin, as `SideProcess` does."""
        return Side(self, list(candidates))


class Side:
    """Rehearsals that are answered one for each look."""

    def __init__(self, script, candidates):
        self.script, self.candidates = script, candidates
        self.left = [candidate.key for candidate in candidates]
        self.is_over = False

    def read(self, _timeout_s):
        """The next answer."""
        if self.script.silent:
            return []
        if not self.candidates:
            self.is_over = True
            return []
        candidate = self.candidates.pop(0)
        arguments = tuple(map(int, candidate.cases[0].program.arguments))
        self.script.asked.append(arguments)
        verdict, error, peak = self.script.answer(*arguments)
        peaks = (peak,) * len(candidate.cases) if peak else ()
        return [CandidateAnswer(key=candidate.key, verdict=verdict, error=error, peaks_bytes=peaks).as_json()]

    def close(self):
        """End."""


def run(request, script, clock=None):
    """Run the study; return its result, the trials, and the notes that were told."""
    notes, executor = [], InProcessExecutor(Steps())

    def rehearsals(ledger):
        return Rehearsals(ledger, start=script, **({"clock": clock} if clock else {}))

    def on_progress(progress):
        notes.extend([progress.note] if progress.note else [])

    result = run_study(request, on_progress=on_progress, executor=executor, rehearsals_of=rehearsals)
    return result, [(config.pp, config.tp, config.mbs) for _, config in executor.seen], notes


def refuse_tp_below_4(_pp, tp, _mbs):
    """A framework that wants tp to be 4 or more."""
    return ("accepted", None, 8 << 30) if tp >= 4 else ("refused", f"ValueError: tp={tp} is too small", 0)


def test_what_is_refused_is_no_trial(study):
    """Refused candidates are told with the framework's words, kept, and tried neither then nor in the next run, which
    asks for none of them again.
    """
    script = Script(refuse_tp_below_4)

    result, tried, notes = run(study("search.max_trials=3"), script)

    refused = {one for one in script.asked if one[1] < 4}
    assert refused
    assert all(tp >= 4 for _, tp, _ in tried)
    assert {record.status for record in result.records} == {Status.OK}
    assert any("ValueError: tp=" in note for note in notes)
    kept = read_rehearsals(study().storage, "rehearsed")
    assert {row.config["tp"] for row in kept if row.answer["verdict"] == "refused"} == {tp for _, tp, _ in refused}

    again = Script(refuse_tp_below_4)
    _, more, _ = run(study(), again)

    assert all(tp >= 4 for _, tp, _ in more)
    assert not set(again.asked) & set(script.asked)


def test_what_needs_more_than_there_is_is_no_trial(study):
    """Candidates whose rehearsed tensors take 100 GiB of 80 are not tried, and told with both."""
    script = Script(lambda _pp, tp, _mbs: ("accepted", None, (100 if tp < 4 else 20) << 30))

    _, tried, notes = run(study(), script)

    assert any(tp < 4 for _, tp, _ in script.asked)
    assert all(tp >= 4 for _, tp, _ in tried)
    assert any("too large in rehearsal" in note and "needs 1" in note for note in notes)


def test_the_configuration_in_use_runs_whatever_is_said(study):
    """A refused configuration of today is the first trial; as it ran, refusals are ignored from then on."""
    script = Script(lambda *_: ("refused", "RuntimeError: no", 0))

    _, tried, notes = run(study("current={tp: 2, dp: 4, mbs: 1}"), script)

    assert tried[0] == (1, 2, 1)
    assert len(tried) == 6
    assert any("refusals of rehearsals are ignored" in note for note in notes)


def test_what_says_nothing_changes_nothing_and_is_told_once(study):
    """With unknown answers alone the trials are those of a study without rehearsals, and after a few none is asked."""
    script = Script(lambda *_: ("unknown", "no stand-in for a kernel", 0))

    _, tried, notes = run(study(), script)
    _, plain, quiet = run(study("search.rehearse=off", "name=plain"), Script(None))

    assert tried == plain
    assert len(script.asked) == MOST_UNKNOWN
    assert sum("no stand-in for a kernel" in note for note in notes) == 1
    assert not any("rehears" in note for note in quiet)


def test_a_trial_does_not_wait_for_ever(study):
    """A rehearsal that is never answered holds a trial back for WAIT_S, and after MOST_LATE of them no other."""
    now_s = 0.0

    def clock():
        nonlocal now_s
        now_s += 1.0
        return now_s

    script = Script(None, silent=True)
    _, tried, notes = run(study("search.parallel_trials=1"), script, clock)

    assert len(tried) == 6
    assert sum("takes longer" in note for note in notes) == MOST_LATE
    assert WAIT_S * MOST_LATE <= now_s < WAIT_S * MOST_LATE * 3


def test_a_process_that_dies_turns_rehearsals_off(study):
    """What ends without an answer is told, and the study goes on without."""

    class Dying(Side):
        def read(self, _timeout_s):
            self.is_over = True
            return []

    _, tried, notes = run(study(), lambda candidates, **_: Dying(Script(None), list(candidates)))

    assert len(tried) == 6
    assert sum("not rehearsed" in note or "ended without an answer" in note for note in notes) >= 1


def test_without_a_boundary_nothing_is_rehearsed(study):
    """The process says why it does nothing; that is told, and the study goes on."""

    class Refusing(Side):
        def read(self, _timeout_s):
            return [{"off": "namespaces: Operation not permitted"}]

    _, tried, notes = run(study(), lambda candidates, **_: Refusing(Script(None), list(candidates)))

    assert len(tried) == 6
    assert sum("Operation not permitted" in note for note in notes) == 1


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_program_of_python_alone_is_rehearsed_only_if_asked_for(study, tmp_path, asked_for):
    """By default nothing of such a program is rehearsed, without a word; `leaders` does so all the same."""
    (tmp_path / "train.py").write_text("import sys\n")
    script = Script(refuse_tp_below_4)

    _, _, notes = run(study(*(["search.rehearse=leaders"] if asked_for else [])), script)

    assert bool(script.asked) is asked_for
    assert any("rehears" in note for note in notes) is asked_for


def test_trials_without_a_command_are_not_rehearsed(study):
    """Simulated trials start no program: by default that is silent, and told where rehearsals were asked for."""
    script = Script(None)

    _, _, quiet = run(study("trial={backend: simulated}"), script)
    _, _, told = run(study("trial={backend: simulated}", "search.rehearse=leaders", "name=other"), script)

    assert not script.asked
    assert not any("rehearsed" in note for note in quiet)
    assert any("candidates are not rehearsed" in note for note in told)


def test_programs_that_run_plans_are_not_rehearsed(study):
    """A program that takes a plan traces its step itself: it is not rehearsed, and told so where it was asked for."""
    script, command = Script(None), f'trial.command=[{sys.executable}, train.py, "{{plan}}"]'

    _, tried, notes = run(study(command, "planner.name=megatron", "search.rehearse=leaders"), script)

    assert len(tried) == 6
    assert not script.asked
    assert any("candidates are not rehearsed: a program that runs plans" in note for note in notes)
