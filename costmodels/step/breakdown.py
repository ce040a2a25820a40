"""Names of the parts into which a step's time is broken down."""

from __future__ import annotations

BREAKDOWN = ("compute", "tp", "cp", "up", "ep", "dp", "pp", "host", "bubble", "imbalance", "optimizer", "overhead")
EXPOSED_PARTS = ("tp", "cp", "up", "ep")
"""Parts that the collectives inside the layers expose."""
