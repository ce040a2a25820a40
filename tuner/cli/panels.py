"""Panels of `meshtune --help`: the commands by what one wants of them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

PANELS = {
    "Tune": ("init", "run", "status", "best", "export", "trial", "rehearse"),
    "Look": ("space", "predict", "simulate", "rank", "trials", "estimate", "report", "dashboard", "atlas", "catalog"),
    "Plan": ("plan", "place", "replan", "watch"),
    "Keep": ("calibrate", "learn", "share", "backup", "doctor"),
}
"""Commands of each panel: those that find a configuration, that show what is known, that decide what runs where, and
that care for what was measured."""

ELSE = "Look"
"""Panel of commands that are in none."""


class PanelGroup(TyperGroup):
    """Group of commands whose help lists them by panels."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, with the names of all sections aligned."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        rest = [name for name in names if not any(name in panel for panel in PANELS.values())]
        for title, panel in PANELS.items():
            shown = [name for name in panel if name in names] + (rest if title == ELSE else [])
            commands = [(name, self.get_command(ctx, name)) for name in shown]
            room = formatter.width - 6 - width
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), one.get_short_help_str(room)) for name, one in commands if one])
