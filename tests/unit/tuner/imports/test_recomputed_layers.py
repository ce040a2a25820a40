"""Recomputation of some layers, and of several together: read from flags and files, and written back."""

import pytest

from costmodels.job.uneven_work import Assignment
from tests.support.studies.launch_scripts import GPT_NEOX
from tests.unit.tuner.export.test_export import flags_of, megatron, setting_of
from tuner.imports import IMPORTERS

FULL = "--recompute-granularity full"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (f"{FULL} --recompute-method block --recompute-num-layers 6", {"recompute": "none", "recompute_layers": 6}),
        (f"{FULL} --recompute-method block --recompute-num-layers 0", {"recompute": "none", "recompute_layers": 0}),
        (f"{FULL} --recompute-method block --recompute-num-layers 12", {"recompute": "full"}),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 6 --num-layers-per-virtual-pipeline-stage 4",
            {"recompute": "full"},
        ),
        (
            f"{FULL} --recompute-method block --recompute-num-layers 2 --num-virtual-stages-per-pipeline-rank 3",
            {"recompute": "none", "recompute_layers": 2},
        ),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 1", {"recompute": "full"}),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 4", {"recompute": "full", "recompute_unit": 4}),
        (
            "--checkpoint-activations --activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            {"recompute": "none", "recompute_layers": 3},
        ),
    ],
)
def test_megatrons_methods(flags, found):
    """Of 24 layers in 2 stages, `block` repeats so many of each virtual stage, and `uniform` so many together."""
    text = f"torchrun pretrain_gpt.py --num-layers 24 --pipeline-model-parallel-size 2 {flags}"
    job = IMPORTERS["megatron"](text).job

    assert {name: value for name, value in job.items() if name.startswith("recompute")} == found


def test_gpt_neox_repeats_layers_together():
    """Its checkpoint_num_layers is the number of layers between two kept inputs."""
    assert '"checkpoint-activations": true' in GPT_NEOX
    text = GPT_NEOX.replace(
        '"checkpoint-activations": true', '"checkpoint-activations": true, "checkpoint-num-layers": 3'
    )

    assert IMPORTERS["gpt-neox"](text).job["recompute_unit"] == 3


@pytest.mark.parametrize(
    ("config", "method", "number"),
    [
        ({"recompute_layers": 3}, "block", "3"),
        ({"recompute_layers": 3, "recompute": "full"}, "uniform", "4"),
        ({"recompute": "full"}, "uniform", "4"),
        ({"assignment": Assignment(layers=(12, 20), recomputed=(12, 14))}, "block", "14"),
    ],
)
def test_flags_say_which_layers_run_again(config, method, number):
    """One number of layers, also as an assignment that the method can say, and a unit of layers are flags."""
    flags = flags_of(megatron(setting_of(recompute_unit=4), pp=2, tp=8, dp=4, **config).text)

    assert flags["--recompute-granularity"] == ["full"]
    assert (flags["--recompute-method"], flags["--recompute-num-layers"]) == ([method], [number])


def test_unlike_numbers_are_noted():
    """Numbers that no flag can say are told in a note, and nothing is recomputed by flags."""
    export = megatron(setting_of(), pp=2, tp=8, dp=4, assignment=Assignment(recomputed=(2, 5)))

    assert "--recompute-method" not in flags_of(export.text)
    assert any(note.startswith("recomputed:") for note in export.notes)
