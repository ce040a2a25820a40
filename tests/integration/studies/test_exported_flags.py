"""Every framework's export: read back by our own reader, by its real parser where that is installed, and broken."""

import os
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
from hypothesis import example, given

from benchmarks.judges.exported_flags import failed, main, measure
from benchmarks.support.export_samples import MUTATIONS, differences, mutants, samples
from benchmarks.support.framework_parsers import PARSERS
from benchmarks.support.megatron_parser import MegatronParser
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.sequences import Sequences
from costmodels.job.uneven_work import Assignment
from hardware.io.errors import ConfigError
from tests.oracles.frameworks.checks import CHECKS
from tests.oracles.frameworks.published_rules import facts_of
from tests.unit.tuner.export.test_export import configs, setting_of, settings
from tuner.export import EXPORTERS, Export, find_exporter
from tuner.export.flag_table import Flag, read_flags
from tuner.imports.flags import flag_name
from tuner.imports.known_arguments import known_flags
from tuner.study_file.exported_flags import WITH_FLAGS

COUNT = int(os.environ.get("MESHTUNE_EXPORTS", "25"))
"""Configurations of each framework; 500 are what is promised."""
TARGETS = sorted(CHECKS)
MANY_PARTS = setting_of("qwen2.5-7b", rules="flexparallel")
"""28 layers, of which a study may make 32."""


def exported(target, setting, **degrees):
    """The export of a configuration."""
    return find_exporter(target)(setting, ParallelConfig(**degrees))


def said(target, setting, **degrees):
    """What its framework's values say, by dimension."""
    facts = facts_of(setting)
    return CHECKS[target].said(CHECKS[target].read(exported(target, setting, **degrees), facts), facts)


def noted(export):
    """The dimensions that an export can't say."""
    return [note.partition(":")[0] for note in export.notes]


@pytest.mark.parametrize("target", TARGETS)
def test_random_configurations_come_back_and_their_mutations_are_refused(target):
    """What a framework can run it takes, says as we meant it or notes it, and no broken export passes its rules."""
    row = measure(target, COUNT, seed=0, parser=None)

    assert not failed(row), row["wrong"]
    assert row["mutants"] > COUNT * 10


@pytest.mark.parametrize("target", TARGETS)
def test_the_real_parser_reads_what_was_meant(target):
    """The framework's own parser takes each export and gives the same configuration back."""
    try:
        parser = PARSERS[target]()
    except ImportError as error:
        pytest.skip(f"{error}; `make frameworks` installs it")

    row = measure(target, COUNT, seed=1, parser=parser)

    assert row["real"] == COUNT
    assert not failed(row), row["wrong"]


@given(settings, configs)
@example(MANY_PARTS, ParallelConfig(pp=8, vpp=8))
def test_no_configuration_is_too_much_for_an_exporter(setting, config):
    """Whatever a study could hold, even what the framework lacks, is written with its notes as comments."""
    for target in TARGETS:
        export = find_exporter(target)(setting, config)

        assert str(config) in export.text
        assert all(note in export.text for note in export.notes)


def test_every_framework_has_rules_mutations_and_a_parser():
    """Each exporter but JSON's has all of them, and WITH_FLAGS are those that write flags."""
    assert {*CHECKS} == {*MUTATIONS} == {*PARSERS} == {*EXPORTERS} - {"json"}
    flagged = {target for target in EXPORTERS if exported(target, setting_of(), dp=64).arguments}
    assert flagged == set(WITH_FLAGS)


@pytest.mark.parametrize("target", TARGETS)
def test_a_dimension_that_comes_back_otherwise_is_told(target):
    """The comparison sees a difference of one degree: the benchmark can fail."""
    setting, config = next(samples(target, 1, seed=3))
    export, facts = find_exporter(target)(setting, config), facts_of(setting)
    check = CHECKS[target]
    back = check.said(check.read(export, facts), facts)

    assert differences(back, setting, config, export) == {}
    assert set(differences(back | {"mbs": config.mbs + 1}, setting, config, export)) == {"mbs"}


@pytest.mark.parametrize("target", TARGETS)
def test_a_refusal_cites_its_source(target):
    """A broken export is refused with the file of the framework that has the rule."""
    setting, config = next(samples(target, 1, seed=4))
    facts = facts_of(setting)
    export = find_exporter(target)(setting, config)
    told = []
    for _, mutant in mutants(target, export, CHECKS[target].read(export, facts), setting):
        with pytest.raises(ConfigError) as caught:
            CHECKS[target].read(mutant, facts)
        told.append(str(caught.value))

    assert any(".py" in message for message in told)
    assert all("\n" not in message for message in told)


@pytest.mark.parametrize("target", TARGETS)
def test_a_hostile_name_stays_in_its_comment(target):
    """A host group's name with a line break makes no line of its own."""
    setting = setting_of()
    group = replace(setting.cluster.groups[0], name="a\nrm -rf /\n")
    setting = replace(setting, cluster=replace(setting.cluster, groups=(group,)))
    export = exported(target, setting, dp=64, assignment=Assignment(hosts=tuple(range(8))))

    assert not any(line.startswith("rm") for line in export.text.splitlines())
    assert noted(export)[-1] in ("hosts", "runtime")


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_says_which_versions_take_it(target):
    """One comment of each export names the framework's versions."""
    assert "Versions: " in exported(target, setting_of(), dp=64).text


# What each framework says otherwise than Megatron-LM


def test_torchtitan_gets_a_steps_micro_batches_at_once_in_a_pipeline():
    """With stages the local batch holds all micro-batches, without it is one, which accumulation repeats."""
    with_stages = exported("torchtitan", setting_of(), pp=4, tp=8, dp=2, mbs=2).arguments
    without = exported("torchtitan", setting_of(), tp=8, dp=8, mbs=2).arguments

    assert with_stages[with_stages.index("--training.local_batch_size") + 1] == "256"
    assert without[without.index("--training.local_batch_size") + 1] == "2"
    assert with_stages[-1] == "activation-checkpoint:none"


def test_torchtitans_main_branch_counts_tokens():
    """A micro-batch and a step are tokens, a pipeline's micro-batches are counted, and there are no flags."""
    export = exported("torchtitan-main", setting_of(), pp=4, tp=8, dp=2, mbs=2)

    assert f"num_tokens_per_microbatch_per_dp_rank={2 * 8192},\n" in export.text
    assert f"num_tokens_per_train_step={512 * 8192},\n" in export.text
    assert "num_pp_microbatches=128,\n" in export.text
    assert "activation_checkpoint=None,\n" in export.text
    assert export.arguments == ()


def test_torchtitan_refuses_a_pipeline_of_tied_embeddings():
    """Its decoders raise for them, which both exports say."""
    tied = setting_of()
    tied = replace(tied, job=replace(tied.job, model=tied.job.model.changed(tied_embeddings=True)))

    for target in ("torchtitan", "torchtitan-main"):
        assert any("tied embeddings" in note for note in exported(target, tied, pp=4, dp=16).notes)
        assert not any("tied embeddings" in note for note in exported(target, tied, dp=64).notes)


def test_torchtitans_main_branch_wants_experts_over_tp():
    """A degree ep below tp, which its validation rejects, is noted for a model with experts."""
    setting = setting_of("mixtral-8x7b", runtime="torchtitan")

    assert "ep" in noted(exported("torchtitan-main", setting, tp=4, ep=2, dp=16))
    assert "ep" not in noted(exported("torchtitan-main", setting, tp=4, ep=4, dp=16))


def test_what_gpt_neox_lacks_is_noted():
    """Context parallelism, virtual stages, selective recomputation and ZeRO 2 in a pipeline are one note each."""
    export = exported(
        "gpt-neox",
        setting_of(runtime="gpt-neox", precision="fp8"),
        pp=4,
        cp=2,
        up=2,
        vpp=2,
        dp=4,
        zero_stage=2,
        recompute="selective",
    )

    assert noted(export) == ["vpp", "cp", "up", "zero_stage", "recompute", "precision"]


def test_gpt_neox_switches_its_pipeline_off_for_sharded_gradients():
    """ZeRO 2 and 3 need pipe_parallel_size 0, since size 1 is a pipeline of one stage."""
    assert "pipe_parallel_size: 0\n" in exported("gpt-neox", setting_of(), dp=64, zero_stage=3).text
    assert "pipe_parallel_size: 1\n" in exported("gpt-neox", setting_of(), dp=64, zero_stage=1).text


def test_flagscale_has_megatrons_flags_as_keys():
    """Switches are true, groups are those of the examples, and the environment is told."""
    export = exported("flagscale", setting_of(), tp=8, dp=8, recompute="full")

    assert "  tensor_model_parallel_size: 8\n" in export.text
    assert "  recompute:\n    recompute_granularity: full\n" in export.text
    assert any(note.startswith("experiment.envs: CUDA_DEVICE_MAX_CONNECTIONS") for note in export.notes)


@pytest.mark.parametrize(("stage", "reshard"), [(2, "never"), (3, "always")])
def test_torchtitan_tells_zero_2_from_3_by_what_stays_gathered(stage, reshard):
    """HSDP shards over dp_shard of dp; weights are sharded again after the forward pass in ZeRO 3 only."""
    export = exported("torchtitan", setting_of(runtime="torchtitan"), dp=64, dp_shard=8, zero_stage=stage)
    text = export.text

    assert f"--parallelism.fsdp_reshard_after_forward {reshard}\n" in text
    assert "--parallelism.data_parallel_replicate_degree 8\n" in text
    assert "--parallelism.data_parallel_shard_degree 8\n" in text
    assert export.notes == ()


def test_what_torchtitan_lacks_is_noted():
    """Ulysses, ZeRO 1, other products and a tensor degree of the experts are one note each."""
    export = exported(
        "torchtitan",
        setting_of("mixtral-8x7b", runtime="torchtitan", precision="fp8"),
        up=2,
        tp=4,
        dp=8,
        zero_stage=1,
        expert_tp=1,
    )

    assert noted(export) == ["zero_stage", "up", "precision", "expert_tp"]


def test_uneven_stages_are_no_op_layers_in_mindspeed():
    """Each virtual stage is filled to the longest; what is left of each is what was planned."""
    uneven = Assignment(layers=(10, 8, 8, 6))
    export = exported("mindspeed", setting_of(runtime="mindspeed"), pp=2, vpp=2, tp=8, dp=2, assignment=uneven)

    assert "--num-layers 40\n" in export.text
    assert "--noop-layers 18,19,28,29,36,37,38,39\n" in export.text
    back = said("mindspeed", setting_of(runtime="mindspeed"), pp=2, vpp=2, tp=8, dp=2, assignment=uneven)
    assert back["layers"] == uneven.layers


def test_padded_stages_are_no_op_layers_in_mindspeed():
    """28 layers that a study padded to 32 are 32 of which the last four do nothing."""
    setting = setting_of("qwen2.5-7b", rules="flexparallel", runtime="mindspeed")

    export = exported("mindspeed", setting, pp=8, dp=8)

    assert "--num-layers 32\n" in export.text
    assert "--noop-layers 28,29,30,31\n" in export.text


@pytest.mark.parametrize(
    ("cp", "up", "algorithm"), [(4, 1, "megatron_cp_algo"), (1, 4, "ulysses_cp_algo"), (2, 2, "hybrid_cp_algo")]
)
def test_mindspeed_has_an_algorithm_for_each_kind_of_context_parallelism(cp, up, algorithm):
    """Ring, Ulysses and both together are one group of four ranks and come back as they were."""
    setting = setting_of(runtime="mindspeed")
    export = exported("mindspeed", setting, cp=cp, up=up, dp=16)

    assert f"--context-parallel-algo {algorithm}\n" in export.text
    back = said("mindspeed", setting, cp=cp, up=up, dp=16)
    assert (back["cp"], back["up"]) == (cp, up)


def test_deepspeed_says_what_the_script_must_do():
    """A pipeline, its tensor degree and ring attention are the script's; the batch is the file's."""
    export = exported("deepspeed", setting_of(runtime="megatron-deepspeed"), pp=4, tp=4, dp=4, recompute="full")

    assert noted(export) == ["pp", "tp", "sequence_parallel"]
    assert '"activation_checkpoint_interval": 1' in export.text
    assert '"gradient_accumulation_steps": 128' in export.text


def test_deepspeed_splits_by_itself_without_a_pipeline():
    """AutoTP, Ulysses and AutoEP are keys where nothing but data parallelism stands beside them."""
    setting = setting_of("mixtral-8x7b")

    assert '"autotp_size": 8' in exported("deepspeed", setting, tp=8, dp=8).text
    assert '"sequence_parallel_size": 8' in exported("deepspeed", setting, up=8, dp=8).text
    assert '"autoep_size": 8' in exported("deepspeed", setting, dp=64, ep=8).text


def test_nemo_sets_what_is_off_too():
    """A recipe brings values of its own, so that the absence of a flag is a value."""
    text = exported("nemo", setting_of(), tp=8, dp=8, sequence_parallel=False, zero_stage=0).text

    assert "recipe.trainer.strategy.sequence_parallel = False\n" in text
    assert "recipe.trainer.strategy.virtual_pipeline_model_parallel_size = None\n" in text
    assert "recipe.optim.config.use_distributed_optimizer = False\n" in text


def test_a_nemo_fragment_runs():
    """The function sets each field of what it is given, and gives that back."""
    pytest.importorskip("torch")
    scope = {}
    exec(exported("nemo", setting_of(), pp=4, tp=8, dp=2).text, scope)  # noqa: S102 # what a user pastes
    recipe = scope["parallelise"](MagicMock())  # any recipe: fields appear as they are set

    assert recipe.trainer.strategy.pipeline_model_parallel_size == 4
    assert recipe.trainer.num_nodes == 8
    assert recipe.data.global_batch_size == 512


def test_what_nanotron_lacks_is_noted():
    """Ulysses, virtual stages, ZeRO 3 and experts within dp are one note each."""
    export = exported("nanotron", setting_of("mixtral-8x7b"), pp=2, up=2, dp=16, vpp=2, ep=2, zero_stage=3)

    assert noted(export) == ["vpp", "up", "ep", "zero_stage", "runtime"]


def test_grouped_products_of_experts_need_bf16():
    """Megatron-LM refuses --moe-grouped-gemm without --bf16, so that other precisions go without it."""
    for precision, grouped in (("bf16", True), ("fp8", True), ("fp16", False), ("fp32", False)):
        export = exported("megatron", setting_of("mixtral-8x7b", precision=precision), dp=64)

        assert ("--moe-grouped-gemm" in export.arguments) == grouped


# Our readers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "2", "--size", "3"], "is given twice"),
        (["--sice", "2"], "did you mean '--size'"),
        (["--size"], "takes one value"),
        (["--size", "2", "3"], "takes one value"),
        (["--size", "2.5"], "must be a whole number"),
        (["--fast", "2"], "takes no value"),
        (["--kind", "c"], "is not a choice"),
        (["--levels"], "takes at least one value"),
        (["stray"], "is not a flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_no_parser_takes(words, message):
    """A reader of flags refuses what argparse would."""
    table = {
        "--size": Flag(),
        "--fast": Flag(kind="switch"),
        "--kind": Flag(kind="word", choices=("a", "b")),
        "--levels": Flag(kind="numbers"),
    }

    with pytest.raises(ConfigError, match=message):
        read_flags(words, table)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("deepspeed", "{"),
        ("deepspeed", "[]"),
        ("flagscale", "a: ["),
        ("flagscale", "3"),
        ("gpt-neox", "a: ["),
        ("gpt-neox", "3"),
        ("nanotron", "a: ["),
        ("nanotron", "3"),
        ("nemo", "a ="),
        ("nemo", "a = f()"),
        ("torchtitan-main", "a ="),
        ("torchtitan-main", "a = f()"),
    ],
)
def test_text_that_is_no_export(target, text):
    """What is not of the framework's form at all is the user's mistake."""
    with pytest.raises(ConfigError):
        CHECKS[target].read(Export(target=target, text=text), facts_of(setting_of()))


def test_the_benchmark_tells_an_unknown_framework(capsys):
    """A misspelt target is answered with the nearest, and status 2."""
    assert main(["--target", "torchtitam"]) == 2
    assert "torchtitan" in capsys.readouterr().err


def test_every_flag_of_megatrons_parser_is_known():
    """`meshtune init` knows each flag that the installed Megatron-LM takes, so that none of them counts as a fork's."""
    try:
        parser = MegatronParser()
    except ImportError as error:
        pytest.skip(str(error))

    assert {flag_name(flag) for flag in parser.flags} - {"-h", "--help"} <= known_flags()


@pytest.mark.parametrize("degrees", [{"dp": 64}, {"dp": 16, "cp": 4}, {"dp": 8, "pp": 4, "tp": 2, "mbs": 2}])
def test_megatrons_parser_takes_packed_sequences(degrees):
    """The installed Megatron-LM reads the flags of packed sequences beside those of the layout."""
    try:
        parser = MegatronParser()
    except ImportError as error:
        pytest.skip(str(error))
    setting = setting_of(sequences=Sequences(lengths=(512, 8192), shares=(0.9, 0.1)))
    export = find_exporter("megatron")(setting, ParallelConfig(**degrees))

    assert parser.parse(export.arguments, export.environment, setting)["--sft"] is True
