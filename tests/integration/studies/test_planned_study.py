"""Studies whose candidates may be sharded by a plan, simulated and trained in JAX: what ran, and what is told of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.studies.command_line import in_process
from tests.support.studies.in_process_executor import InProcessExecutor
from tests.support.studies.planned_studies import planned_study_text
from trials.jax_training.framework import JAX_RANKS
from trials.rank_backend import OpenBackend
from trials.ranks.processes import RankProcesses
from tuner.forecast.planned_candidates import prepare
from tuner.run.loop import run_study
from tuner.storage.stored_studies import StoredStudies
from tuner.study_file.config import load_study

MODEL = Path(__file__).resolve().parents[3] / "configs" / "models" / "gpt-tiny.yaml"
IN_JAX = f"""
name: planned
model: {MODEL}
cluster: {{name: cpu-host, hosts: 1}}
job: {{sequence_length: 16, global_batch_size: 8, precision: fp32, zero_stage: 1}}
runtime: jax-reference
space: {{tp: [2], cp: [1], up: [1]}}
search: {{max_trials: 2, repeats: 0, confidence: 1.0, tolerance: 0, prune: false}}
trial: {{backend: jax, min_steps: 4, max_steps: 8, precision: 0.05}}
"""


def load_planned(file, folder):
    """Load a study with a database in the folder, and plan its layers."""
    config = load_study(file, storage=f"sqlite:///{folder / 'meshtune.db'}")
    return prepare(config, StoredStudies(config.storage), runs=True)


def test_a_simulated_best_ran_a_plan_and_says_so(tmp_path):
    """Where the planned twin of a layout is the fastest, every answer names the plan, and flags disclaim its gain."""
    file = tmp_path / "study.yaml"
    search = "{max_trials: 20, confidence: 1.0, tolerance: 0}"
    space = "{pp: [1], tp: [1, 2], cp: [1], up: [2], mbs: [1]}"  # each layout has a planned twin
    text = planned_study_text(search=search, space=space, trial="{backend: simulated, noise: 0.001}")
    file.write_text(text, encoding="utf-8")
    config = load_planned(file, tmp_path)
    executor = InProcessExecutor(backend=config.backend)
    result = run_study(config, executor=executor)

    assert result.best.params["plan"] == "descent"
    ran = dict(executor.seen)
    assert {ran[record.number].plan for record in result.records} == {"hand", "descent"}
    twin = {**result.best.params, "plan": "hand"}
    (by_hand,) = (record for record in result.records if record.params == twin)
    assert by_hand.step_time_s > result.best.step_time_s

    best = in_process("best", file, "--json", cwd=tmp_path).json
    listed = in_process("trials", file, "--json", cwd=tmp_path).json["trials"]
    status = in_process("status", file, cwd=tmp_path)
    report = in_process("report", file, "--out", tmp_path / "report.html", cwd=tmp_path)
    flags = in_process("export", file, "--to", "megatron", cwd=tmp_path)
    assert best["config"] == result.best.params
    assert [row["config"]["plan"] for row in listed] == [record.params["plan"] for record in result.records]
    assert "plan=descent" in status.out
    assert report.status == 0, report.err
    assert "as descent shards them over up 2" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "plan: Megatron-LM has no setting for it; descent is not exported" in flags.out
    assert "by hand the step is predicted to take" in flags.err


def test_trials_in_jax_train_with_the_plan_of_their_candidate(tmp_path):
    """Under `auto` a layout is trained by hand and as planned; the faster one is the best, and says how it ran."""
    pytest.importorskip("jax", reason="the step needs JAX: pip install 'meshtune[jax]'")
    file = tmp_path / "study.yaml"
    file.write_text(IN_JAX, encoding="utf-8")
    config = load_planned(file, tmp_path)
    assert config.problem.planning.is_auto
    with RankProcesses(JAX_RANKS) as ranks:
        backend = OpenBackend(backend=config.backend, ranks=ranks)
        result = run_study(config, executor=InProcessExecutor(backend=backend))

    told = {record.params["plan"]: record for record in result.records}
    assert {name: record.status.value for name, record in told.items()} == {"hand": "ok", "descent": "ok"}
    assert "ran as the study's planner shards it" in told["descent"].observation.reason
    assert "planner" not in told["hand"].observation.reason
    assert result.best == min(told.values(), key=lambda record: record.step_time_s)
    assert in_process("best", file, "--json", cwd=tmp_path).json["config"] == result.best.params

    planned = config.problem.config_of(told["descent"].params)
    exported = in_process("export", file, "--to", "json", "--config", f"{planned},plan=descent", "--json", cwd=tmp_path)
    assert '"plan": "descent"' in exported.json["text"]
    assert backend.backend.work(planned).is_by_hand is False
    assert backend.backend.work(replace(planned, plan="hand")).is_by_hand
