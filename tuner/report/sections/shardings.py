"""Mesh and layouts of the best candidate of a step of the user's own, and the meshes that were left out."""

from __future__ import annotations

from tuner.report.data import ReportData
from tuner.report.markup import Content, Html, empty_section, section, table, tag

TITLE = "Mesh and shardings"


def shardings_section(data: ReportData) -> Html:
    """Render the mesh, the specs of arguments and results, and the lines of Python that use them."""
    subject = data.problem.subject
    found = data.best_config and subject.shardings(data.best_config, data.request.name)
    if not found:
        return empty_section("shardings", TITLE, "Mesh and shardings appear here once a trial has completed.")
    answer = found.answer
    command = f"meshtune export {data.request.file} --to {answer.world} --out {found.module}.py"
    rows: list[list[Content]] = [
        [name.removesuffix("s"), tag("code", leaf.path or "(returned)"), tag("code", leaf.type), tag("code", leaf.spec)]
        for name, leaves in answer.groups.items()
        for leaf in leaves
    ]
    left_out = [tag("li", told) for told in subject.left_out()]
    return section(
        "shardings",
        TITLE,
        tag("p", tag("code", answer.mesh_line)),
        tag("p", "The plan leaves the batch whole: every device has all inputs.") if answer.is_whole else None,
        table(["", "tensor", "type", answer.spec_title], rows),
        tag(
            "p",
            tag("code", command),
            f" writes a module with these and {answer.num_changes} layouts inside the step. Then:",
        ),
        tag("pre", "\n".join(found.usage)),
        tag("p", "Meshes that were left out:") if left_out else None,
        tag("ul", *left_out) if left_out else None,
    )
