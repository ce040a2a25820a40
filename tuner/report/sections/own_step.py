"""Mesh and layouts of the best candidate of a step of the user's own, and the meshes that were left out."""

from __future__ import annotations

from tuner.answers.own_step_export import module_name
from tuner.own_step.programs import answer_of, usage_lines
from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, empty_section, section, table, tag

TITLE = "Mesh and shardings"


def own_step_section(data: ReportData) -> Html:
    """Render the mesh, the specs of arguments and results, and the lines of Python that use them."""
    plans = data.config.own_step
    assert plans is not None, "only pages of such studies have this section"
    if data.best_config is None:
        return empty_section("shardings", TITLE, "Mesh and shardings appear here once a trial has completed.")
    answer = answer_of(plans, data.best_config)
    module = module_name(data.config)
    command = f"meshtune export {data.config.file} --to {answer.world} --out {module}.py"
    rows: list[list[Content]] = [
        [name.removesuffix("s"), tag("code", leaf.path or "(returned)"), tag("code", leaf.type), tag("code", leaf.spec)]
        for name, leaves in answer.groups.items()
        for leaf in leaves
    ]
    left_out = [
        tag("li", f"data={plans.cluster.num_devices // tp}, model={tp}: {plans.on(tp).reason}")
        for tp in plans.degrees
        if not plans.on(tp).candidates
    ]
    return section(
        "shardings",
        TITLE,
        tag("p", tag("code", answer.mesh_line)),
        table(["", "tensor", "type", answer.spec_title], rows),
        tag(
            "p",
            tag("code", command),
            f" writes a module with these and {answer.num_changes} layouts inside the step. Then:",
        ),
        tag("pre", "\n".join(usage_lines(plans, module))),
        tag("p", "Meshes that were left out:") if left_out else None,
        tag("ul", *left_out) if left_out else None,
    )
