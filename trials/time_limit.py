"""Time limit of a trial as study files write it: in the words of Slurm's `--time`, or as a number of seconds."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_CLOCK = re.compile(r"(?:(?P<days>\d{1,6})-)?(?P<clock>\d{1,6}(?::\d{1,2}){0,2})", re.ASCII)
"""Forms of https://slurm.schedmd.com/sbatch.html#OPT_time: `minutes:seconds`, `hours:minutes:seconds`, `days-hours`,
`days-hours:minutes` and `days-hours:minutes:seconds`. Its bare number of minutes is left out: it would read like
seconds."""

_UNITS_S = (3600, 60, 1)


def parse_time_limit(value: Any) -> Any:
    """Return the seconds that a text states; any other value as it is.

    Raises:
        ValueError: The text has none of the forms.
    """
    if not isinstance(value, str):
        return value
    found = _CLOCK.fullmatch(value.strip())
    if found is None or not (found["days"] or ":" in found["clock"]):
        raise ValueError("must be a time such as 30:00, 1:30:00 or 2-00:00:00, as in Slurm, or a number of seconds")
    parts = [int(part) for part in found["clock"].split(":")]
    # after days the first part is hours; without them the last part is seconds
    units_s = _UNITS_S if found["days"] else _UNITS_S[-len(parts) :]
    clock_s = sum(part * unit_s for part, unit_s in zip(parts, units_s, strict=False))
    return float(86400 * int(found["days"] or 0) + clock_s)


TimeLimit = Annotated[
    float,
    BeforeValidator(parse_time_limit),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": f"^{re.sub(r'[?]P<[a-z]+>', '?:', _CLOCK.pattern)}$"},
            ]
        }
    ),
]
"""Longest time of one trial [s]."""
