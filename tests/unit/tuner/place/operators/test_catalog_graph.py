"""Forward passes of models of the catalog, as operators."""

import numpy as np
import pytest

from costmodels.job.model_catalog import find_model
from hardware.io.errors import ConfigError
from tuner.place.operators.graph_file import read_operator_placement


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


@pytest.mark.parametrize("name", ["llama-7b", "llama3-8b", "gpt-13b"])
def test_pieces_add_up_to_the_model(tmp_path, name):
    """However a model is cut, its pieces take the same time together, and hold all of its weights."""
    coarse, fine = (read(tmp_path, name=name, pieces=pieces).workload for pieces in (4, 7))
    short, long = (read(tmp_path, name=name, sequence_length=length).workload for length in (1024, 2048))
    model = find_model(name)
    # activations grow with the tokens, and weights do not
    weights_bytes = (2 * short.memory_bytes - long.memory_bytes).sum()

    assert coarse.exec_s.sum(axis=0) == pytest.approx(fine.exec_s.sum(axis=0))
    assert weights_bytes == pytest.approx(
        2 * (model.num_parameters + model.embedding_parameters * model.tied_embeddings)
    )
    assert (coarse.exec_s[:, 1] > coarse.exec_s[:, 0]).all()


def test_a_chain_hands_on_hidden_states(tmp_path):
    """Each piece takes the hidden states of the one before, in the width of the precision."""
    found = read(tmp_path, sequences=3, pieces=3)

    assert found.operators == ("layers 0-10", "layers 11-21", "layers 22-31")
    assert found.workload.edges.tolist() == [[0, 1], [1, 2]]
    assert found.workload.data_bytes.tolist() == [2 * 3 * 1024 * 4096] * 2
    assert np.isfinite(found.workload.exec_s).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "llama-8b"}, "graphs.one.model.name = 'llama-8b'.*did you mean"),
        ({"pieces": 33}, "graphs.one.model.pieces = 33: is more than the 32 layers"),
        ({"name": "gpt-175b"}, "graphs.one.model.pieces: fits on no device: .* more pieces"),
        ({"pieces": 0}, "graphs.one.model.pieces = 0"),
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

    with pytest.raises(ConfigError, match=r"graphs\.one: has neither `operators` nor `model`"):
        read_operator_placement(mapping, tmp_path / "file.yaml")
    with pytest.raises(ConfigError, match=r"graphs\.one\.operators: cannot be combined with `model`"):
        read_operator_placement(mapping | {"graphs": {"one": both}}, tmp_path / "file.yaml")
