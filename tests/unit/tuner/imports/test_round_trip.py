from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.job.model_catalog import load_model
from costmodels.job.parallel_config import FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.job.uneven_work import Assignment, numbers_in_words
from hardware.cluster_file import find_cluster
from tuner.export import find_exporter
from tuner.imports import IMPORTERS, present_of
from tuner.space.enumeration import SpaceOptions, enumerate_space, setting_for

DEVICES = 64
MODELS = ("llama3-8b", "llama2-34b", "qwen2.5-7b", "gpt-175b", "mixtral-8x7b", "deepseek-v3")
OPENED = (
    *(("recompute", (0, 1, 2)), ("offload", (0, 1)), ("zero_stage", (0, 1))),
    *(("expert_tp", (0, 1, 2)), ("dp_shard", (0, 2, 4))),
)


@cache
def space_of(model, sequence_parallel):
    """A setting on 64 H100 and all configurations of it that obey Megatron-LM's rules."""
    job = TrainingJob(
        model=load_model(model, Path()),
        sequence_length=8192,
        global_batch_size=256,
        sequence_parallel=sequence_parallel,
    )
    options = SpaceOptions(allowed=OPENED, opened=tuple(name for name, _ in OPENED))
    setting = setting_for(job, find_cluster("dgx-h100", DEVICES // 8), find_runtime("megatron-core"), options)
    return setting, enumerate_space(setting, options)[0]


# Megatron-LM trains experts with sequence parallelism only.
SPACES = [(model, True) for model in MODELS] + [(model, False) for model in MODELS[:4]]


@st.composite
def configurations(draw):
    """A setting with a valid configuration of it, whose stages may hold unequal layers."""
    setting, grid = space_of(*draw(st.sampled_from(SPACES)))
    config = grid.config(draw(st.integers(0, len(grid) - 1)))
    chunks, layers = config.pp * config.vpp, setting.job.model.num_layers
    if config.recompute == "none" and layers // chunks > 2:
        config = replace(config, recompute_layers=draw(st.sampled_from([0, 1, 2])))
    if chunks > 1 and draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=chunks - 1, max_size=chunks - 1)))
        of_stage = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True))
        config = ParallelConfig(
            **(
                config.values((*config.values(), *FURTHER_DIMENSIONS))
                | {"assignment": f"layers={numbers_in_words(of_stage)}"}
            )
        )
    return setting, config


def read_back(target, setting, config):
    """The configuration that an import of the export means on the same devices."""
    job, runtime = setting.job, setting.runtime
    imported = IMPORTERS[target](find_exporter(target)(setting, config).text)
    present = present_of(imported, devices=DEVICES, model=job.model, runtime=runtime)
    assert {name: present.job[name] for name in ("sequence_length", "global_batch_size", "precision", "optimizer")} == {
        "sequence_length": job.sequence_length,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        "optimizer": job.optimizer,
    }
    assert imported.unread == ()
    further = {name: value for name, value in present.job.items() if name in FURTHER_DIMENSIONS}
    return ParallelConfig(**({"sequence_parallel": config.sequence_parallel} | further | present.current))


@given(configurations())
def test_an_import_of_megatrons_flags_is_the_configuration(drawn):
    """Every dimension of every valid configuration comes back from the flags; where the layers that were dealt out by
    hand are those that the runtime deals by itself, nothing is said of them.
    """
    setting, config = drawn

    found = read_back("megatron", setting, config)

    if not found.assignment and config.assignment:
        usual = find_exporter("megatron")(setting, found).text
        assert layers_of(usual, setting, config) == config.assignment.layers
        found = ParallelConfig(
            **(found.values((*found.values(), *FURTHER_DIMENSIONS)) | {"assignment": str(config.assignment)})
        )
    assert found == config


def layers_of(text, setting, config):
    """The layers of each virtual stage that an export without an assignment asks for."""
    imported = IMPORTERS["megatron"](text)
    chunks = config.pp * config.vpp
    return imported.layers or (setting.job.model.num_layers // chunks,) * chunks


@settings(deadline=None, max_examples=30)  # as above; every dimension is told alike
@given(configurations())
def test_an_import_of_our_json_is_the_configuration(drawn):
    """JSON tells every dimension by its name, uneven layers too."""
    setting, config = drawn

    assert read_back("json", setting, config) == config


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_reads_back_what_it_offloads(stage, offload):
    """The states' place and their ZeRO stage are keys of the file."""
    setting, _ = space_of("llama3-8b", True)
    export = find_exporter("deepspeed")(setting, ParallelConfig(dp=64, zero_stage=stage, offload=offload))

    job = IMPORTERS["deepspeed"](export.text).job

    assert (job["zero_stage"], job.get("offload", "none")) == (stage, offload)


@pytest.mark.parametrize("target", ["megatron", "json"])
def test_uneven_layers_come_back(target):
    """An assignment that no runtime would choose by itself is told by the layout and read back from it."""
    setting, _ = space_of("llama3-8b", True)
    config = ParallelConfig(pp=4, tp=8, dp=2, assignment=Assignment(layers=(10, 9, 7, 6)))

    assert read_back(target, setting, config) == config
