"""Trials of a study on fewer of its hosts, which are studies of their own in the same storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna import Study

from hardware.rounding import measured
from tuner.storage.record import PHASES, TrialRecord, best_record, read_records
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.request import StudyRequest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OnFewerHosts:
    """Study on some of the hosts of a study.

    Attributes:
        study_name: Name of the study in the storage.
        hosts: Numbers of the hosts, ascending.
        num_hosts: Number of hosts of the whole study.
        records: Trials that ran on these hosts.
        attributes: Attributes of the study.
    """

    study_name: str
    hosts: tuple[int, ...]
    num_hosts: int
    records: Sequence[TrialRecord]
    attributes: Mapping[str, Any]

    @property
    def best(self) -> TrialRecord | None:
        """Record of the fastest trial; None before the first."""
        return best_record(self.records)

    @property
    def hosts_in_words(self) -> str:
        """Hosts in words: `2 of 4 hosts (h0, h1)`."""
        names = ", ".join(f"h{host}" for host in self.hosts)
        return f"{len(self.hosts)} of {self.num_hosts} hosts ({names})"

    @property
    def in_words(self) -> str:
        """Sentence on what ran on these hosts."""
        done = sum(record.finished for record in self.records)
        best = self.best
        fastest = f", the fastest {measured(best.step_time_s)} s per step" if best and best.step_time_s else ""
        return f"{done} trial{'s' * (done != 1)} on {self.hosts_in_words}{fastest}: study {self.study_name}"

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of the study."""
        best = self.best
        return {
            "study_name": self.study_name,
            "hosts": list(self.hosts),
            "trials": sum(record.finished for record in self.records),
            "best": best.params if best else None,
            "best_step_time_s": best.step_time_s if best else None,
        }


def phases_in(study: Study) -> dict[str, tuple[int, ...]]:
    """Return the hosts of each study on fewer hosts, by its name; whatever else the attribute holds is passed over."""
    stored = study.user_attrs.get(PHASES)
    return {
        str(name): tuple(hosts)
        for name, hosts in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(hosts, list) and hosts and all(isinstance(host, int) and host >= 0 for host in hosts)
    }


def phases_of(request: StudyRequest, stored: StoredStudies) -> tuple[OnFewerHosts, ...]:
    """Return the phases of a study on fewer hosts, in the order in which they were first needed."""
    study = stored.find(request.name)
    found = []
    for name, hosts in phases_in(study).items() if study is not None else ():
        phase = stored.find(name)
        if phase is not None:
            found.append(
                OnFewerHosts(
                    study_name=name,
                    hosts=hosts,
                    num_hosts=request.problem.cluster.num_hosts,
                    records=read_records(phase),
                    attributes=phase.user_attrs,
                )
            )
    return tuple(found)
