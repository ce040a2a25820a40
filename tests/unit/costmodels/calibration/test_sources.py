from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from costmodels.calibration.fidelity import predict, settings_of
from costmodels.calibration.measured_runs import find_stated_layers, read_measured
from costmodels.calibration.sources import (
    FALLBACK_RUNTIME,
    FSDP_RUNTIME,
    RUNTIME_WORDS,
    is_known_source,
    is_runtime_known,
    setting_of,
    source_of,
)
from costmodels.calibration.sources import _load_sources as table
from costmodels.calibration.stated_setup import StatedSetup
from costmodels.job.parallel_config import Assignment, ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime, runtime_names
from costmodels.step.memory.peak import estimate_memory
from hardware.device import find_devices
from hardware.io.errors import ConfigError
from tests.support.settings.synthetic_runs import small_model, unmeasured_run

RUNS = Path(__file__).parents[4] / "configs" / "measured" / "runs"
PLAIN = unmeasured_run(small_model(2048), ParallelConfig(tp=2, dp=4, sequence_parallel=True))
FSDP = replace(PLAIN, config=ParallelConfig(dp=8, zero_stage=3))


def test_every_known_source_names_a_shipped_runtime():
    """The runtime of each source in the table has a profile, and its facts are facts of a profile.

    So does what the remarks of an unknown source can name.
    """
    for name, source in table().items():
        assert is_known_source(name)
        assert source.runtime in runtime_names()
        assert source.reason
        setting_of(replace(PLAIN, source=name), {})
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


def test_remarks_and_arguments_change_the_runtime():
    """A run without flash attention is predicted without it, and whoever names a runtime gets it, whatever the source.

    Profiles that are handed over stand in for the catalog's of the same name.
    """
    fitted = find_runtime(FALLBACK_RUNTIME).with_constants({"matmul_efficiency": 0.5})

    assert setting_of(PLAIN, {}).setting.runtime.fused_attention
    assert not setting_of(replace(PLAIN, notes="no flash attention"), {}).setting.runtime.fused_attention
    assert setting_of(replace(PLAIN, source="vtrain"), {}, "nanotron").setting.runtime.name == "nanotron"
    assert setting_of(PLAIN, {FALLBACK_RUNTIME: fitted}).setting.runtime.matmul_efficiency == 0.5


@pytest.mark.parametrize(("devices", "hosts"), [(4, 1), (16, 2), (12, 2)])
def test_devices_fill_hosts(devices, hosts):
    """A job has whole hosts, or the largest equal share of each that makes its number of devices."""
    run = replace(PLAIN, devices=devices, config=ParallelConfig(dp=devices))
    cluster = setting_of(run, {}).setting.cluster

    assert find_devices("H100-SXM-80")[0][1].devices_per_host == 8
    assert (cluster.num_devices, cluster.num_hosts) == (devices, hosts)


# What a row states

FACTS = (("fused_attention", True), ("overlaps_gradients", False))
STATED = StatedSetup(
    runtime="nanotron", devices_per_host=4, link="roce", nic_gb_per_s=12.5, facts=FACTS, memory="allocated"
)


@pytest.mark.parametrize("source", ["nobody", "ultrascale-playbook", "megatron-lm-ci-golden"])
def test_what_a_row_states_needs_no_source(source):
    """A row's own statements hold for an unknown source, and against the table's entry, its flags and the remarks."""
    run = replace(PLAIN, source=source, notes="no flash attention", stated=STATED)
    measured = setting_of(run, {})
    runtime, (group,) = measured.setting.runtime, measured.setting.cluster.groups

    assert (runtime.name, runtime.fused_attention, runtime.overlaps_gradients) == ("nanotron", True, False)
    assert (group.hosts, group.devices_per_host) == (2, 4)
    assert (group.nic_links[0].kind, group.nic_links[0].bandwidth_bytes_per_s) == ("roce", 12.5e9)
    assert measured.memory == "allocated"
    assert is_runtime_known(run)
    assert is_runtime_known(replace(run, stated=StatedSetup())) == (source != "nobody")


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("attention-backend=unfused", (False, True, False, False)),
        ("attention-backend=unfused; attention-dropout=0.0; hidden-dropout=0.0", (False, False, False, False)),
        ("transformer-impl=transformer_engine; cross-entropy-loss-fusion=True", (True, True, False, True)),
        (
            "attention-backend=flash; cross-entropy-loss-fusion=True; cross-entropy-fusion-impl=te",
            (True, True, True, False),
        ),
    ],
)
def test_flags_of_megatrons_tests(notes, expected):
    """Unfused attention drops out unless told otherwise, and compiled losses are not Transformer Engine's."""
    runtime = setting_of(replace(PLAIN, source="megatron-lm-ci-golden", notes=notes), {}).setting.runtime
    names = ("fused_attention", "attention_dropout", "fused_cross_entropy", "copies_softmax")

    assert tuple(getattr(runtime, name) for name in names) == expected


def test_a_row_states_a_part_of_its_network():
    """What a row leaves open of its network is its source's: AMP's hosts keep their adapters, only faster ones."""
    faster = replace(mixed_run("mixed:12xV100-SXM-16+4xT4-16"), stated=StatedSetup(nic_gb_per_s=2.5))
    nics = [group.nic_links[0] for group in setting_of(faster, {}).setting.cluster.groups]

    assert hosts_of(faster) == [(3, 4, "V100-SXM-16"), (1, 4, "T4-16")]
    assert {(nic.kind, nic.bandwidth_bytes_per_s, nic.sharers) for nic in nics} == {("ethernet", 2.5e9, 1)}
    assert [nic.efficiency for nic in nics] == [0.95, None]


# What a peak counts


@pytest.mark.parametrize(
    ("model", "gibibytes"),
    [
        ("llama2_tp2_cp4_general_double_ring", 26.867),
        ("tune_llama2_tp2_cp2_adaptive_cp", 34.729),
        ("mixtral_mcore_tp4_cp2_ep2_ptd", 19.293),
        ("gpt4_mcore_tp4_cp2_32k_moe_drop", 33.045),
        ("seed_oss_36b_tp2pp2", 10.537),
    ],
)
def test_a_first_step_makes_the_optimizers_moments_when_activations_are_gone(model, gibibytes):
    """MindSpeed-LLM's tests log memory after one step, where the states alone are the peak.

    The first two share the bf16 weights with their fp32 copies (--reuse-fp32-param).
    """
    runs = read_measured(["mindspeed-llm-tests.csv"], {"model": model}, RUNS)
    known, settings, _ = settings_of(runs[:1], {})
    later = [replace(one, first_step=False) for one in settings]

    assert known[0].peak_memory_bytes / 2**30 == pytest.approx(gibibytes, abs=0.001)
    assert predict(known, settings).peak_memory_bytes[0] / 2**30 == pytest.approx(gibibytes, rel=0.01)
    assert predict(known, later).peak_memory_bytes[0] > 1.04 * predict(known, settings).peak_memory_bytes[0]


@pytest.mark.parametrize(
    ("file", "where", "share"),
    [
        # 16-bit gradients, fp32 masters or their 16-bit remainders (benchmarks/benchmark_8xB200.sh, README.md)
        ("bionemo.csv", {"source": "bionemo-native", "dp": 8, "ep": 4}, 0.09),
        ("bionemo.csv", {"source": "bionemo-automodel"}, 0.1),
        # fp32 sums beside 16-bit gradients (deepspeed runtime/bf16_optimizer.py)
        ("bigscience.csv", {"precision": "bf16 (fp32 grad accumulation, BF16_Optimizer)"}, 0.07),
        # a loss that is compiled (torchtitan components/loss.py at 2c8b5947)
        ("torchao.csv", {"source": "torchao-mi300x"}, 0.02),
    ],
)
def test_facts_of_rows_explain_their_peaks(file, where, share):
    """Peaks of runs with these facts are predicted within the share, and 1.5 times as well as without them."""
    runs, settings, _ = settings_of(read_measured([file], where, RUNS), {})
    bare = [setting_of(replace(run, stated=replace(run.stated, facts=())), {}) for run in runs]
    measured = np.array([run.peak_memory_bytes for run in runs])
    with_facts, without = (
        np.median(np.abs(predict(runs, each).peak_memory_bytes / measured - 1)) for each in (settings, bare)
    )

    assert with_facts <= share
    assert without > 1.5 * with_facts


def test_runs_that_reduce_in_16_bits_fit():
    """Every run of NVIDIA's recipes ran; with fp32 gradients ten of them would not fit (grad_sync_dtype: bf16)."""
    runs = [
        run for run in read_measured(["dgxc-benchmarking.csv"], {}, RUNS) if "gradient_bytes" in dict(run.stated.facts)
    ]
    bare = [replace(run, stated=replace(run.stated, facts=())) for run in runs]

    def too_large(runs):
        settings = settings_of(runs, {})[1]
        each = [
            estimate_memory(one.setting, ConfigGrid.from_configs([run.config]))
            for run, one in zip(runs, settings, strict=True)
        ]
        return sum(bool(one.needed_bytes[0] > one.capacity_bytes[0]) for one in each)

    assert (len(runs), too_large(runs), too_large(bare)) == (76, 0, 10)


@pytest.mark.parametrize("gibibytes", [55.98, 53.62])
def test_a_prediction_module_stands_on_the_last_stage(gibibytes):
    """Megatron-LM's tests of pipelines with such a module measure it and its logits there, on top of the head's."""
    runs = read_measured(["megatron-lm-tests.csv"], {"vpp": 4, "pp": 2}, RUNS)
    (run,) = [run for run in runs if run.peak_memory_bytes and abs(run.peak_memory_bytes / 2**30 - gibibytes) < 0.01]
    without = replace(run, model=replace(run.model, num_mtp_layers=0))
    told, bare = (predict([one], settings_of([one], {})[1]).peak_memory_bytes[0] / 2**30 for one in (run, without))

    assert run.model.num_mtp_layers == 1
    assert told == pytest.approx(gibibytes, rel=0.03)
    assert bare < 0.9 * gibibytes


def test_embeddings_that_count_as_layers_lighten_the_ends():
    """Zero Bubble's 1F1B runs keep a layer less on their first stage, which holds the most micro-batches."""
    runs = read_measured(["papers.csv"], {"source": "zero-bubble", "vpp": 1}, RUNS)
    settings = settings_of(runs, {})[1]
    measured = np.array([run.peak_memory_bytes for run in runs])
    even = [replace(run, config=replace(run.config, assignment=Assignment())) for run in runs]
    told, other = (np.median(np.abs(predict(each, settings).peak_memory_bytes / measured - 1)) for each in (runs, even))

    assert {sum(run.config.assignment.layers) - run.model.num_layers for run in runs} == {0}
    assert told < 0.03
    assert other > 0.1


def test_bigscience_measured_the_first_stage():
    """Memory grew by 0.6 GiB per sequence, as the first stage's does; the last one's logits alone take 1 GiB.

    No pipeline that recomputes is missed by more than 15%, by the fullest stage up to 41%.
    """
    where = {"source": "bigscience-1B3-v100", "recompute": "full"}
    runs = [run for run in read_measured(["bigscience.csv"], where, RUNS) if run.config.pp > 1 and not run.is_failed]
    settings = settings_of(runs, {})[1]
    fullest = [replace(one, stage="fullest") for one in settings]
    measured = np.array([run.peak_memory_bytes for run in runs])
    worst, other = (
        np.max(np.abs(predict(runs, each).peak_memory_bytes / measured - 1)) for each in (settings, fullest)
    )

    assert worst < 0.15
    assert other > 0.4


# Unlike devices

AWS = {"source": "amp-neurips22", "precision": "fp16", "devices": 16}


def mixed_run(device, config=None, **changes):
    """A run of AMP's on unlike devices."""
    return replace(PLAIN, device=device, config=config or ParallelConfig(pp=4, dp=4), **{**AWS, **changes})


def hosts_of(run):
    """(hosts, devices per host, device) of each group of its cluster."""
    return [(g.hosts, g.devices_per_host, g.device.name) for g in setting_of(run, {}).setting.cluster.groups]


@pytest.mark.parametrize(
    ("device", "devices", "expected"),
    [
        ("mixed:8xV100-SXM-16+12xT4-16", 20, [(1, 8, "V100-SXM-16"), (3, 4, "T4-16")]),
        ("mixed:12xT4-16+12xV100-SXM-16", 24, [(3, 4, "T4-16"), (3, 4, "V100-SXM-16")]),
        ("mixed: 24xH100 + 2xA100", 26, [(3, 8, "H100-SXM-80"), (1, 2, "A100-SXM-80")]),
        ("mixed:8xA100", 8, [(1, 8, "A100-SXM-80")]),
    ],
)
def test_unlike_devices_fill_their_usual_hosts(device, devices, expected):
    """Counts are devices; they stand on their usual hosts in the row's order, or on hosts that divide both."""
    run = mixed_run(device, ParallelConfig(dp=devices), devices=devices, source="unknown")

    assert hosts_of(run) == expected


@pytest.mark.parametrize("device", ["mixed:12xV100-SXM-16+4xT4-16", "mixed:4xT4-16+12xV100-SXM-16"])
def test_a_source_knows_its_unlike_hosts(device):
    """AMP's hosts of four share one adapter each, 10 Gb/s for V100 and 50 for T4, and the former come first."""
    run = mixed_run(device)
    nics = [group.nic_links[0] for group in setting_of(run, {}).setting.cluster.groups]

    assert hosts_of(run) == [(3, 4, "V100-SXM-16"), (1, 4, "T4-16")]
    assert [nic.sharers * nic.bandwidth_bytes_per_s * 8 for nic in nics] == [10e9, 50e9]


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mixed:12V100-SXM-16+4xT4-16", "COUNTxNAME"),
        ("mixed:12xV100-SXM-16+8xT4-16", "names 20 devices, but the run has 16"),
        ("mixed:12xV101+4xT4-16", "not a known device"),
        ("Abacus-9000", "Abacus-9000"),
    ],
)
def test_a_wrong_device_is_a_mistake(device, words):
    """Nothing is guessed of devices that the catalog lacks; what is wrong with a string of several is said in words."""
    with pytest.raises(ConfigError, match=words):
        setting_of(mixed_run(device), {})


@pytest.mark.parametrize(("name", "known"), [("AMP", True), ("neurips-amp-2022", True), ("ampere-runs", False)])
def test_a_source_is_known_by_a_part_of_its_name(name, known):
    """A known name between dashes is that source; a part of a word is not."""
    assert is_known_source(name) == known


@pytest.mark.parametrize(
    ("notes", "pp", "layers"),
    [
        ("DeepSpeed; layers per stage incl. embedding(1)+head(1): 3/3/4; x", 3, (2, 3, 3)),
        ("partition: [0, 5, 10, 14], tp 2", 3, (3, 5, 0)),
        ("partition [0, 14]", 1, (8,)),
        ("layers per stage incl. embedding(1)+head(1): 3/3/5", 3, ()),
        ("partition: [0, 5, 14]", 3, ()),
        ("partitioned by hand", 2, ()),
    ],
)
def test_the_layers_of_stages_that_a_run_states(notes, pp, layers):
    """Remarks that cut the whole model into the run's stages are believed; others leave the cut to the runtime."""
    assert find_stated_layers(notes, PLAIN.model.num_layers, pp) == layers
