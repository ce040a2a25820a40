"""Hybrid models in Megatron-LM's own code: its parser, its patterns and its layers are those that Meshtune prices."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.megatron_parser import MegatronParser
from benchmarks.support.oracles.megatron_rank import parameters_of_chunks
from costmodels.job.hugging_face.reader import model_from_hugging_face
from costmodels.job.model_spec import plain_model
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment
from hardware.cluster_file import find_cluster
from tests.unit.tuner.imports.test_megatron_hybrid import COMMON
from tuner.export.megatron import export_megatron
from tuner.export.megatron_flags import PATTERN
from tuner.imports import IMPORTERS
from tuner.imports.megatron_hybrid import pattern_from_ratios

pytestmark = pytest.mark.slow
PUBLISHED = Path(__file__).parents[3] / "configs" / "measured" / "kinds" / "models"
SPLIT = {"sequence_parallel": True, "zero_stage": 1, "expert_tp": 1}


@pytest.fixture(scope="module")
def parser():
    """Megatron-LM's parser of arguments, with its checks."""
    try:
        return MegatronParser()
    except ImportError as error:
        pytest.skip(f"{error}; `make frameworks` installs it")


def setting_of(model, hosts=4, **cluster):
    """A job of a model."""
    job = TrainingJob(model=model, sequence_length=4096, global_batch_size=64)
    found = find_cluster("dgx-h100", hosts)
    if cluster:
        found = replace(found, groups=(replace(found.groups[0], **cluster),))
    return Setting(job=job, cluster=found, runtime=find_runtime("megatron-core"))


@pytest.mark.parametrize("name", ["nemotron-3-nano-30b-a3b", "nemotron-3-super-120b-a12b-2-mtp"])
@pytest.mark.parametrize(
    ("config", "segments"),
    [
        (ParallelConfig(tp=2, dp=16, ep=8, **SPLIT), 1),
        (ParallelConfig(pp=4, tp=2, dp=4, ep=8, **SPLIT), 4),
        (ParallelConfig(pp=2, tp=2, dp=8, ep=8, vpp=2, **SPLIT), 4),
        (ParallelConfig(pp=2, tp=2, dp=8, ep=8, **SPLIT), 2),
    ],
    ids=str,
)
def test_the_real_parser_takes_the_flags_of_a_config_json(parser, name, config, segments):
    """It derives the layers, the virtual stages and the modules of prediction that were meant."""
    model = model_from_hugging_face(json.loads((PUBLISHED / f"{name}.json").read_text()), name=name, file="c.json")
    layers = model.num_layers
    if segments == 2:  # unequal stages
        config = replace(config, assignment=Assignment(layers=(layers - 7, 7)))
    setting = setting_of(model)
    export = export_megatron(setting, config)

    read, _ = parser.read(export.arguments, export.environment, setting)
    assert read.hybrid_layer_pattern == export.arguments[export.arguments.index(PATTERN) + 1]
    assert read.hybrid_layer_pattern.count("|") + 1 == segments
    assert read.num_layers == layers
    assert read.mtp_num_layers == (model.num_mtp_layers or None)
    assert read.virtual_pipeline_model_parallel_size == (config.vpp if config.vpp > 1 else None)


@pytest.mark.usefixtures("parser")
def test_ratios_make_the_patterns_of_megatron():
    """Any shares of attention and MLPs among any number of layers give the same pattern."""
    from megatron.core.models.hybrid.hybrid_layer_allocation import pattern_from_ratios as of_megatron

    for layers in range(1, 130, 7):
        for attention in range(0, 101, 9):
            for mlp in range(0, 101 - attention, 11):
                shares = (attention / 100, mlp / 100)
                assert pattern_from_ratios(layers, *shares) == of_megatron(layers, *shares), (layers, *shares)


SMALL = (
    "--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 --ffn-hidden-size 96 --vocab-size "
    "1024 --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 --num-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 32 "
)


def small(pattern):
    """The small hybrid model with a pattern, as flags describe it."""
    found = IMPORTERS["megatron"](f"torchrun pretrain_hybrid.py {COMMON}{SMALL}--hybrid-layer-pattern '{pattern}'")
    return found.blocks.apply(plain_model(name="m", source="flags", **found.model))


@pytest.mark.parametrize(
    ("pattern", "config"),
    [
        ("M-*EM", ParallelConfig()),
        ("M-*E/*E", ParallelConfig()),
        ("M-*EM-ME", ParallelConfig(pp=2, vpp=2)),
        ("M-*EM-ME", ParallelConfig(pp=2, assignment=Assignment(layers=(3, 5)))),
    ],
    ids=["whole", "prediction", "chunks", "unequal stages"],
)
@pytest.mark.usefixtures("parser")
def test_the_layers_of_the_real_model_have_the_priced_parameters(pattern, config):
    """Megatron-LM's own model holds the layers of each chunk that the pattern says, each with as many parameters."""
    model = small(pattern)
    setting = setting_of(model, devices_per_host=config.pp, hosts=1)
    of_ranks = [parameters_of_chunks(setting, config, rank) for rank in range(config.pp)]
    in_order = [of_ranks[rank][chunk] for chunk in range(config.vpp) for rank in range(config.pp)]

    expected = [block.parameters for (block,) in model.layers]
    assert [count for counts in in_order for count in counts[:-1]] == expected
    if config.assignment.layers:
        assert tuple(len(counts) - 1 for counts in in_order) == config.assignment.layers
    outside = sum(counts[-1] for counts in in_order)
    assert outside == model.embedding.parameters + model.head.parameters + model.num_mtp_layers * sum(
        block.parameters for block in model.prediction
    )
