"""Forward passes of models of the catalog, as operators."""

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.parallel_config import ConfigGrid, ParallelConfig
from costmodels.job.runtime import find_runtime
from costmodels.job.training_job import TrainingJob
from costmodels.step.step_time import estimate_step
from hardware.cluster_file import cluster_from_mapping
from hardware.io.errors import ConfigError
from tuner.place.operators.graph_file import read_operator_placement
from tuner.space.enumeration import SpaceOptions, setting_for


def read(tmp_path, **changes):
    """Read one graph of LLaMA 7B in pieces."""
    model = {"name": "llama-7b", "sequence_length": 1024, "pieces": 4} | changes
    mapping = {
        "cluster": {
            "groups": [{"name": "rtx4090d", "devices_per_host": 1}, {"name": "v100-pcie", "devices_per_host": 1}]
        },
        "precision": "fp16",
        "graphs": {"one": {"model": model}},
    }
    return read_operator_placement(mapping, tmp_path / "file.yaml")


def tied_table(name):
    """Return the parameters of a second copy of a tied table, which the last piece needs."""
    model = find_model(name)
    return model.embedding.table * model.tied_embeddings


@pytest.mark.parametrize("name", ["llama-7b", "llama3-8b", "gpt-13b"])
def test_pieces_add_up_to_the_model(tmp_path, name):
    """However a model is cut, its pieces take the same time together, and hold all of its weights."""
    coarse, fine = (read(tmp_path, name=name, pieces=pieces, sequence_length=1024).workload for pieces in (4, 7))
    short, long = (read(tmp_path, name=name, sequence_length=length).workload for length in (1024, 2048))
    # activations grow with the tokens, and weights do not
    weights_bytes = (2 * short.memory_bytes - long.memory_bytes).sum()

    assert coarse.exec_s.sum(axis=0) == pytest.approx(fine.exec_s.sum(axis=0))
    assert weights_bytes == pytest.approx(2 * (find_model(name).num_parameters + tied_table(name)))
    assert (coarse.exec_s[:, 1] > coarse.exec_s[:, 0]).all()


def test_a_chain_hands_on_hidden_states(tmp_path):
    """Each piece takes the hidden states of the one before, in the width of the precision."""
    found = read(tmp_path, sequences=3, pieces=3)

    assert found.operators == ("forward 0: 0-10", "forward 0: 11-21", "forward 0: 22-31")
    assert found.workload.mates == ()
    assert found.workload.edges.tolist() == [[0, 1], [1, 2]]
    assert found.workload.data_bytes.tolist() == [2 * 3 * 1024 * 4096] * 2
    assert np.isfinite(found.workload.exec_s).all()


def test_training_passes_forth_and_back_where_its_weights_are(tmp_path):
    """Each piece's passes share a device and its weights, gradients and states; a backward pass takes what was kept."""
    found = read(tmp_path, job="train", name="gpt-13b", pieces=20, micro_batches=1).workload
    small = read(tmp_path, job="train", pieces=8, micro_batches=3)
    num = {name: at for at, name in enumerate(small.operators)}
    edges = {
        tuple(edge): size for edge, size in zip(small.workload.edges.tolist(), small.workload.data_bytes, strict=True)
    }
    message_bytes = 2 * 1024 * 4096

    assert found.memory_bytes.sum() == 18 * (find_model("gpt-13b").num_parameters + tied_table("gpt-13b"))
    assert len(small.operators) == 8 * 3 * 2
    assert sorted(map(len, small.workload.mates)) == [6] * 8
    assert edges[num["backward 1: 4-7"], num["backward 1: 0-3"]] == message_bytes
    assert edges[num["forward 1: 0-3"], num["backward 1: 0-3"]] > 4 * 8 * message_bytes
    assert (small.workload.memory_bytes > 0).sum() == 8
    forth, back = (small.workload.exec_s[num[f"{phase} 2: 8-11"], 0] for phase in ("forward", "backward"))
    assert 1.5 < back / forth < 3


def test_pieces_on_one_device_take_the_time_of_a_predicted_step(tmp_path):
    """All passes of two micro-batches together take what the cost model predicts for the compute of such a step.

    It also has the traffic of accumulated gradients, which does not grow with the tokens.
    """
    pieces = read(tmp_path, job="train", sequences=4, pieces=8, micro_batches=2).workload
    alone = cluster_from_mapping({"name": "v100-pcie", "devices_per_host": 1}, tmp_path)
    job = TrainingJob(model=find_model("llama-7b"), sequence_length=1024, global_batch_size=8, precision="fp16")
    setting = setting_for(job, alone, find_runtime("megatron-core"), SpaceOptions())
    predicted = estimate_step(setting, ConfigGrid.from_configs([ParallelConfig(mbs=4)]))

    assert pieces.exec_s[:, 1].sum() == pytest.approx(float(predicted.breakdown_s["compute"][0]), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "llama-8b"}, "graphs.one.model.name = 'llama-8b'.*did you mean"),
        ({"pieces": 33}, "graphs.one.model.pieces = 33: is more than the 32 layers"),
        ({"name": "gpt-175b"}, "graphs.one.model.pieces: fits on no device: .* more pieces"),
        ({"pieces": 0}, "graphs.one.model.pieces = 0"),
        ({"pieces": 16, "job": "train", "micro_batches": 3}, "pieces = 16: make 96 operators; at most 64"),
    ],
)
def test_a_model_that_cannot_be_placed_is_named(tmp_path, changes, message):
    """An unknown model, too many pieces or too large ones are one ConfigError with their key."""
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_operators_and_a_model_exclude_each_other(tmp_path):
    """A graph has operators or a model: both, and none of them, are refused."""
    mapping = {"cluster": {"name": "v100-pcie"}, "graphs": {"one": {"fusions": []}}}
    both = {"operators": {"a": {"tflop": 1.0}}, "model": {"name": "llama-7b", "sequence_length": 8, "pieces": 1}}

    with pytest.raises(ConfigError, match=r"graphs\.one: has none of `operators`, `model`, `jax` and `torch`"):
        read_operator_placement(mapping, tmp_path / "file.yaml")
    with pytest.raises(ConfigError, match=r"graphs\.one\.operators: cannot be combined with `model`"):
        read_operator_placement(mapping | {"graphs": {"one": both}}, tmp_path / "file.yaml")
