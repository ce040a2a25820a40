"""The notebook that ranks a model: its cells run in their order, as a reader runs them."""

import ast
import itertools
import json

import pytest

from tests.support.documented import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "notebook" / "rank_your_model.ipynb"


def run_cells(changes=()):
    """Run all cells with some texts replaced; return what each of them would display."""
    scope, shown = {}, []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        for old, new in changes:
            source = source.replace(old, new)
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), scope)  # noqa: S102 # our own notebook
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), scope))  # noqa: S307 # likewise
    return scope, shown


@pytest.mark.parametrize(
    "changes", [(), (('"llama3-8b"', '"mixtral-8x7b"'), ('"global_batch_size": 512', '"global_batch_size": 64'))]
)
def test_cells_show_the_ranking_and_the_parts_of_the_best(tmp_path, monkeypatch, changes):
    """The table has a row for each of ten layouts, the fastest first, and the parts are those of the first row."""
    monkeypatch.chdir(tmp_path)

    scope, (ranked, parts) = run_cells(changes)

    rows = scope["rows"]
    assert ranked.html.count("<tr>") == 1 + len(rows) == 11
    # of steps that agree to four digits the plainest layout comes first
    assert all(row["step_time_s"] < 1.001 * other["step_time_s"] for row, other in itertools.pairwise(rows))
    assert f"<td>{rows[0]['step_time_s']:.4g}</td>" in ranked.html
    assert scope["told"]["step_time_s"] == pytest.approx(rows[0]["step_time_s"])
    assert f"{scope['told']['breakdown_s']['compute'] / rows[0]['step_time_s']:.1%}" in parts.html


def test_a_model_that_fits_nowhere_is_told_in_a_sentence(tmp_path, monkeypatch):
    """Without a layout the notebook says what to do, and a study file that was there stays as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text("mine", encoding="utf-8")

    with pytest.raises(SystemExit, match="No layout fits: take more hosts"):
        run_cells((('"llama3-8b"', '"llama3-405b"'), ('"hosts": 8', '"hosts": 1')))

    assert (tmp_path / "study.yaml").read_text(encoding="utf-8") == "mine"


def test_the_notebook_holds_no_results():
    """Outputs of an earlier run would go stale."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]

    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
