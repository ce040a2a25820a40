"""Tables of the known knobs of each framework, from the catalog."""

from __future__ import annotations

from trials.knobs.places import text_of
from tuner.knobs.catalog import FRAMEWORKS, known_knobs
from tuner.knobs.known_knob import KnownKnob, KnownValue
from tuner.knobs.needs import NEEDS


def knob_tables() -> dict[str, str]:
    """Return the table of each framework's knobs, by the framework's name."""
    return {framework: _table(list(known_knobs(framework).values())) for framework in FRAMEWORKS}


def _table(knobs: list[KnownKnob]) -> str:
    lines = ["| knob | values and where they go | set where | effect |", "|---|---|---|---|"]
    lines += [f"| {_name(knob)} | {_values(knob)} | {_condition(knob)} | {_effect(knob)} |" for knob in knobs]
    return "\n".join(lines)


def _name(knob: KnownKnob) -> str:
    marked = " Alters results." if knob.alters_results else ""
    requires = f" Requires {knob.requires}." if knob.requires else ""
    return _cell(f"`{knob.name}`: {knob.text}{marked}{requires} Source: {knob.source}")


def _values(knob: KnownKnob) -> str:
    if knob.dimension:
        return f"`space.{knob.dimension}`, a dimension of layouts"
    place = f"`{knob.flag or knob.environment or knob.key}` " if knob.flag or knob.environment or knob.key else ""
    return _cell(place + "; ".join(_value(value) for value in knob.values))


def _value(value: KnownValue) -> str:
    shown = "absent" if value.value is None else text_of(value.value)
    if value.keeps:
        return f"{shown} (as exported)"
    return shown if value.words is None else f"{shown}: {f'`{value.words}`' if value.words else 'no flag'}"


def _condition(knob: KnownKnob) -> str:
    needs = " and ".join(NEEDS[need][1] for need in knob.needs)
    return _cell("; ".join(part for part in (f"`{knob.when}`" if knob.when else "", needs) if part) or "always")


def _effect(knob: KnownKnob) -> str:
    if knob.dimension:
        return "predicted"
    changes = [_changes(value) for value in knob.values if value.step or value.memory]
    facts = "predicted anew with each value" if any(value.facts or value.job for value in knob.values) else ""
    parts = ", ".join(knob.affects) or "unknown parts"
    return _cell("; ".join([f"{parts}, ±{knob.width:.1%} of them", *([facts] * bool(facts)), *changes, knob.basis]))


def _changes(value: KnownValue) -> str:
    shown = "absent" if value.value is None else text_of(value.value)
    step = [f"{by:+.0%} {part}" if abs(by) >= 0.01 else f"{by:+.1%} {part}" for part, by in value.step]
    memory = [f"{by:+.0%} {part} (memory)" for part, by in value.memory]
    return f"{shown}: {', '.join(step + memory)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
