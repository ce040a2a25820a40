"""A study of the user's own knobs, whose trials run a real command with a hidden optimum, from run to export."""

import json
import sys

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.command_line import in_process
from tests.support.studies.commanded_study import MODEL, run_here
from tests.support.studies.in_process_executor import InProcessExecutor
from trials.command.backend import COMMAND_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner.answers.best import best_known
from tuner.run.loop import run_study
from tuner.run.studies import prepared_of
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

PROGRAM = """
import json, os, sys
tp, words = int(sys.argv[1]), sys.argv[2:]
settings = json.load(open(words[words.index("--settings") + 1]))
size = int(words[words.index("--bucket") + 1]) if "--bucket" in words else 4
factor = 1 + 0.05 * abs(size - 16) / 16
factor *= {"Ring": 1.1, "Tree": 0.9}.get(os.environ.get("ALGORITHM"), 1.0)
factor *= 0.93 if settings["nested"]["prefetch"] else 1.0
factor *= 0.95 if tp > 1 and "--overlap" in words else 1.0
for step in range(1, 7):
    print(f"step {step} took {(50 + 10 / tp) * factor} ms", flush=True)
"""

STUDY = """
name: knobs
model: {model}
cluster: {{name: cpu-host, hosts: 1, devices_per_host: 2}}
job: {{sequence_length: 128, global_batch_size: 16}}
current: {{tp: 1, dp: 2, mbs: 1}}
search: {{max_trials: 24, seed: 1, repeats: 0}}
space:
  pp: [1]
  cp: [1]
  up: [1]
  mbs: [1, 2]
  knobs:
    - {{name: bucket, values: [4, 8, 16, 32], flag: --bucket, affects: [dp communication]}}
    - {{name: algorithm, values: [null, Ring, Tree], environment: ALGORITHM}}
    - {{name: prefetch, file: settings, key: nested.prefetch}}
    - {{name: overlap, flag: --overlap, when: tp > 1}}
    - {{name: unused, values: [1, 2, 3], flag: --unused}}
trial:
  backend: command
  command: [{python}, train.py, "{{tp}}", "{{knobs}}", --settings, "{{settings}}"]
  files: {{settings: settings.json}}
  launch: once
  log: {{pattern: ["step (?P<iteration>\\\\d+) took (?P<step_ms>[\\\\d.]+) ms"]}}
  warmup_steps: 1
  steps: 4
storage: sqlite:///{storage}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The file of the study after its run, and its configuration."""
    folder = tmp_path_factory.mktemp("knobs")
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "settings.json").write_text('{"nested": {"prefetch": false, "other": 3}}', encoding="utf-8")
    path = folder / "study.yaml"
    path.write_text(STUDY.format(model=MODEL, python=sys.executable, storage=folder / "study.db"), encoding="utf-8")
    config = load_study(path)
    with RankProcesses(COMMAND_RANKS) as ranks:
        run_study(
            config,
            on_progress=lambda _: None,
            executor=InProcessExecutor(OpenBackend(backend=config.trials.backend, ranks=ranks)),
        )
    return path, config


def test_the_hidden_optimum_is_found(study):
    """Within 24 trials of some 600 pairs the best has every knob at its best value, and the idle one at today's."""
    _, config = study
    best = best_known(prepared_of(config), StoredStudies(config.storage).find(config.name))

    assert best.source == "measured"
    assert best.config.tp == 2
    assert dict(best.config.knobs) == {
        "bucket": 16,
        "algorithm": "Tree",
        "prefetch": True,
        "overlap": True,
        "unused": dict(best.config.knobs)["unused"],
    }
    true = 60 * (1 + 0.05 * 12 / 16) / (55 * 0.9 * 0.93 * 0.95)
    assert best.compared.measured_gain == pytest.approx(true, rel=0.01)
    assert best.compared.gain == pytest.approx(true, rel=0.05)


def test_exports_carry_the_best_values(study):
    """The flags of the best configuration have those of its knobs, the variable, and a note on the key of the file."""
    path, _ = study

    text = in_process("export", path, "--to", "megatron", cwd=path.parent).out
    assert "    --bucket 16\n" in text
    assert "    --overlap\n" in text
    assert "export ALGORITHM=Tree\n" in text
    assert "# prefetch: nested.prefetch is true in the file settings" in text


@pytest.mark.parametrize("command", ["best", "status", "trials"])
def test_answers_name_the_knobs(study, command):
    """Best, status and the table of trials show the values of the knobs."""
    path, _ = study

    done = in_process(command, path, cwd=path.parent)
    assert done.status == 0
    assert "algorithm" in done.out


def test_json_has_the_values_as_they_are(study):
    """Scripts get true as true and the number 16 as a number."""
    path, _ = study

    config = json.loads(in_process("best", path, "--json", cwd=path.parent).out)["config"]
    assert config["prefetch"] is True
    assert config["bucket"] == 16


def test_the_report_shows_the_knobs(study, tmp_path):
    """The page has the knobs in the table of trials and in the flags."""
    path, _ = study

    assert in_process("report", path, "--out", tmp_path / "report.html", cwd=path.parent).status == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "algorithm" in page
    assert "--bucket 16" in page


def test_a_study_with_other_knobs_is_another_one(study):
    """A resumed study whose knobs have changed is refused with the key, since its trials would mean something else."""
    path, _ = study
    changed = path.with_name("changed.yaml")
    changed.write_text(path.read_text(encoding="utf-8").replace("[4, 8, 16, 32]", "[4, 8, 16]"), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"space\.knobs"):
        run_here(changed)


def test_other_studies_learn_from_todays_knobs_only(study):
    """The history that the trials leave holds those with today's values alone."""
    path, config = study
    sibling = path.with_name("sibling.yaml")
    text = path.read_text(encoding="utf-8").replace("name: knobs\n", "name: sibling\n")
    sibling.write_text(text + f"history: [{config.storage}]\n", encoding="utf-8")

    from tuner.storage.history import past_of  # beside its only use

    runs = past_of(load_study(sibling)).runs
    assert 1 <= len(runs) <= 3
