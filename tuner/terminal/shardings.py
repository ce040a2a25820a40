"""Words for the answer of a step of the user's own: its mesh, and the layouts of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:  # these load numpy
    from tuner.subject.contract import Shardings

MOST_LINES = 24
"""Most lines of specs that are printed of arguments, and of outputs."""


def print_shardings(file: str, shardings: Shardings) -> None:
    """Print the mesh of a candidate, the layouts of its tensors, and the lines of Python that use them."""
    from tuner.own_step.answer import grouped_lines

    answer = shardings.answer
    typer.echo(f"  {answer.mesh_line}")
    if answer.is_whole:
        typer.echo("  the plan leaves the batch whole: every device has all inputs, whatever dp the mesh has")
    for name, leaves in answer.groups.items():
        shown = [leaf for leaf in leaves if leaf.path not in answer.kept or name != "outputs"]
        if name == "outputs":
            name = "results beside those that replace arguments" if answer.kept else "results"  # noqa: PLW2901 # its title
        if shown:
            typer.echo(f"{name}:")
        for line in grouped_lines(shown, most=MOST_LINES):
            typer.echo(f"  {line}")
    typer.echo(
        f"`meshtune export {file} --to {answer.world} --out {shardings.module}.py` writes a module with "
        f"these and {answer.num_changes} layouts inside the step:"
    )
    for line in shardings.usage:
        typer.echo(f"  {line}")
