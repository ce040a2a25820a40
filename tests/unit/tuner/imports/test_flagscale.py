"""What files of FlagScale mean."""

import pytest

from hardware.io.errors import ConfigError
from tests.support.studies.launch_scripts import FLAGSCALE_EXPERIMENT, FLAGSCALE_TRAIN
from tuner.imports import IMPORTERS
from tuner.imports.flagscale import join_files, train_file_of


def read(text):
    """What a file means."""
    return IMPORTERS["flagscale"](text)


def test_a_file_for_training():
    """Keys at any depth are flags of Megatron-LM; true is a switch, false is none."""
    imported = read(FLAGSCALE_TRAIN)

    assert imported.runtime == "megatron-core"
    assert {name: size for name, size in imported.degrees.items() if size > 1} == {"pp": 4, "tp": 2, "ep": 4}
    assert (imported.job["precision"], imported.job["recompute"], imported.job["zero_stage"]) == ("bf16", "full", 1)
    assert imported.job["sequence_parallel"] is True
    assert imported.model["vocab_size"] == 32000
    assert imported.model["num_dense_layers"] == 0
    assert (imported.hosts, imported.open, imported.unread) == (None, {}, ())


def test_an_experiment_with_its_file():
    """Joined as Hydra joins them, the experiment tells the hosts, and references are followed."""
    assert train_file_of(FLAGSCALE_EXPERIMENT) == "train/8x7b.yaml"

    reference = FLAGSCALE_TRAIN.replace("micro_batch_size: 1", "micro_batch_size: ${experiment.batch}")
    joined = join_files(FLAGSCALE_EXPERIMENT.replace("seed: 42", "seed: 42\n  batch: 2"), reference)
    imported = read(joined)

    assert (imported.hosts, imported.devices_per_host) == (4, 8)
    assert imported.degrees["mbs"] == 2


def test_a_reference_to_nothing_is_asked_for():
    """A degree that only Hydra could fill in is open."""
    imported = read(FLAGSCALE_TRAIN.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: ${tp:??}"))

    assert "tp" not in imported.degrees
    assert "filled in by Hydra" in imported.open["tp"]


def test_the_program_of_an_experiment_counts():
    """An experiment that starts another program than that of a language model is refused with its kind."""
    experiment = "experiment: {task: {type: train, backend: megatron, entrypoint: ./flagscale/train/train_llava.py}}\n"

    with pytest.raises(ConfigError, match="images and text"):
        read(experiment + FLAGSCALE_TRAIN)


@pytest.mark.parametrize(
    ("runner", "devices"),
    [
        ("{nnodes: 2, nproc_per_node: 4, hostfile: hosts}", (2, 4)),
        ("{hostfile: null}", (1, 4)),
        ("{hostfile: hosts}", (None, 4)),
        ('{nnodes: "${env:WORLD_SIZE}", nproc_per_node: 8}', (None, 8)),
    ],
)
def test_devices(runner, devices):
    """Without a file of hosts there is one host, whose devices are those that the environment names."""
    experiment = f'experiment: {{runner: {runner}, envs: {{CUDA_VISIBLE_DEVICES: "0,1,2,3"}}}}\n'
    imported = read(experiment + FLAGSCALE_TRAIN)

    assert (imported.hosts, imported.devices_per_host) == devices


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("experiment: {task: {type: serve}}\n" + FLAGSCALE_TRAIN, "must be train"),
        ("experiment: {task: {type: train, backend: robotics}}\n" + FLAGSCALE_TRAIN, "must be megatron"),
        (FLAGSCALE_TRAIN.replace("system:", "system:\n  hetero: {enable_hetero: true}"), "several meshes"),
        (FLAGSCALE_TRAIN.replace("swiglu: true", "lora_rank: 8"), "adapters"),
        (FLAGSCALE_EXPERIMENT, "not beside it"),
        ("defaults: [{train: ../../secret}]\nexperiment: {}\n", "no sections"),
        ("system: {tensor_model_parallel_size: 1}\nmodel: {action_horizon: 14}\n", "names no num_layers"),
    ],
    ids=["serving", "another backend", "several meshes", "adapters", "an experiment alone", "another folder", "robot"],
)
def test_other_files_are_refused(text, why):
    """Other tasks, and layouts of several meshes, are refused with their key; no file of another folder is read."""
    with pytest.raises(ConfigError, match=why):
        read(text)
