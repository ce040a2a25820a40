"""Rows say a run so that the reader of measured runs sees it again."""

from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.calibration.measured_runs import read_measured_and_skipped
from costmodels.calibration.sources import setting_of
from costmodels.job.facts import with_facts
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import parse_assignment
from hardware.io.errors import ConfigError
from tests.support.settings.synthetic_runs import small_model, unmeasured_run
from tuner.learn.rows import OwnRun, row_of

PUBLISHED = Path(__file__).parents[4] / "configs" / "measured" / "runs"
SAID = ("bigscience", "megatron-bridge", "megatron-lm-tests", "mindspeed-llm-tests", "simumax", "tpu", "vtrain")


def own(run, **changes):
    """A row's run, as one that is written anew."""
    measured = setting_of(run, {})
    made = OwnRun(
        setting=measured.setting,
        config=run.config,
        step_time_s=1.25,
        peak_memory_bytes=2**34,
        memory=measured.memory,
        source="ours",
    )
    return replace(made, **changes)


@pytest.mark.parametrize("name", SAID)
def test_published_runs_can_be_said_again(name):
    """Every tenth run of seven publishers is written as a row: experts, latent attention, GPTs, facts, networks.

    `row_of` reads each row back, and refuses one that means another job, configuration or runtime.
    """
    runs, _ = read_measured_and_skipped([PUBLISHED / f"{name}.csv"], Path())

    for run in runs[::10]:
        row = row_of(own(run), "models")
        assert (row.cells["step_seconds"], row.cells["peak_mem_gib"]) == ("1.25", "16")
        assert row.cells["device"] == setting_of(run, {}).setting.cluster.device_names


def test_what_no_column_says_is_refused():
    """Uneven hosts, modules beside recomputed layers, and an optimizer have no column; the message names them."""
    config = ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True)
    plain = own(unmeasured_run(small_model(2048), config))
    assert row_of(plain, "models").cells["pp"] == "2"

    with pytest.raises(ConfigError, match=r"config\.recompute_layers: is not what the columns"):
        row_of(replace(plain, config=replace(config, recompute="selective", recompute_layers=1)), "models")
    muon = replace(plain.setting.job, optimizer="muon")
    with pytest.raises(ConfigError, match=r"job\.optimizer"):
        row_of(replace(plain, setting=replace(plain.setting, job=muon)), "models")
    uneven = replace(config, assignment=parse_assignment("micro_batches=3/1"))
    with pytest.raises(ConfigError, match=r"config\.assignment"):
        row_of(replace(plain, config=uneven), "models")


def test_recomputed_layers_and_shared_master_weights_are_said():
    """Some layers that are repeated stand in their column, and weights that share their memory in the remarks."""
    config = ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True, recompute_layers=2)
    plain = own(unmeasured_run(small_model(2048), config))
    sharing = replace(plain.setting.job, shared_master_weights=True)
    row = row_of(replace(plain, setting=replace(plain.setting, job=sharing)), "models")

    assert row.cells["recompute"] == "full:block:2"
    assert "reuse-fp32-param" in row.cells["notes"]


def test_stages_of_unlike_layers_are_said():
    """Five and three layers of eight stand in the remarks, with embedding and head counted as the reader expects."""
    uneven = replace(
        ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True), assignment=parse_assignment("layers=5/3")
    )
    row = row_of(own(unmeasured_run(small_model(2048), uneven)), "models")

    assert "head(1): 6/4" in row.cells["notes"]


def test_facts_beyond_the_profile_are_said():
    """Only what the profile does not say stands in the row."""
    run = own(unmeasured_run(small_model(2048), ParallelConfig(tp=2, dp=4, sequence_parallel=True)))
    assert row_of(run, "models").cells["facts"] == ""

    told = with_facts(run.setting.runtime, (("overlaps_gradients", False), ("gradient_message_bytes", 2)))
    changed = replace(run, setting=replace(run.setting, runtime=told))
    assert row_of(changed, "models").cells["facts"] == "overlaps_gradients=false; gradient_message_bytes=2"


def test_a_profile_of_ones_own_is_that_of_the_catalog_with_its_facts():
    """A study that names a fitted profile has trials of the runtime that the fit began with."""
    run = own(unmeasured_run(small_model(2048), ParallelConfig(tp=2, dp=4, sequence_parallel=True)))
    fitted = replace(run.setting.runtime, name="my-profile", matmul_efficiency=0.5)
    row = row_of(replace(run, setting=replace(run.setting, runtime=fitted)), "models")

    assert row.cells["runtime"] == run.setting.runtime.name


def test_another_network_is_said():
    """A network that is not the device's usual one stands in the row by kind and bandwidth."""
    run = own(unmeasured_run(small_model(2048), ParallelConfig(tp=2, dp=8, sequence_parallel=True)))
    (group,) = run.setting.cluster.groups
    slow = replace(group.nic_links[0], kind="roce", bandwidth_bytes_per_s=12.5e9)
    cluster = replace(run.setting.cluster, groups=(replace(group, nic_links=(slow,)),))
    row = row_of(replace(run, setting=replace(run.setting, cluster=cluster)), "models")

    assert (row.cells["link"], row.cells["nic_gb_per_s"], row.cells["devices_per_host"]) == ("roce", "12.5", "8")
