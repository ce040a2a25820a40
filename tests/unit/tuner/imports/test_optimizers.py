"""Optimizers by the names of each framework: read as themselves, written as such, and asked for if unknown."""

import json

import pytest

from costmodels.job.parallel_config import ParallelConfig
from costmodels.optimizers.registry import OPTIMIZERS
from tests.support.studies.launch_scripts import DEEPSPEED, GPT_NEOX, NANOTRON, TORCHTITAN
from tests.unit.tuner.export.test_export import setting_of
from tuner.export import find_exporter
from tuner.imports import IMPORTERS
from tuner.imports.torchtitan import import_torchtitan


def megatron(flags):
    """What a script with such flags says."""
    return IMPORTERS["megatron"](f"torchrun pretrain_gpt.py --tensor-model-parallel-size 2 {flags}")


def deepspeed(**optimizer):
    """What DeepSpeed's file says with such a section."""
    return IMPORTERS["deepspeed"](json.dumps(json.loads(DEEPSPEED) | {"optimizer": optimizer}))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "adam"),
        ("--optimizer muon --use-distributed-optimizer", "muon"),
        ("--optimizer dist_muon", "muon"),
        ("--optimizer adaptive_muon", "adaptive_muon"),
        ("--optimizer lion", "lion"),
        ("--optimizer sgd", "sgd"),
        ("--optimizer sgd --sgd-momentum 0.0", "plain_sgd"),
    ],
)
def test_megatrons_optimizers(flags, name):
    """Each choice of its parser is read as what it is."""
    assert megatron(flags).job["optimizer"] == name


def test_options_of_muon_are_facts():
    """How tp's parts are multiplied, and the number of iterations, are said by flags."""
    facts = megatron("--optimizer muon --muon-tp-mode distributed --muon-num-ns-steps 7 --muon-no-split-qkv").facts

    told = {name: facts[name] for name in ("muon_tp_mode", "newton_schulz_steps", "muon_splits_qkv")}
    assert told == {"muon_tp_mode": "distributed", "newton_schulz_steps": 7, "muon_splits_qkv": False}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"type": "Muon", "params": {"ns_method": "standard"}}, "muon"),
        ({"type": "Lion"}, "lion"),
        ({"type": "Adagrad"}, "adagrad"),
        ({"type": "SGD"}, "plain_sgd"),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "sgd"),
        ({"type": "AdamW"}, "adam"),
    ],
)
def test_deepspeeds_optimizers(section, name):
    """An SGD has a momentum only if the file gives it one, as torch's has."""
    assert deepspeed(**section).job["optimizer"] == name


@pytest.mark.parametrize(
    ("framework", "text", "before", "after", "name"),
    [
        ("torchtitan", TORCHTITAN, "[training]", "[optimizer]\nname = 'Muon'\n[training]", "muon"),
        ("torchtitan", TORCHTITAN, "[training]", "[optimizer]\nname = 'AdamW'\n[training]", "adam"),
        ("nanotron", NANOTRON, "name: adamW", "name: sgd", "plain_sgd"),
        ("gpt-neox", GPT_NEOX, '"type": "Adam"', '"type": "Lion"', "lion"),
    ],
)
def test_names_in_files(framework, text, before, after, name):
    """Files of each framework are read by its own names."""
    assert before in text
    assert IMPORTERS[framework](text.replace(before, after)).job["optimizer"] == name


RECIPE = """
def tiny():
    return Trainer.Config(
        optimizer=dist_muon(3e-4), training=TrainingConfig(seq_len=512), parallelism=ParallelismConfig()
    )

def dist_muon(lr):
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*norm.*", optimizer_name="AdamW", optimizer_kwargs={}),
            ParamGroupConfig(pattern=".*", optimizer_name="DistMuon", optimizer_kwargs={}),
        ]
    )
"""


def test_a_recipe_of_torchtitan_names_the_optimizer_of_matrices():
    """Of several groups of parameters, that with another optimizer than Adam says which it is."""
    script = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config tiny"

    assert import_torchtitan(script, file=RECIPE).job["optimizer"] == "muon"


@pytest.mark.parametrize(
    ("imported", "told"),
    [
        (lambda: megatron("--optimizer soap"), "soap decomposes matrices (QR)"),
        (lambda: megatron("--optimizer muonn"), "did you mean 'muon'"),
        (lambda: megatron("--optimizer $OPTIMIZER"), "cannot be read"),
        (lambda: deepspeed(type="OneBitAdam"), "sends compressed gradients"),
        (lambda: IMPORTERS["nanotron"](NANOTRON.replace("name: adamW", "name: shampoo")), "is no optimizer that"),
    ],
)
def test_an_unknown_optimizer_is_asked_for(imported, told):
    """Nothing is read in its place: the reason names it, why, and the nearest."""
    found = imported()

    assert "optimizer" not in found.job
    assert told in found.open["optimizer"]


@pytest.mark.parametrize(
    "target", ["megatron", "mindspeed", "deepspeed", "nanotron", "gpt-neox", "torchtitan", "maxtext", "nemo"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_written_or_told(target, name):
    """An export has the optimizer among its flags, or a note that names it or what the framework has instead."""
    setting = setting_of(optimizer=name)
    export = find_exporter(target)(setting, ParallelConfig(tp=8, dp=8))
    notes = [note for note in export.notes if note.startswith("optimizer:")]

    if name == "adam" or (target in ("megatron", "mindspeed") and "megatron" in OPTIMIZERS[name].spellings):
        assert not notes
    elif name == "plain_sgd" and target in ("megatron", "mindspeed"):
        assert "--sgd-momentum 0" in export.text
    elif target == "maxtext" and "maxtext" in OPTIMIZERS[name].spellings:
        assert f"opt_type={OPTIMIZERS[name].spellings['maxtext'][0]}" in export.text
    else:
        assert notes
