"""Seconds in the units in which costs and budgets are told."""

from __future__ import annotations

HOUR_S = 3600.0
"""Duration of an hour [s]."""

DAY_S = 86_400.0
"""Duration of a day [s]."""
