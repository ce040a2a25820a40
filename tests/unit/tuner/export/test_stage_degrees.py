"""Exports of stages with tensor degrees of their own: FlagScale's meshes, and what other frameworks are told."""

from pathlib import Path

import pytest
import yaml

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from hardware.io.errors import ConfigError
from tests.oracles.frameworks.flagscale_meshes import broken_checks
from tuner.export import find_exporter
from tuner.planners.pipeline.stage_degrees import plan_stage_degrees
from tuner.space.enumeration import enumerate_space
from tuner.study_file.config import load_study

STUDY = Path(__file__).resolve().parents[4] / "configs" / "studies" / "unlike-hosts.yaml"
SIX_HOSTS = ("cluster={groups: [{name: dgx-a100, hosts: 2}, {name: v100-pcie, hosts: 4}]}", "job.global_batch_size=192")
SETTING = load_study(STUDY, overrides=SIX_HOSTS).problem.setting
UNLIKE = ParallelConfig(
    pp=6,
    tp=1,
    dp=8,
    mbs=1,
    assignment=Assignment(layers=(3, 3, 3, 3, 10, 10), stage_tp=(1, 1, 1, 1, 2, 2), hosts=(2, 3, 4, 5, 0, 1)),
)


def sections(config):
    """The sections of FlagScale's file."""
    return yaml.safe_load(find_exporter("flagscale")(SETTING, config).text)


def test_a_mesh_is_the_stages_of_one_kind():
    """Meshes have tp, cp, ep, dp and pp in this order, and the file the degrees of the first."""
    hetero = sections(UNLIKE)["system"]["hetero"]

    assert hetero["hetero_process_meshes"] == [1, 1, 1, 8, 4, 2, 1, 1, 4, 2]
    assert hetero["hetero_pipeline_layer_split"] == [3, 3, 3, 3, 10, 10]
    assert hetero["hetero_device_types"] == ["V100-PCIe-32", "A100-SXM-80"]
    assert sections(UNLIKE)["model"]["micro_batch_size"] == 1
    assert "CUDA_DEVICE_MAX_CONNECTIONS must be 1" in " ".join(find_exporter("flagscale")(SETTING, UNLIKE).notes)


def test_flagscale_takes_every_plan():
    """All planned configurations with two degrees pass the checks that FlagScale makes of its meshes."""
    grid, _ = enumerate_space(SETTING, load_study(STUDY, overrides=SIX_HOSTS).problem.options)
    found = plan_stage_degrees(SETTING, grid, ("layers", "hosts"), memory_headroom=0.08)

    assert len(found) > 20
    for config in map(found.config, range(len(found))):
        text = sections(config)
        broken = broken_checks(text["system"], text["model"], num_layers=32, untied=True)
        assert not broken, (config, broken)


def test_like_degrees_need_no_meshes():
    """Without unlike degrees the file has no section `hetero`."""
    assert "hetero" not in sections(ParallelConfig(pp=6, tp=1, dp=8))["system"]


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "mindspeed", "deepspeed", "nemo", "nanotron", "gpt-neox"])
def test_other_frameworks_say_that_they_cannot(target):
    """A framework with one tensor degree says that the plan is simulated only."""
    notes = find_exporter(target)(SETTING, UNLIKE).notes

    assert any(note.startswith("stage_tp: ") and "simulated only" in note for note in notes)


def test_trials_that_cannot_run_degrees_of_stages_refuse(tmp_path):
    """A study that asks for degrees of stages needs trials that have them: simulated ones, or a command that reads
    them.
    """
    study = yaml.safe_load(STUDY.read_text(encoding="utf-8")) | {"space": {"assignment": ["layers", "stage_tp"]}}

    def load(**keys):
        (tmp_path / "study.yaml").write_text(yaml.safe_dump(study | keys), encoding="utf-8")
        return load_study(tmp_path / "study.yaml")

    command = {"backend": "command", "launch": "once", "command": ["run", "{assignment}"]}
    assert "stage_tp" in load().problem.options.uneven
    assert "stage_tp" in load(trial=command).problem.options.uneven
    assert "stage_tp" not in load_study(STUDY).problem.options.uneven
    for trial in (command | {"command": ["run", "{tp}"]}, command | {"flags": "megatron", "command": ["a", "{flags}"]}):
        with pytest.raises(ConfigError, match="which trials of this study cannot run"):
            load(trial=trial)
    with pytest.raises(ConfigError, match="not supported by the runtime torchtitan"):
        load(runtime="torchtitan")
