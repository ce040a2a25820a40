"""The parts that a step's time is told in."""

from __future__ import annotations

BREAKDOWN = ("compute", "tp", "cp", "up", "ep", "dp", "pp", "host", "bubble", "optimizer", "overhead")
EXPOSED_PARTS = ("tp", "cp", "up", "ep")
"""Those that collectives inside the layers expose."""
