"""Known knobs of the catalog that a study names, as keys of its own knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from costmodels.job.facts import FactValue, Told, parse_facts
from costmodels.job.setting import Setting
from hardware.io.config_file import validate_mapping
from hardware.io.errors import ConfigError, did_you_mean
from trials.knobs.knob import Knob
from trials.knobs.places import text_of
from tuner.knobs.catalog import FRAMEWORKS, catalog_file, find_known, framework_of, known_knobs
from tuner.knobs.known_knob import KnownKnob
from tuner.knobs.needs import unmet_needs
from tuner.knobs.recommended import Verdict, judge_knobs, leading_layouts
from tuner.knobs.within import condition_within
from tuner.space.enumeration import SpaceOptions, build_space
from tuner.study_file.knob_keys import KnobKeys, build_knobs

RECOMMENDED = "recommended"
"""Entry of `space.knobs` that stands for the known knobs that may pay."""

Entries = Literal["recommended"] | Sequence[str | KnobKeys]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyKnobs:
    """Knobs of a study.

    Attributes:
        knobs: Knobs, in the order of the study's entries; recommended ones come last.
        known: Those of them that the catalog knows, by name.
    """

    knobs: tuple[Knob, ...] = ()
    known: tuple[KnownKnob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KnobCatalog:
    """Catalog of a study's framework, judged for the study.

    Attributes:
        setting: Job, cluster and runtime of the study.
        options: Options of its search space.
        framework: Framework that its trials name; None if they name none.
        files: Names of the files that its trials get copies of.
        words: Words of the command whose flags trials exchange in place; empty if they do not.
    """

    setting: Setting
    options: SpaceOptions
    framework: str | None = None
    files: tuple[str, ...] = field(default=())
    words: tuple[str, ...] = field(default=())

    @cached_property
    def name(self) -> str:
        """Name of the study's framework.

        Raises:
            ConfigError: The catalog has no knobs of it.
        """
        rule_set = self.setting.runtime.rule_set
        found = framework_of(rule_set, self.framework)
        if found is None:
            raise ConfigError(
                f"names a known knob, and none is known of {self.framework or self.setting.runtime.name}",
                nearest=f"runtime: {', '.join(FRAMEWORKS[:3])} or mindspeed, or a mapping with name and values",
            )
        return found

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Judgement of each knob of the framework for the study."""
        space = build_space(self.setting, self.options, current=None)
        leaders = leading_layouts(self.setting, space.grid, self.options.memory_headroom)
        return tuple(judge_knobs(tuple(known_knobs(self.name).values()), leaders))

    def build(self, entries: Entries) -> StudyKnobs:
        """Return the knobs of a study's entries.

        Raises:
            ConfigError: An entry makes no sense.
        """
        listed = [RECOMMENDED] if entries == RECOMMENDED else list(entries)
        own: list[tuple[KnownKnob | None, dict[str, Any] | KnobKeys]] = []
        for at, entry in enumerate(listed):
            if entry == RECOMMENDED:
                continue
            try:
                own.append(self._named(entry))
            except ConfigError as error:
                raise error.under(f"space.knobs.{at}" if entries != RECOMMENDED else "space.knobs") from None
        names = {known.name for known, _ in own if known} | {k.name for _, k in own if isinstance(k, KnobKeys)}
        if RECOMMENDED in listed:
            try:
                chosen = [verdict.known for verdict in self.verdicts if verdict.is_recommended]
            except ConfigError as error:
                raise error.under("space.knobs") from None
            own += [(known, {}) for known in chosen if known.name not in names]
        present = {known.name for known, _ in own if known}
        keys, kept = [], []
        for at, (known, changed) in enumerate(own):
            if known is None:
                assert isinstance(changed, KnobKeys), "an entry without a known knob is the user's own"
                keys.append(changed)
                continue
            try:
                keys.append(self._keys_of(known, changed, present))
            except ConfigError as error:
                raise error.under(f"space.knobs.{at}") from None
            kept.append(known)
        knobs = build_knobs(keys)
        return StudyKnobs(
            knobs=tuple(_placed(knob, known) for knob, (known, _) in zip(knobs, own, strict=True)), known=tuple(kept)
        )

    def _named(self, entry: str | KnobKeys) -> tuple[KnownKnob | None, dict[str, Any] | KnobKeys]:
        """Return the known knob of an entry, with the keys that the entry changes; no known knob for the user's own."""
        if isinstance(entry, str):
            return find_known(self.name, entry), {}
        if entry.catalog is None:
            if not entry.name:
                raise ConfigError("is required and missing", key="name", nearest="a name of your own, or catalog: NAME")
            return None, entry
        try:
            known = find_known(self.name, entry.catalog)
        except ConfigError as error:
            raise error.under("catalog") from None
        return known, entry.model_dump(exclude_unset=True, exclude={"catalog"})

    def _keys_of(self, known: KnownKnob, changed: Any, present: set[str]) -> KnobKeys:
        """Return the keys of a known knob in the study."""
        if known.dimension:
            raise ConfigError(
                "is a dimension of layouts, no knob", value=known.name, nearest=f"space: {{{known.dimension}: [...]}}"
            )
        unmet = unmet_needs(self.setting, known.needs)
        if unmet:
            raise ConfigError(f"needs {' and '.join(unmet)}", value=known.name, nearest="leave it out")
        when, is_possible = condition_within(known, tuple(known_knobs(self.name).values()), present, self.setting)
        if not is_possible:
            raise ConfigError(
                f"is set only where {known.when}, which today's values rule out",
                value=known.name,
                nearest="name the knobs that its condition compares too",
            )
        today = known.today(self.setting.job, self.setting.runtime)
        values = changed.get("values")
        if self.words and (said := known.said_by(self.words)) is not None:
            today = said
            if values is None and known.value_of(said) is None:  # the command has a value of its own
                changed = {**changed, "values": [said, *(one.value for one in known.values)]}
        if values and "today" not in changed and today not in values:
            today = values[0]
        mapping = known.as_keys(changed, today, self._file(known)) | ({"when": when} if "when" not in changed else {})
        return validate_mapping(KnobKeys, mapping, file="")

    def _file(self, known: KnownKnob) -> str:
        """Return the name of the file of the study's trials that holds the framework's configuration."""
        if not known.key or self.name in self.files or not self.files:
            return self.name
        if len(self.files) == 1:
            return self.files[0]
        raise ConfigError(
            f"goes to the file of {catalog_file(self.name).title}, and trial.files has several",
            value=known.name,
            nearest=f"name it {self.name} in trial.files; {did_you_mean(self.name, self.files)}",
        )


def facts_of_today(entries: Entries, rule_set: str, framework: str | None) -> Told:
    """Return the facts of the values in use that a study states for known knobs.

    Args:
        entries: Entries of its `space.knobs`.
        rule_set: Rule set of its runtime.
        framework: Framework that its trials name; None if they name none.
    """
    name = framework_of(rule_set, framework)
    told: dict[str, FactValue] = {}
    for entry in entries if name and not isinstance(entries, str) else ():
        if isinstance(entry, KnobKeys) and entry.catalog in known_knobs(name) and "today" in entry.model_fields_set:
            value = known_knobs(name)[entry.catalog].value_of(entry.today)
            told |= dict(value.facts) if value else {}
    return parse_facts(told)


def _placed(knob: Knob, known: KnownKnob | None) -> Knob:
    """Return a knob with what a study's own keys cannot say of its place."""
    if known is None:
        return knob
    removes = tuple((text_of(value.value), value.removes) for value in known.values if value.removes)
    keeps = tuple(text_of(value.value) for value in known.values if value.keeps)
    return replace(knob, place=replace(knob.place, removes=removes, keeps=keeps))
