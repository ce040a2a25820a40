from dataclasses import replace

import pytest

from costmodels.parallel import ParallelConfig
from costmodels.runtime import find_runtime, runtime_names
from costmodels.sources import FALLBACK_RUNTIME, FSDP_RUNTIME, RUNTIME_WORDS, is_known_source, setting_of, source_of
from costmodels.sources import _sources as table
from hardware.device import find_devices
from hardware.errors import ConfigError
from tests.costmodels.synthetic_runs import small_model, unmeasured_run

PLAIN = unmeasured_run(small_model(2048), ParallelConfig(tp=2, dp=4, sequence_parallel=True))
FSDP = replace(PLAIN, config=ParallelConfig(dp=8, zero_stage=3))


def test_every_known_source_names_a_shipped_runtime():
    """The runtime of each source in the table has a profile, and its facts are facts of a profile."""
    for name, source in table().items():
        assert is_known_source(name)
        assert source.runtime in runtime_names()
        assert source.reason
        setting_of(replace(PLAIN, source=name), {})


def test_every_word_names_a_shipped_runtime():
    """What the remarks of an unknown source can name has a profile."""
    assert set(RUNTIME_WORDS.values()) | {FALLBACK_RUNTIME, FSDP_RUNTIME} <= set(runtime_names())


@pytest.mark.parametrize(
    ("run", "runtime"),
    [
        (PLAIN, FALLBACK_RUNTIME),
        (FSDP, FSDP_RUNTIME),
        (replace(FSDP, config=replace(FSDP.config, tp=2, dp=4)), FALLBACK_RUNTIME),
        (replace(PLAIN, notes="MaxText 0.1"), "maxtext"),
        (replace(FSDP, notes="llm-foundry"), "llm-foundry"),
        (replace(PLAIN, source="our nanotron sweep"), "nanotron"),
        (replace(PLAIN, notes="DeepSpeed on Megatron"), "megatron-deepspeed"),
        (replace(PLAIN, source="vtrain"), "megatron-deepspeed"),
        (replace(PLAIN, source="vtrain", notes="nanotron"), "megatron-deepspeed"),
    ],
)
def test_the_runtime_of_a_run(run, runtime):
    """The table decides; else words of the source and the remarks; else plain ZeRO-3 is FSDP, and the rest Megatron."""
    assert source_of(run).runtime == runtime


def test_a_named_runtime_overrides_the_table():
    """Whoever names a runtime gets it, whatever the source is."""
    assert setting_of(replace(PLAIN, source="vtrain"), {}, "nanotron").runtime.name == "nanotron"


def test_a_fitted_profile_replaces_the_shipped_one():
    """Profiles that are handed over stand in for the catalog's of the same name."""
    fitted = find_runtime(FALLBACK_RUNTIME).with_constants({"matmul_efficiency": 0.5})

    assert setting_of(PLAIN, {FALLBACK_RUNTIME: fitted}).runtime.matmul_efficiency == 0.5


def test_remarks_change_facts():
    """A run without flash attention is predicted without it."""
    assert setting_of(PLAIN, {}).runtime.fused_attention
    assert not setting_of(replace(PLAIN, notes="no flash attention"), {}).runtime.fused_attention


@pytest.mark.parametrize(("devices", "hosts"), [(4, 1), (8, 1), (16, 2), (12, 2)])
def test_devices_fill_hosts(devices, hosts):
    """A job has whole hosts, or the largest equal share of each that makes its number of devices."""
    run = replace(PLAIN, devices=devices, config=ParallelConfig(dp=devices))
    cluster = setting_of(run, {}).cluster

    assert find_devices("H100-SXM-80")[0][1].devices_per_host == 8
    assert (cluster.num_devices, cluster.num_hosts) == (devices, hosts)


def test_an_unknown_device_is_a_mistake_with_its_name():
    """Nothing is guessed of a device that the catalog lacks."""
    with pytest.raises(ConfigError, match="Abacus-9000"):
        setting_of(replace(PLAIN, device="Abacus-9000"), {})
