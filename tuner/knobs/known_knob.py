"""Knob of the catalog: the places of its values in one framework, its needs, and its published or assumed effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.job.facts import Told, profile_fields
from costmodels.job.parallel_config import KnobValue
from costmodels.job.runtime import RuntimeProfile
from costmodels.job.training_job import TrainingJob
from hardware.io.config_file import number_in
from trials.command.own_words import flag_of, segments_of
from trials.knobs.places import text_of

Change = tuple[tuple[str, float], ...]
"""Relative changes by part of the step or of memory: -0.5 halves the part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownValue:
    """Value of a known knob.

    Attributes:
        value: The value itself.
        words: Words of the command; None where the place takes the value as it is.
        removes: Flags of the framework's export that do not go with the value.
        keeps: Whether the export's own flags stand, and nothing is written.
        facts: Facts of the run that the value makes true.
        job: Fields of the job that the value changes, by their names in `TrainingJob`.
        step: Published change of parts of the step, beside what follows from `runtime` and `job`.
        memory: Change of parts of memory, beside the same.
    """

    value: KnobValue
    words: str | None = None
    removes: tuple[str, ...] = ()
    keeps: bool = False
    facts: Told = ()
    job: tuple[tuple[str, Any], ...] = ()
    step: Change = ()
    memory: Change = ()

    def is_in_use(self, job: TrainingJob, runtime: RuntimeProfile) -> bool:
        """Return whether a job and a profile already have what the value makes true."""
        stated = dict(runtime.stated)
        is_stated = all(stated.get(name, value) == value for name, value in self.facts)
        in_profile = all(getattr(runtime, name) == value for name, value in profile_fields(self.facts).items())
        return is_stated and in_profile and all(getattr(job, name) == value for name, value in self.job)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownKnob:
    """Entry of the catalog.

    Attributes:
        name: Name of the knob.
        framework: Name of the framework.
        text: Meaning of the knob in one or two sentences.
        values: Its values; the first is the framework's default.
        source: Where the framework declares it.
        basis: Source of the published effects, or `assumed`, or `cost model`.
        flag: Flag that takes the value; empty if it goes elsewhere.
        environment: Environment variable that takes it; empty if it goes elsewhere.
        key: Key of the framework's configuration file; empty if it goes elsewhere.
        when: Condition under which it is set, as studies write it.
        needs: Names of NEEDS that the study must meet.
        affects: Parts of the step, and `memory`, as studies write them.
        width: Standard deviation of its effect, as a share of the parts that it affects.
        alters_results: Whether it changes the numbers that training computes with, and not only their speed.
        requires: Versions and libraries that nothing here can check, in words; empty if there are none.
        starts_at_default: Whether the default is in use whatever the profile assumes, which was fitted to better runs.
        dimension: Dimension of layouts that searches the same choice, so that it is no knob; empty for all others.
    """

    name: str
    framework: str
    text: str
    values: tuple[KnownValue, ...]
    source: str
    basis: str
    flag: str = ""
    environment: str = ""
    key: str = ""
    when: str = ""
    needs: tuple[str, ...] = ()
    affects: tuple[str, ...] = ()
    width: float = 0.0
    alters_results: bool = False
    requires: str = ""
    dimension: str = ""
    starts_at_default: bool = False

    def value_of(self, value: KnobValue) -> KnownValue | None:
        """Return what is known of a value; None for one that the catalog lacks."""
        for known in self.values:
            if known.value == value and isinstance(known.value, bool) == isinstance(value, bool):
                return known
        return None

    def today(self, job: TrainingJob, runtime: RuntimeProfile) -> KnobValue:
        """Return the value in use: that whose facts the job and the profile have, or the framework's default."""
        if self.starts_at_default:
            return self.values[0].value
        stated = [known for known in self.values if known.facts or known.job]
        in_use = [known.value for known in stated if known.is_in_use(job, runtime)]
        return in_use[0] if in_use else self.values[0].value

    def said_by(self, words: Sequence[str]) -> KnobValue:
        """Return the value that the words of a command say; null if they say none and absence says nothing.

        A number that is none of the values is returned as a number.
        """
        said = {segment.name: segment.values for segment in segments_of(words) if segment.name}
        if self.flag:
            given = said.get(flag_of(self.flag))
            return None if given is None else next((v for v in map(_of_text, given)), True)
        found: KnobValue = None
        for known in self.values:
            own = segments_of((known.words or "").split())
            if known.words is not None and all(said.get(one.name) == one.values for one in own):
                found = known.value if own or found is None else found
        return found

    def as_keys(self, changed: Mapping[str, Any], today: KnobValue, file: str) -> dict[str, Any]:
        """Return the entry as the mapping of a study's own knob.

        Args:
            changed: Keys that the study changes, such as other values.
            today: Value in use.
            file: Name of the file of `trial.files` that holds the framework's configuration.
        """
        keys: dict[str, Any] = {"name": self.name, "values": [known.value for known in self.values], "today": today}
        words = {text_of(known.value) or "null": known.words for known in self.values if known.words is not None}
        if words or self.flag:
            keys["flag"] = words or self.flag
        if self.environment:
            keys["environment"] = self.environment
        if self.key:
            keys |= {"file": file, "key": self.key}
        return keys | {"when": self.when, "affects": list(self.affects)} | dict(changed)


def _of_text(text: str) -> KnobValue:
    """Return the value of a flag as studies write it: a number, true or false, or its text."""
    if (number := number_in(text)) is not None:
        return int(number) if number.is_integer() else number
    return {"true": True, "false": False}.get(text.lower(), text)
