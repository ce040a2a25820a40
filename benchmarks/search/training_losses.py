"""Compare the losses of a training in which trials run with those of one that nothing disturbs.

    python -m benchmarks.search.training_losses [--trials 3] [--steps 12] [--picture FILE] [--json]

The training of docs/examples/small-gpt is made a study with `meshtune init --checkpoints`, and `meshtune run` tries
layouts of it on two cores: each trial loads the checkpoint of the one before, in its own layout. Then the same program
trains as many steps in one go. The figure is the largest difference between the two losses of a step, relative to the
undisturbed one. `--picture` draws both curves with headless Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.screenshots import Shot, take
from benchmarks.support.timing import answer, benchmark_parser, count_at_least, tell
from trials.command.log_pattern import StepSize, find_pattern
from tuner.report.figures import DRAW_SCRIPT, FAILED, drawing
from tuner.report.markup import concatenate, tag
from tuner.report.page import head_of
from tuner.report.sections.training import Stretch, loss_figure, stretches
from tuner.report.words import in_short
from tuner.run.studies import stored_study
from tuner.storage.record import read_records
from tuner.study_file.config import load_study

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "small-gpt"
LIMIT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures and return the exit status."""
    return answer("training_losses", _arguments(argv), _measure, _print)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("search.training_losses", __doc__)
    parser.add_argument("--trials", type=count_at_least(2), default=3, help="trials, each in a layout of its own (3)")
    parser.add_argument("--steps", type=count_at_least(1), default=10, help="measured steps of each trial (10)")
    parser.add_argument("--picture", type=Path, help="PNG file to draw the curves into")
    return parser.parse_args(argv)


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = _tuned(folder, given.trials, given.steps)
        told = {step: loss for _, losses in found for step, loss in losses}
        tell(f"{len(found)} trials trained {len(told)} steps; now as many in one go")
        alone = _undisturbed(folder, max(told))
        if given.picture is not None:
            _draw(found, alone, folder, given.picture.resolve())
    return {
        "steps": len(told),
        "layouts": [
            {"trial": record.number, "config": record.params, "first_step": losses[0][0], "last_step": losses[-1][0]}
            for record, losses in found
        ],
        "largest_difference": max(abs(told[step] / alone[step] - 1) for step in alone),
        "first_loss": alone[min(alone)],
        "last_loss": alone[max(alone)],
        "last_loss_with_trials": told[max(told)],
    }


def _tuned(folder: Path, trials: int, steps: int) -> list[Stretch]:
    """Run the study, and return the losses of the trials whose steps count."""
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    script, study = folder / "train.sh", folder / "study.yaml"
    text = script.read_text(encoding="utf-8")
    assert text.count("--lr 3e-4") == 1, "the rate at which the example learns"
    script.write_text(text.replace("--lr 3e-4", "--lr 3e-3"), encoding="utf-8")  # so that the loss falls within steps
    _meshtune(
        *("init", "--from-megatron", str(script), "--cluster", "cpu-host", "--checkpoints", "checkpoints"),
        *("--out", str(study)),
    )
    # a confidence of 1 is never exceeded, so that all trials run
    changes = ("search.confidence=1", f"trial.steps={steps}", "space.mbs=[1, 2, 4]")
    _meshtune("run", str(study), "--trials", str(trials), *(word for each in changes for word in ("--set", each)))
    return stretches(read_records(stored_study(load_study(study))))


def _undisturbed(folder: Path, last_step: int) -> dict[int, float]:
    """Return the losses of a training that does not stop, by their step."""
    # the script's own layout, which logs each step and ends after the last
    text = (folder / "train.sh").read_text(encoding="utf-8").replace("--log-interval 10", "--log-interval 1")
    script = folder / "alone.sh"
    script.write_text(f"{text.rstrip()} --exit-interval {last_step}\n", encoding="utf-8")
    ran = subprocess.run(
        ["bash", script.name],  # noqa: S607 # the system's own
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    pattern, step = find_pattern("megatron"), StepSize(samples=1, tokens=1, devices=1)
    read = [reading for line in ran.stdout.splitlines() if (reading := pattern.reading(line, step)) is not None]
    return {one.iteration: one.loss for one in read if one.iteration is not None and one.loss is not None}


def _draw(found: Sequence[Stretch], alone: Mapping[int, float], folder: Path, picture: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("training_losses: no `chromium` on the path; `apt-get install chromium` has one")
    figure = loss_figure(found)
    figure.add_scatter(
        x=[*alone],
        y=[*alone.values()],
        mode="lines",
        name="undisturbed",
        line={"width": 2, "dash": "dot", "color": FAILED},
    )
    page = folder / "losses.html"
    shown = tag("main", tag("section", drawing(figure, "losses", height=400)))
    body = tag("body", shown, tag("script", DRAW_SCRIPT))
    page.write_text(concatenate(tag("html", head_of("losses"), body)), encoding="utf-8")
    take(browser, page, Shot(name=picture.stem, width=1000, height=520), picture.parent)


def _meshtune(*words: str) -> None:
    command = [sys.executable, "-m", "tuner", *words]
    subprocess.run(command, check=True, cwd=ROOT, env=_environment(), stdout=2, timeout=LIMIT_S)


def _environment() -> dict[str, str]:
    """Return the environment with torchrun on the path."""
    return {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"}


def _print(result: Mapping[str, Any]) -> None:
    for each in result["layouts"]:
        print(f"trial {each['trial']}: {in_short(each['config'])}: steps {each['first_step']} to {each['last_step']}")
    print(
        f"{result['steps']} steps, loss {result['first_loss']:.4f} to {result['last_loss']:.4f} undisturbed, "
        f"{result['last_loss_with_trials']:.4f} with trials; largest difference {result['largest_difference']:.2g}"
    )


if __name__ == "__main__":
    sys.exit(main())
