import pytest

from costmodels.job.model_catalog import find_model
from costmodels.job.proxy_job import Reduction, least_layers, with_layers
from costmodels.job.training_job import TrainingJob
from hardware.cluster_file import find_cluster
from tests.support.settings.model_parts import num_moe_layers


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_fewer_layers_are_the_same_layers(name):
    """However few layers are left, each kind of layer that the model has is among them, with its own parameters."""
    model = find_model(name)
    for layers in range(least_layers(model), model.num_layers + 1):
        smaller = with_layers(model, layers)

        assert smaller.num_layers == layers
        assert (num_moe_layers(smaller) > 0) == model.is_moe
        assert (num_moe_layers(smaller) < layers) == (num_moe_layers(model) < model.num_layers)
        assert set(smaller.layers) == set(model.layers)


def test_a_model_with_all_its_layers_is_itself():
    """A job that keeps its layers keeps its model, name and all."""
    model = find_model("deepseek-v3")

    assert with_layers(model, model.num_layers) is model


def test_a_reduction_changes_layers_batch_and_hosts_alone():
    """What the smaller job trains, and the devices that it runs on, are otherwise those of the full one."""
    job = TrainingJob(model=find_model("llama3-70b"), sequence_length=8192, global_batch_size=512, recompute="full")
    cluster = find_cluster("dgx-h100", hosts=16)
    reduction = Reduction(hosts=2, layers=20, global_batch_size=32)

    smaller, fewer = reduction.job(job), reduction.cluster(cluster)

    assert (smaller.model.num_layers, smaller.global_batch_size) == (20, 32)
    assert (smaller.sequence_length, smaller.recompute) == (8192, "full")
    assert fewer.num_devices == 16
    assert (fewer.devices, fewer.groups[0].nic_links) == (cluster.devices, cluster.groups[0].nic_links)
