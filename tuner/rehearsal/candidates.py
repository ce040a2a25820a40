"""Candidates as rehearsals run them, and the answer to a whole candidate: the worst of its stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from hardware.device import Device
from trials.backend import AbstractBackend
from tuner.rehearsal.answer import RankAnswer, Verdict
from tuner.rehearsal.identity import identity_of
from tuner.rehearsal.program import program_of
from tuner.rehearsal.run import Case, cases_of, enough_micro_batches, one_rank_a_stage

_WORST_LAST: tuple[Verdict, ...] = ("accepted", "unknown", "refused")
_MOST_WORDS = 2_000
_MOST_PLACES = 7
_ANY_TRIAL = 0
"""Number of the trial in the words of a rehearsal: an answer does not depend on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Candidate as a rehearsal runs it.

    Attributes:
        key: Text that is equal for candidates that run the same; see `identity_of`.
        cases: Runs, one for each of its pipeline stages.
    """

    key: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateAnswer:
    """Answer of a whole candidate.

    Attributes:
        key: Key of the candidate.
        verdict: Worst verdict of its stages: refused, else unknown, else accepted.
        error: Error of the first stage with that verdict; None if it was accepted.
        where: Lines of the program on the way to that error, the innermost last.
        peaks_bytes: Bytes of all tensors at the peak of each stage; None where a stage did not get that far [pp].
        cpu_s: CPU time of a step, of all stages together [s].
    """

    key: str
    verdict: Verdict
    error: str | None = None
    where: tuple[str, ...] = ()
    peaks_bytes: tuple[int | None, ...] = ()
    cpu_s: float = 0.0

    @staticmethod
    def of_stages(key: str, answers: Sequence[RankAnswer]) -> CandidateAnswer:
        """Return the answer of a candidate from those of its stages, one at least."""
        worst = max(answers, key=lambda answer: _WORST_LAST.index(answer.verdict))
        return CandidateAnswer(
            key=key,
            verdict=worst.verdict,
            error=None if worst.error is None else worst.error[:_MOST_WORDS],
            where=worst.where[-_MOST_PLACES:],
            peaks_bytes=tuple(answer.peak_bytes for answer in answers),
            cpu_s=sum(answer.cpu_s or 0.0 for answer in answers),
        )

    @property
    def peak_bytes(self) -> int | None:
        """Peak of its fullest stage [bytes]; None where some stage has none."""
        peaks = [peak for peak in self.peaks_bytes if peak is not None]
        return max(peaks) if peaks and len(peaks) == len(self.peaks_bytes) else None

    @property
    def in_words(self) -> str:
        """Error with the innermost line of the program; empty if the candidate was accepted."""
        if self.error is None:
            return ""
        first = self.error.strip().partition("\n")[0]
        return f"{first} ({self.where[-1]})" if self.where else first

    def as_json(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        return {
            "key": self.key,
            "verdict": self.verdict,
            "error": self.error,
            "where": list(self.where),
            "peaks_bytes": list(self.peaks_bytes),
            "cpu_s": self.cpu_s,
        }

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> CandidateAnswer | None:
        """Return a stored answer; None if it is not of this version's form."""
        try:
            verdict, peaks = stored["verdict"], tuple(stored["peaks_bytes"])
            is_sound = verdict in _WORST_LAST and all(
                peak is None or (type(peak) is int and 0 <= peak < 1 << 60) for peak in peaks
            )
            return (
                CandidateAnswer(
                    key=str(stored["key"]),
                    verdict=verdict,
                    error=None if stored["error"] is None else str(stored["error"]),
                    where=tuple(map(str, stored["where"])),
                    peaks_bytes=peaks,
                    cpu_s=float(stored["cpu_s"]),
                )
                if is_sound
                else None
            )
        except (KeyError, TypeError, ValueError):
            return None


def candidate_of(
    backend: AbstractBackend, config: ParallelConfig, device: Device, environment: Mapping[str, str]
) -> Candidate:
    """Return a candidate as a rehearsal runs it: as the first rank of each of its stages.

    Args:
        backend: Backend of the study's trials.
        config: Configuration of the candidate.
        device: Device that the program believes to be on.
        environment: Variables of this process.

    Raises:
        ConfigError: its trials start no program that can be rehearsed here.
    """
    program = program_of(backend.loading_nothing().starts(config, trial_number=_ANY_TRIAL), environment)
    cases = cases_of(program, config, one_rank_a_stage(config), enough_micro_batches(config))
    return Candidate(key=identity_of(cases, device, environment), cases=cases)


def by_program(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in groups that one import serves: their programs differ in arguments and variables."""
    groups: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        program = candidate.cases[0].program
        alike = (program.interpreter, program.script, program.module, program.directory)
        groups.setdefault(alike, []).append(candidate)
    return list(groups.values())


def whole_answers(group: Sequence[Candidate], answers: Iterable[RankAnswer]) -> Iterator[CandidateAnswer]:
    """Yield the answer of each candidate of a group once its last stage has answered.

    Args:
        group: Candidates.
        answers: Answers of their cases, one candidate after the other.
    """
    following = iter(answers)
    for candidate in group:
        stages = [answer for _, answer in zip(candidate.cases, following, strict=False)]
        if len(stages) == len(candidate.cases):
            yield CandidateAnswer.of_stages(candidate.key, stages)
