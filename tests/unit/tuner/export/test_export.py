import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import DEGREES, OFFLOAD_MODES, RECOMPUTE_MODES, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from hardware.cluster_file import find_cluster
from hardware.io.errors import ConfigError
from tuner.export import EXPORTERS, find_exporter
from tuner.export.megatron import layout_of
from tuner.space.enumeration import SpaceOptions, setting_for


def setting_of(model="llama3-8b", *, rules=None, runtime="megatron-core", **job):
    """A setting on 64 H100; the job's keys replace the defaults."""
    keys = {"sequence_length": 8192, "global_batch_size": 512} | job
    return setting_for(
        TrainingJob(model=load_model(model, Path()), **keys),
        find_cluster("dgx-h100", 8),
        find_runtime(runtime),
        SpaceOptions(rule_set=rules),
    )


def flags_of(text):
    """The flags that bash would hand over, as {name: [values]}."""
    body = text.partition("PARALLEL_ARGS=(")[2].partition("\n)")[0]
    flags = {}
    for word in shlex.split(body):
        if word.startswith("--"):
            flags[word] = []
            last = word
        else:
            flags[last].append(word)
    return flags


def megatron(setting, **degrees):
    """The Megatron-LM export of a configuration."""
    return find_exporter("megatron")(setting, ParallelConfig(**degrees))


small = st.sampled_from([1, 2, 3, 4, 8])
configs = st.builds(
    ParallelConfig,
    **dict.fromkeys(DEGREES, small),
    recompute=st.sampled_from(RECOMPUTE_MODES),
    offload=st.sampled_from(OFFLOAD_MODES),
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
)
settings = st.sampled_from(
    [setting_of(), setting_of("qwen2.5-7b", rules="flexparallel"), setting_of("mixtral-8x7b", optimizer="sgd")]
)


@given(settings, configs)
def test_every_dimension_is_a_flag_or_a_note(setting, config):
    """Every degree can be read back from the flags, what Megatron-LM cannot do is noted by the dimension's name, and no
    flag stands without those that Megatron-LM's arguments.py demands beside it, nor with those that it excludes.
    """
    assume(config.pp * config.vpp <= setting.job.model.num_layers)

    export = find_exporter("megatron")(setting, config)

    flags = flags_of(export.text)
    noted = {note.partition(":")[0] for note in export.notes}
    assert flags["--pipeline-model-parallel-size"] == [str(config.pp)]
    assert flags["--tensor-model-parallel-size"] == [str(config.tp)]
    assert flags["--context-parallel-size"] == [str(config.cp * config.up)]
    assert flags["--micro-batch-size"] == [str(config.mbs)]
    assert f"dp={config.dp} follows" in export.text
    kinds = {(True, True): ["a2a+p2p"], (True, False): ["p2p"], (False, True): ["a2a"], (False, False): None}
    assert flags.get("--cp-comm-type") == kinds[config.cp > 1, config.up > 1]
    if config.cp > 1 and config.up > 1:
        assert flags["--hierarchical-context-parallel-sizes"] == [str(config.up), str(config.cp)]
    if config.ep > 1:
        assert flags.get("--expert-model-parallel-size") == [str(config.ep)] or "ep" in noted
    if "--pipeline-model-parallel-layout" in flags:
        layout = flags["--pipeline-model-parallel-layout"][0]
        assert layout.count("|") + 1 == config.pp * config.vpp
        assert "--num-virtual-stages-per-pipeline-rank" not in flags
        assert noted & {"pp", "vpp"}
    elif config.vpp > 1:
        assert flags["--num-virtual-stages-per-pipeline-rank"] == [str(config.vpp)]
    assert flags.get("--recompute-granularity", ["none"]) == [config.recompute]
    assert ("--optimizer-cpu-offload" in flags) == (config.offload == "optimizer" and "offload" not in noted)
    assert ("--use-distributed-optimizer" in flags) == (config.zero_stage > 0 and "zero_stage" not in noted)
    assert ("--sequence-parallel" in flags) == (config.sequence_parallel and config.tp > 1)
    if "--overlap-param-gather" in flags:
        assert {"--overlap-grad-reduce", "--use-distributed-optimizer"} <= set(flags)
    if "--use-megatron-fsdp" in flags:
        assert flags["--ckpt-format"] == ["fsdp_dtensor"]
        assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in export.text
    elif config.tp * config.cp * config.up > 1:
        assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in export.text
    if flags.get("--recompute-granularity") == ["selective"]:
        assert "--recompute-method" not in flags


def test_an_everyday_configuration_needs_no_note():
    """A dense model with even stages is exactly these parallel flags, and nothing is left to say."""
    export = megatron(setting_of(), pp=4, tp=8, dp=2, vpp=2, mbs=2, recompute="full")

    assert export.notes == ()
    assert flags_of(export.text) == flags_of(
        "PARALLEL_ARGS=(--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 1 --micro-batch-size 2 "
        "--global-batch-size 512 --seq-length 8192 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--bf16 --optimizer adam\n)"
    )


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16", {"--bf16"}),
        ("fp16", {"--fp16"}),
        ("nvfp4", {"--bf16", "--fp4-format", "--fp4-recipe"}),
        ("fp8", {"--bf16", "--fp8-format"}),
        ("tf32", set()),
        ("fp32", set()),
    ],
)
def test_precision_becomes_its_flags(precision, expected):
    """fp8 and nvfp4 are formats of the matrix products beside bf16, the others are one flag or none."""
    flags = flags_of(megatron(setting_of(precision=precision), dp=64).text)

    assert {name for name in flags if name.startswith(("--bf", "--fp"))} == expected


@pytest.mark.parametrize(("stage", "strategy"), [(2, "optim_grads"), (3, "optim_grads_params")])
def test_sharded_gradients_and_weights_are_megatron_fsdp(stage, strategy):
    """ZeRO 2 and 3 are strategies of Megatron-FSDP."""
    flags = flags_of(megatron(setting_of(), dp=64, zero_stage=stage).text)

    assert flags["--data-parallel-sharding-strategy"] == [strategy]
    assert "--use-megatron-fsdp" in flags


@pytest.mark.parametrize(("stage", "optimizer", "offloads"), [(1, "adam", True), (2, "adam", False), (1, "sgd", False)])
def test_an_offloaded_optimizer_is_the_distributed_one(stage, optimizer, offloads):
    """The hybrid optimizer's flags stand together, beside the distributed optimizer alone; else a note says so."""
    export = megatron(setting_of(optimizer=optimizer), dp=64, zero_stage=stage, offload="optimizer")

    flags = flags_of(export.text)
    told = {"--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer"}
    assert told & set(flags) == (told if offloads else set())
    assert flags.get("--optimizer-offload-fraction") == (["1"] if offloads else None)
    noted = [note.partition(":")[0] for note in export.notes]
    assert ("host memory" in noted, "offload" in noted) == (offloads, not offloads)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_over_a_part_of_dp_are_instances_of_the_distributed_optimizer(stage):
    """A dp of 64 in shards of 8 is eight instances; all of dp, or nothing sharded, needs no flag."""
    name = "--num-distributed-optimizer-instances"

    flags = flags_of(megatron(setting_of(), dp=64, dp_shard=8, zero_stage=stage).text)

    assert flags[name] == ["8"]
    assert flags.get("--outer-dp-sharding-strategy") == (["no_shard"] if stage > 1 else None)
    for plain in ({}, {"dp_shard": 64}, {"dp_shard": 8, "zero_stage": 0}):
        assert name not in flags_of(megatron(setting_of(), dp=64, **plain).text)


def test_experts_have_a_tensor_degree_of_their_own():
    """expert_tp is Megatron-LM's flag, and 0 is the degree of the rest."""
    setting = setting_of("mixtral-8x7b")
    name = "--expert-tensor-parallel-size"

    assert flags_of(megatron(setting, tp=4, dp=16, ep=8, expert_tp=1).text)[name] == ["1"]
    assert flags_of(megatron(setting, tp=4, dp=16, ep=8).text)[name] == ["4"]


def test_recomputed_modules_are_named():
    """The modules of the job are Megatron-Core's own words."""
    setting = setting_of("mixtral-8x7b", recompute_modules=("core_attn", "moe_act"))

    flags = flags_of(megatron(setting, dp=64, recompute="selective").text)

    assert flags["--recompute-modules"] == ["core_attn", "moe_act"]


def test_padded_stages_become_a_layout():
    """28 layers that a study padded to 32 over eight stages keep their stages: seven of four layers, one of none."""
    export = megatron(setting_of("qwen2.5-7b", rules="flexparallel"), pp=8, dp=8)

    assert flags_of(export.text)["--pipeline-model-parallel-layout"] == ["Et*4|t*4|t*4|t*4|t*4|t*4|t*4|L"]
    assert len(export.notes) == 1
    assert "--noop-layers 28,29,30,31" in export.notes[0]


def test_a_layout_holds_every_layer_once():
    """The letters of a layout count as many layers as the model has, one embedding and one loss, whatever the split."""
    setting = setting_of("qwen2.5-7b", rules="flexparallel")
    for pp, vpp in [(8, 1), (8, 2), (8, 4), (16, 2), (4, 8), (5, 3)]:
        layout = flags_of(megatron(setting, pp=pp, vpp=vpp).text)["--pipeline-model-parallel-layout"][0]

        unrolled = re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), layout)
        assert unrolled.count("t") == 28
        assert (unrolled[0], unrolled[-1]) == ("E", "L")


@pytest.mark.parametrize(
    ("layers", "modules", "layout"),
    [
        ((16, 16, 16, 13), 1, "Et*16|t*16|t*16|t*13mL"),
        ((1, *[2] * 30, 0), 1, f"Et|{'t*2|' * 30}mL"),
        ((3, *[2] * 29, 0, 0), 2, f"Et*3|{'t*2|' * 29}mm|L"),
        ((0, *[1] * 61, 0, 0), 0, f"E|{'t|' * 61}|L"),
    ],
)
def test_a_layout_has_prediction_modules_and_empty_ends(layers, modules, layout):
    """Modules of multi-token prediction stand beside the loss, or alone before it; end parts may hold no layer."""
    assert layout_of(layers, modules) == layout


def test_a_layout_names_the_flag_that_it_agrees_with():
    """The study's prediction modules are in the layout, whose note names the flag that must say as many."""
    export = megatron(setting_of("deepseek-v3"), pp=4, dp=16, vpp=4)

    assert flags_of(export.text)["--pipeline-model-parallel-layout"][0].endswith("mL")
    assert any("--mtp-num-layers 1" in note for note in export.notes)


def test_rounds_of_micro_batches_are_told_where_they_are_no_multiple_of_the_stages():
    """Megatron-LM refuses a last round of fewer micro-batches than stages; its own rounds have as many as stages."""
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    for batch, rounds in ((24, None), (26, ["7"]), (22, ["6"])):
        setting = setting_of()
        setting = replace(setting, job=replace(setting.job, global_batch_size=batch))
        flags = flags_of(megatron(setting, pp=4, vpp=2, tp=8, dp=2).text)

        assert flags.get(flag) == rounds


def test_a_profile_of_the_users_own_is_of_its_framework():
    """A profile that was fitted to a user's steps exports to its framework without a word about another runtime."""
    setting = setting_of()
    own = replace(setting, runtime=replace(setting.runtime, name="ours"))

    assert not [note for note in megatron(own, tp=8, dp=8).notes if note.startswith("runtime:")]


def test_what_megatron_refuses_is_noted():
    """Sequences that do not divide, experts in fp16, and sharding for another optimizer than Adam are each one note."""
    odd = megatron(setting_of(sequence_length=8190), up=4, dp=16)
    experts = megatron(setting_of("mixtral-8x7b", precision="fp16"), dp=64, ep=8)
    sgd = megatron(setting_of(optimizer="sgd"), dp=64, zero_stage=3)

    assert [note.partition(":")[0] for note in odd.notes] == ["up"]
    assert [note.partition(":")[0] for note in experts.notes] == ["ep"]
    assert [note.partition(":")[0] for note in sgd.notes] == ["zero_stage"]


@given(settings, configs)
def test_json_gives_the_configuration_back(setting, config):
    """The JSON export holds every dimension, so that the configuration can be built from it."""
    export = find_exporter("json")(setting, config)

    content = json.loads(export.text)
    assert ParallelConfig(**content["config"]) == config
    assert content["job"]["global_batch_size"] == setting.job.global_batch_size
    assert content["cluster"]["devices"] == 64
    assert export.notes == ()


def test_a_hostile_name_does_not_leave_its_json_string():
    """Quotes and line breaks in a model's name stay data."""
    setting = setting_of()
    job = replace(setting.job, model=setting.job.model.changed(name='"},\n"x": "'))

    content = json.loads(find_exporter("json")(replace(setting, job=job), ParallelConfig(dp=64)).text)

    assert content["job"]["model"] == '"},\n"x": "'


def test_an_unknown_target_names_the_nearest():
    """A misspelt target is the user's mistake, answered with the nearest name."""
    with pytest.raises(ConfigError, match="did you mean 'megatron'"):
        find_exporter("megatrom")


@pytest.mark.parametrize("target", sorted(EXPORTERS))
def test_every_exporter_keeps_the_contract(target):
    """An export bears its target's name and ends its text with a line break."""
    export = find_exporter(target)(setting_of(), ParallelConfig(dp=64))

    assert export.target == target
    assert export.text.endswith("\n")


def test_uneven_work_is_a_layout_and_notes():
    """Layers per virtual stage are Megatron-LM's layout; what it can't be told is noted by its name."""
    uneven = Assignment(
        layers=(10, 8, 8, 6), recomputed=(2, 0, 0, 0), micro_batches=(40, 24), hosts=(*range(4, 8), *range(4))
    )
    export = megatron(setting_of(), pp=2, vpp=2, tp=8, dp=2, assignment=uneven)

    assert flags_of(export.text)["--pipeline-model-parallel-layout"] == ["Et*10|t*8|t*8|t*6L"]
    assert "--num-virtual-stages-per-pipeline-rank" not in export.text
    told = "\n".join(export.notes)
    assert "hosts: assign node ranks in the order 4-7/0-3 (8 x dgx-h100)" in told
    assert "--recompute-num-layers 2" in told
    assert "micro_batches: Megatron-LM gives every replica the same number; 40/24" in told
