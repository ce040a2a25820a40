"""Words for studies of a user's own step: its space, and the mesh and specs of an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:  # these load numpy
    from costmodels.job.parallel_config import ParallelConfig
    from tuner.own_step.plans import OwnStepPlans
    from tuner.space.enumeration import Space
    from tuner.study_file.config import StudyConfig

MOST_LINES = 24
"""Most lines of specs that are printed of arguments, and of outputs."""


def print_own_space(config: StudyConfig, found: Space) -> None:
    """Print the number of candidates, and how many meshes and plans each rule removed."""
    from tuner.own_step.predictions import rule_reasons

    assert config.own_step is not None, "the caller checked"
    typer.echo(
        f"{len(config.own_step.degrees):,} meshes of data x model; {found.num_before_memory:,} plans on them, "
        f"{found.num_before_memory - found.removed.get('memory', 0):,} of them may fit in memory."
    )
    reasons = rule_reasons(config.options)
    for name, count in found.removed.items():
        what = "plans are predicted to need more than a device's memory minus the headroom"
        typer.echo(f"  {name:<20} {count:>9,}  {what if name == 'memory' else reasons.get(name, '')}".rstrip())


def print_answer(config: StudyConfig, plans: OwnStepPlans, chosen: ParallelConfig) -> None:
    """Print the mesh of a candidate, the layouts of its tensors, and the lines of Python that use them."""
    from tuner.answers.own_step_export import module_name
    from tuner.own_step.answer import grouped_lines
    from tuner.own_step.programs import answer_of, usage_lines

    answer = answer_of(plans, chosen)
    typer.echo(f"  {answer.mesh_line}")
    for name, leaves in answer.groups.items():
        shown = [leaf for leaf in leaves if leaf.path not in answer.kept or name != "outputs"]
        if name == "outputs":
            name = "results beside those that replace arguments" if answer.kept else "results"  # noqa: PLW2901 # its title
        if shown:
            typer.echo(f"{name}:")
        for line in grouped_lines(shown, most=MOST_LINES):
            typer.echo(f"  {line}")
    module = module_name(config)
    typer.echo(
        f"`meshtune export {config.file} --to {answer.world} --out {module}.py` writes a module with these and "
        f"{answer.num_changes} layouts inside the step:"
    )
    for line in usage_lines(plans, module):
        typer.echo(f"  {line}")
