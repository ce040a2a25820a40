"""Table of the facts of a run, from the catalog."""

from __future__ import annotations

from costmodels.job.facts import Fact, facts, shown

_NEEDS = {
    "": "",
    "experts": "Needs experts.",
    "bf16": "Needs weights in bf16.",
    "fp8": "Needs products in fp8.",
    "offload": "Needs states on the host.",
    "muon": "Needs Muon.",
}
_PLACES = ("megatron", "mindspeed", "torchtitan", "deepspeed", "nanotron", "environment")


def fact_tables() -> dict[str, str]:
    """Return the tables of facts: those that a framework can be told, and the others."""
    told = [fact for fact in facts().values() if fact.written]
    others = [fact for fact in facts().values() if not fact.written]
    return {"told": _table(told, "said by"), "others": _table(others, "")}


def _table(rows: list[Fact], last: str) -> str:
    head = ["fact", "values", *([last] if last else [])]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for fact in rows:
        cells = [f"`{fact.name}`: {' '.join(f'{fact.text} {_NEEDS[fact.needs]}'.split())}", _values(fact)]
        lines.append(f"| {' | '.join(_cell(cell) for cell in [*cells, *([_words(fact)] if last else [])])} |")
    return "\n".join(lines)


def _values(fact: Fact) -> str:
    if fact.values:
        return ", ".join(f"`{shown(value)}`" for value in fact.values)
    lower, upper = fact.bounds
    return f"{'whole numbers' if fact.is_whole else 'numbers'} from {lower:,.10g} to {upper:,.10g}"


def _words(fact: Fact) -> str:
    """Return the words that are written for each value, by framework."""
    found = []
    for place in _PLACES:
        choices = fact.written.get(place, {})
        said = "; ".join(f"`{words[0].replace('{}', 'N')}`" for words in choices.values())
        if said:
            found.append(f"{place}: {said}")
    return "<br>".join(found)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
