"""Rehearsals beside a run: the candidates that are likely to be tried next run on this machine's CPU before they are.

A trial waits for the rehearsal of its candidate, `WAIT_S` at most. What the framework refuses is dropped, and what
needs more memory than its devices have; both are told, and neither is a trial. Meanwhile, beside running trials, those
that would be tried next are rehearsed ahead. All of it happens in one process of low priority at a time, behind a
boundary. A rehearsal that fails, or says nothing, changes nothing.

Answers are kept in the study's storage (tuner/storage/rehearsals.py), so that a resumed study has them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hardware.device import Device
from hardware.io.errors import ConfigError
from trials.backend import TrialAbility
from tuner.rehearsal.candidates import Candidate, CandidateAnswer, candidate_of
from tuner.rehearsal.memory import RehearsedMemory, rehearsed_memory
from tuner.rehearsal.program import program_of
from tuner.rehearsal.readiness import reason_it_is_not
from tuner.rehearsal.side_process import SideProcess
from tuner.run.driver import interrupts_held
from tuner.run.ledger import Ledger
from tuner.search.parameters import params_of
from tuner.search.rehearsed import Told, believes_refusals
from tuner.storage.rehearsals import keep_rehearsal, kept_rehearsals

WAIT_S = 60.0
"""Longest time that a trial waits for the rehearsal of its candidate [s]."""

AHEAD = 8
"""Number of the next candidates that are rehearsed ahead, beside running trials."""

AT_ONCE = 4
"""Number of candidates that one process rehearses, after which the next ones are chosen anew."""

LIMIT_S = 120.0
"""Time limit for each candidate of a process [s]."""

MOST_LATE = 2
"""Rehearsals that came too late for their trials, after which trials no longer wait."""

MOST_UNKNOWN = 3
"""Answers without a verdict, in a row from the first one on, after which a program counts as one that tells nothing."""

SHOWN_ALIKE = 3
"""Refusals from one line of the program that are told one by one."""

LEADERS, OFF = "leaders", "off"


class Side(Protocol):
    """Running rehearsals of some candidates, as `SideProcess` has them."""

    left: list[str]
    is_over: bool

    def read(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the answers that have come, waiting so long for the first [s]."""

    def close(self) -> None:
        """End them."""


class Start(Protocol):
    """Function that begins to rehearse candidates."""

    def __call__(
        self, candidates: Sequence[Candidate], *, device: Device, limit_s: float, environment: Mapping[str, str]
    ) -> Side:
        """Begin to rehearse candidates, in the order in which their answers are wanted."""


class Rehearsals:
    """Rehearsals beside one run of a study.

    Args:
        ledger: Trials of the study, and its storage.
        clock: Clock of the waits [s]; nobody sets it.
        start: Function that begins to rehearse candidates.

    Attributes:
        notes: Sentences that were not told yet.
    """

    def __init__(
        self, ledger: Ledger, *, clock: Callable[[], float] = time.monotonic, start: Start = SideProcess
    ) -> None:
        self._ledger = ledger
        self._begin_side = start
        self._prepared, self._sampler = ledger.tasks.prepared, ledger.tasks.sampler
        self._clock = clock
        self._device = self._prepared.problem.cluster.devices[0]
        self._is_on = False
        self._side: Side | None = None
        self._answers: dict[int, CandidateAnswer] = {}
        self._memory: dict[int, RehearsedMemory] = {}
        self._asked: dict[str, list[int]] = {}  # positions that a key stands for
        self._since: dict[int, float] = {}  # when a trial began to wait for its candidate
        self._late: set[int] = set()
        self._told: set[object] = set()
        self._looked_ahead: object = None
        self._silent = 0  # processes in a row that ended without an answer
        self.notes: list[str] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is being rehearsed."""
        return self._side is not None

    def begin(self) -> None:
        """Decide whether candidates are rehearsed, and take the answers that the study's storage keeps."""
        wanted = self._prepared.request.search.rehearse
        if wanted == OFF:
            return
        reason = self._reason_against(is_asked_for=wanted == LEADERS)
        if reason:
            if wanted == LEADERS:
                self._tell("off", f"candidates are not rehearsed: {reason}")
            return
        self._is_on = True
        self._tell(
            "on", "candidates are rehearsed on this machine's CPU before they are tried (search.rehearse: off does not)"
        )
        for row in kept_rehearsals(self._ledger.claim.store, self._prepared.request.name):
            answer = CandidateAnswer.from_json(row.answer)
            position = self._sampler.position_of(params_of(row.config))
            if answer is None or position is None or answer.verdict == "unknown":
                continue
            candidate = self._candidate(position)
            if candidate is not None and candidate.key == answer.key:
                self._take(position, answer)
        self._teach()

    def close(self) -> None:
        """End what is being rehearsed."""
        side, self._side = self._side, None
        if side is not None:
            side.close()

    def holds_back(self, position: int) -> bool:
        """Return whether the trial of a candidate should wait for its rehearsal, which is begun if it was not yet."""
        if not self._is_on or position in self._answers:
            return False
        if position == self._sampler.in_use:
            # beside its trial: whether it refuses what runs today says what a rehearsal's refusals are worth
            if self._side is None and not self._device.is_processor:
                self._start(position)
            return False
        if not self._is_worth_a_wait(position):
            return False
        candidate = self._candidate(position)
        if candidate is None:
            return False
        if self._side is None or self._side.is_over or candidate.key not in self._side.left:
            self._start(position)
        return self._side is not None

    def _is_worth_a_wait(self, position: int) -> bool:
        """Return whether a trial waits for the rehearsal of a candidate, for WAIT_S at most."""
        if position in self._ledger.trials.observations().explored or len(self._late) >= MOST_LATE:
            return False
        if any(answer.verdict == "unknown" for answer in list(self._answers.values())[-1:]):
            return False  # the next one is likely to tell as little
        if self._clock() - self._since.setdefault(position, self._clock()) < WAIT_S:
            return True
        if position not in self._late:
            self._late.add(position)
            no_more = "; trials no longer wait for rehearsals" if len(self._late) >= MOST_LATE else ""
            self._tell(position, f"a rehearsal takes longer than {WAIT_S:.0f} s, its trial starts without{no_more}")
        return False

    def go_ahead(self) -> None:
        """Begin to rehearse what would be tried next, unless something is rehearsed, or it is all known."""
        if not self._is_on or self._side is not None or self._device.is_processor:
            return
        observations = self._ledger.trials.observations()
        state = (observations.num_decisions, observations.num_ended, len(self._answers))
        if state == self._looked_ahead:
            return
        self._looked_ahead = state
        following = self._sampler.likely_next(observations, AHEAD)
        if self._sampler.in_use is not None:  # its trial may be stated in the study, or from an earlier run
            following.insert(0, self._sampler.in_use)
        unknown = [position for position in dict.fromkeys(following) if position not in self._answers]
        if unknown:
            self._start(unknown[0], *unknown[1:])

    def look(self, timeout_s: float = 0.0) -> bool:
        """Take the answers that have come, waiting so long for the first [s]; return whether any has."""
        side = self._side
        if side is None:
            return False
        try:
            lines = side.read(timeout_s)
        except ValueError as error:  # a line that is no JSON
            self._turn_off(str(error))
            return False
        found = False
        for line in lines:
            if "off" in line:
                self._turn_off(str(line["off"]))
                return False
            found = self._receive(line) or found
        if side.is_over:
            self.close()
            self._silent = self._silent + 1 if len(side.left) and not found else 0
            # what was not answered is not asked again
            for key in side.left:
                words = f"its rehearsal ended without an answer, within {LIMIT_S:.0f} s"
                self._receive(CandidateAnswer(key=key, verdict="unknown", error=words).as_json())
        if found:
            self._teach()
        self._judge()
        return found

    # What is asked

    def _reason_against(self, *, is_asked_for: bool) -> str:
        """Return why nothing is rehearsed; empty if it may be."""
        if TrialAbility.PLANS in self._prepared.backend.abilities:
            return "a program that runs plans traces its step, which a rehearsal with tensors of no values cannot"
        config = self._prepared.problem.with_knobs(self._sampler.candidates.config(0))
        try:
            program = program_of(self._prepared.backend.loading_nothing().starts(config, trial_number=0), os.environ)
            return "" if is_asked_for else reason_it_is_not(program, os.environ)
        except ConfigError as error:
            return f"{error.key} {error.rule}"
        except OSError as error:
            return str(error)

    def _candidate(self, position: int) -> Candidate | None:
        """Return a candidate as a rehearsal runs it; None if it cannot."""
        config = self._sampler.choices.config(position)
        try:
            return candidate_of(self._prepared.backend, config, self._device, os.environ)
        except ConfigError as error:
            self._tell("cannot", f"a candidate cannot be rehearsed: {error.key} {error.rule}")
        except OSError as error:  # a file that was removed while it was looked at
            self._tell("cannot", f"a candidate cannot be rehearsed: {error}")
        return None

    def _start(self, *wanted: int) -> None:
        """Begin to rehearse candidates in this order, in place of what is being rehearsed."""
        self.close()
        positions = list(wanted)
        if len(positions) == 1 and not self._device.is_processor:
            following = self._sampler.likely_next(self._ledger.trials.observations(), AT_ONCE)
            positions += [one for one in following if one not in self._answers and one not in positions]
        self._asked = {}
        candidates: list[Candidate] = []
        for position in positions[:AT_ONCE]:
            candidate = self._candidate(position)
            if candidate is None:
                continue
            if candidate.key not in self._asked:
                candidates.append(candidate)
            self._asked.setdefault(candidate.key, []).append(position)
        if not candidates:
            return
        try:
            self._side = self._begin_side(
                candidates, device=self._device, limit_s=LIMIT_S * len(candidates), environment=os.environ
            )
        except (OSError, ValueError) as error:
            self._turn_off(str(error))

    # What is answered

    def _receive(self, line: Mapping[str, Any]) -> bool:
        """Take and keep one answer; return whether it is one."""
        answer = CandidateAnswer.from_json(line)
        if answer is None:
            return False
        if self._side is not None and answer.key in self._side.left:
            self._side.left.remove(answer.key)
        for position in self._asked.get(answer.key, ()):
            self._take(position, answer)
            memory = self._memory.get(position)
            needs = {} if memory is None else {"needed_bytes": memory.needed_bytes, "of_bytes": memory.capacity_bytes}
            with interrupts_held(), self._ledger.claim.together():
                keep_rehearsal(
                    self._ledger.claim.store,
                    self._prepared.request.name,
                    self._sampler.choices.values(position),
                    answer.as_json() | needs,
                )
            if answer.verdict == "refused":
                self._tell_refused(position, answer)
            elif answer.verdict == "unknown":
                self._tell("unknown", f"unknown in rehearsal, which changes nothing: {answer.in_words}")
        return True

    def _take(self, position: int, answer: CandidateAnswer) -> None:
        self._answers.pop(position, None)
        self._answers[position] = answer
        try:
            setting = self._prepared.problem.subject.setting
        except ConfigError:  # a step of the user's own has no model of its memory
            return
        if answer.verdict == "accepted":
            found = rehearsed_memory(setting, self._sampler.choices.config(position), answer.peaks_bytes)
            if found is not None:
                self._memory[position] = found

    def _teach(self) -> None:
        """Have the sampler know what all rehearsals told."""
        told = self._told_so_far()
        self._sampler.learn_rehearsals(told)
        self._ledger.trials.forget_observations()
        observations = self._ledger.trials.observations()
        for position in sorted(observations.rehearsed.too_large - observations.explored):
            memory = self._memory[position]
            needs = f"needs {memory.needed_bytes / 2**30:.1f} of {memory.capacity_bytes / 2**30:.1f} GiB"
            self._tell(("large", position), f"too large in rehearsal: {self._words(position)} {needs}")
        num_candidates = self._sampler.choices.num_candidates
        if told.refused and not believes_refusals(told, observations.explored, num_candidates):
            ran = told.refused & observations.explored
            why = "a refused candidate ran" if ran else f"all of the first {len(told.refused)} candidates were refused"
            self._tell("believed", f"refusals of rehearsals are ignored: {why}")

    def _told_so_far(self) -> Told:
        of = {
            verdict: frozenset(at for at, answer in self._answers.items() if answer.verdict == verdict)
            for verdict in ("refused", "accepted")
        }
        needed = {at: memory.needed_bytes for at, memory in self._memory.items()}
        return Told(refused=of["refused"], accepted=of["accepted"], needed_bytes=needed)

    def _judge(self) -> None:
        """Turn rehearsals off where they tell nothing."""
        answers = list(self._answers.values())
        if len(answers) >= MOST_UNKNOWN and all(answer.verdict == "unknown" for answer in answers):
            self._turn_off(f"nothing was told of the first {len(answers)} candidates")
        elif self._silent >= MOST_LATE:
            self._turn_off("its process ends without an answer")

    def _turn_off(self, reason: str) -> None:
        self.close()
        self._is_on = False
        self._tell("off", f"candidates are not rehearsed: {reason}")

    def _tell_refused(self, position: int, answer: CandidateAnswer) -> None:
        """Tell a refusal, unless SHOWN_ALIKE were told that came from the same line of the program."""
        line = answer.where[-1] if answer.where else ""
        alike = sum(other.where[-1:] == answer.where[-1:] for other in self._answers.values())
        if alike <= SHOWN_ALIKE:
            self._tell(("refused", position), f"refused in rehearsal: {self._words(position)}: {answer.in_words}")
        else:
            self._tell(("alike", line), f"refused in rehearsal: more at {line}; `meshtune status` lists them")

    def _words(self, position: int) -> str:
        return ",".join(f"{name}={value}" for name, value in self._sampler.choices.values(position).items())

    def _tell(self, what: object, note: str) -> None:
        """Add a note that was not told yet."""
        if what not in self._told:
            self._told.add(what)
            self.notes.append(note)
