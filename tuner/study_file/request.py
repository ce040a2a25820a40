"""Request of a study file: what to search and how, as the file states it. It is never changed.

The class is not called Study, because Optuna's stored studies are, and many functions know both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardware.dynamics import Trace
from hardware.price_file import Prices
from trials.backend import AbstractBackend, Observation
from trials.trial_keys import ProxyOptions
from tuner.study_file.cost_keys import NO_LIMITS, Limits
from tuner.study_file.known_knobs import KnobCatalog
from tuner.study_file.named_storages import HistoryEntry
from tuner.study_file.storage_address import StorageAddress
from tuner.study_file.study_keys import SearchOptions
from tuner.subject.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrialOptions:
    """Trials of a study.

    Attributes:
        backend: Backend that runs the trials.
        proxy: Options of proxy trials; None if every trial runs at full size.
        time_limit_s: Time limit of one trial [s], or None.
        current: Measurement of the current configuration that the study file states, or None.
    """

    backend: AbstractBackend
    proxy: ProxyOptions | None = None
    time_limit_s: float | None = None
    current: Observation | None = None

    @property
    def only_proxies(self) -> bool:
        """Whether no trial runs at full size, so that trials need the few hosts of their smaller jobs alone."""
        return self.proxy is not None and not self.proxy.full_trials


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Economics:
    """Prices and limits of whole trainings.

    Attributes:
        prices: Prices of device-hours; None if the study names none.
        limits: Limits of the whole training.
        pays_idle_hosts: Whether hosts that a layout leaves idle cost money and power.
    """

    prices: Prices | None = None
    limits: Limits = NO_LIMITS
    pays_idle_hosts: bool = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HistoryOptions:
    """Sources of earlier runs.

    Attributes:
        entries: Addresses of databases, and CSV files relative to the study file.
        kin: Names of studies in the same storage whose runs are history too: those of the same job on more or fewer
            of the hosts.
    """

    entries: tuple[HistoryEntry, ...] = ()
    kin: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StudyRequest:
    """Request of a checked study file.

    Attributes:
        name: Name of the study in its storage.
        file: Path of the file that the study was read from.
        problem: Candidates, and what is minimized.
        search: Options of the search: budget, confidence, parallel trials, seed.
        trials: Backend of the trials, and their limits.
        storage: Address of the database or journal that holds the results.
        history: Sources of earlier runs.
        economics: Prices and limits of the whole training.
        trace: Changes of the cluster over time, or None. Simulated trials run on the hosts that it leaves.
        meaning: Values that give the study's trials their meaning; a resumed study must have equal ones.
        knob_catalog: Catalog of the framework's knobs; None for a step of the user's own.
        notes: Sentences on files that are read outside the study's folder and the working directory, on servers
            that are not given a password, and on a storage in the working directory by default.
    """

    name: str
    file: str
    problem: Problem
    search: SearchOptions
    trials: TrialOptions
    storage: StorageAddress
    history: HistoryOptions
    economics: Economics
    trace: Trace | None
    meaning: dict[str, Any]
    knob_catalog: KnobCatalog | None = None
    notes: tuple[str, ...] = ()
