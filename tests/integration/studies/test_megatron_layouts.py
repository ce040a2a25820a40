"""Layouts of pipelines as Megatron-LM's own parser takes them, whatever the layers, chunks and prediction modules."""

import os
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.support.megatron_parser import MegatronParser
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.uneven_work import Assignment
from tests.support.settings.small_spaces import setting_of
from tuner.export.megatron import export_megatron
from tuner.export.megatron_flags import LAYOUT, OF_ROUND
from tuner.imports.megatron_degrees import layers_of_layout
from tuner.space.enumeration import broken_rules

COUNT = int(os.environ.get("MESHTUNE_LAYOUTS", "60"))
"""Layouts that are drawn; 300 are what is promised."""
MOE = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 256}


@pytest.fixture(scope="module")
def parser():
    """Megatron-LM's parser of arguments, with its checks."""
    try:
        return MegatronParser()
    except ImportError as error:
        pytest.skip(f"{error}; `make frameworks` installs it")


def draw(rng):
    """A small model with some number of layers on a pipeline, and a configuration that obeys every rule."""
    while True:
        pp, num_layers = int(rng.choice([2, 3, 4, 6, 8, 16])), int(rng.integers(2, 130))
        moe = MOE | {"num_dense_layers": int(rng.integers(0, min(4, num_layers)))} if rng.random() < 0.5 else {}
        modules = int(rng.integers(0, 3))
        setting, options = setting_of(
            "megatron",
            hosts=1,
            devices_per_host=pp,
            batch=int(rng.integers(pp, 6 * pp)),
            num_layers=num_layers,
            num_mtp_layers=modules,
            **moe,
        )
        config = ParallelConfig(pp=pp, vpp=int(rng.integers(1, num_layers // pp + 3)))
        if rng.random() < 0.5:
            config = replace(config, assignment=Assignment(layers=cut(rng, num_layers, pp * config.vpp)))
        if not broken_rules(setting, replace(options, without=("vpp_shortens",)), config):
            return setting, config


def cut(rng, num_layers, parts):
    """A cut of the layers into parts, of which the first and the last may be empty."""
    inner = max(parts - 2, 0)
    free = num_layers - inner
    if free < 0:
        return ()
    first = int(rng.integers(0, free + 1))
    held = [first, *([1] * inner), free - first] if parts > 1 else [num_layers]
    for _ in range(int(rng.integers(0, 3 * parts))):
        giver, taker = rng.integers(parts, size=2)
        if held[giver] > (0 if giver in (0, parts - 1) else 1):
            held[giver] -= 1
            held[taker] += 1
    return tuple(held)


@pytest.mark.slow
def test_every_layout_is_taken_by_the_real_parser(parser):
    """It reads the flags with the model's, and holds the layers and modules that were meant, each once."""
    rng = np.random.default_rng(0)
    layouts = rounds = 0
    for _ in range(COUNT):
        setting, config = draw(rng)
        export = export_megatron(setting, config)
        found = parser.parse(export.arguments, export.environment, setting)

        if LAYOUT in found:
            layouts += 1
            text = str(found[LAYOUT])
            assert text == export.arguments[export.arguments.index(LAYOUT) + 1]
            assert text.count("m") == setting.job.model.num_mtp_layers
            assert config.assignment.layers in ((), layers_of_layout(text, LAYOUT))
        rounds += OF_ROUND in found
    assert layouts > COUNT / 2
    assert rounds > COUNT / 20
