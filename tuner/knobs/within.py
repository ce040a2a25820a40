"""Conditions of known knobs inside a study, which may have only some of the knobs that a condition compares."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from costmodels.job.setting import Setting
from trials.knobs.condition import OF_LAYOUT, parse_condition
from tuner.knobs.known_knob import KnownKnob
from tuner.knobs.needs import unmet_needs


def condition_within(
    knob: KnownKnob, catalog: Sequence[KnownKnob], present: Collection[str], setting: Setting
) -> tuple[str, bool]:
    """Return a knob's condition without the knobs that a study lacks, and whether their values allow it.

    A knob that the study lacks has the value in use, so that its comparison is decided. One that does not suit the
    study's model or cluster decides nothing.

    Args:
        knob: Known knob.
        catalog: All knobs of its framework.
        present: Names of the knobs that the study has.
        setting: Setting of the study.
    """
    by_name = {one.name: one for one in catalog}
    kept = []
    for text in re.split(r"\band\b", knob.when) if knob.when else ():
        name = text.split()[0]
        if name in OF_LAYOUT or name in present:
            kept.append(text.strip())
            continue
        other = by_name[name]
        if unmet_needs(setting, other.needs):
            continue
        values = {name: tuple(value.value for value in other.values)}
        if not parse_condition(text, values).on_knobs({name: other.today(setting.job, setting.runtime)}):
            return "", False
    return " and ".join(kept), True
