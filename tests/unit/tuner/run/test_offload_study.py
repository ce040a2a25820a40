"""Studies that may keep the optimizer's states on the host: they do so where the states do not fit otherwise."""

import pytest

from tests.support.studies.in_process_executor import run_here
from trials.backend import Status
from tuner.study_file.config import load_study

STUDY = """\
name: offload
model: llama3-8b
cluster: {device: H100-SXM-80, hosts: 1, devices_per_host: %s}
job: {sequence_length: 4096, global_batch_size: 16}
runtime: megatron-core
space: {cp: [1], up: [1], vpp: [1], recompute: [none, full], offload: [none, optimizer]}
search: {max_trials: 60, seed: 1}
trial: {backend: simulated}
"""


@pytest.fixture
def study(tmp_path):
    """A function that loads the study on so many devices."""

    def load(devices, *, job=""):
        path = tmp_path / "study.yaml"
        text = (STUDY % devices).replace("global_batch_size: 16", f"global_batch_size: 16{job}")
        path.write_text(text + f"storage: sqlite:///{tmp_path / 'study.db'}\n")
        return load_study(path)

    return load


@pytest.mark.parametrize(("devices", "candidates", "best"), [(1, {1}, "optimizer"), (8, {0, 1}, "none")])
def test_a_study_offloads_only_where_it_must(study, devices, candidates, best):
    """One H100 trains 8 billion parameters only with states on the host; of eight, the fastest has them on devices."""
    config = study(devices)

    result, _ = run_here(config)

    assert {"recompute", "offload"} <= set(config.problem.dimensions)
    assert set(config.problem.space().grid.offload.tolist()) == candidates
    assert result.best.status == Status.OK
    assert result.best.params["offload"] == best


def test_a_study_without_offloading_means_what_it_always_meant(study):
    """Trials from before there was the key go on: only an offloaded job is told apart from them."""
    plain, offloaded = study(8), study(8, job=", offload: optimizer")

    assert "offload" not in plain.meaning["job"]
    assert "offload_modes" not in plain.meaning["runtime"]
    assert offloaded.meaning["job"]["offload"] == "optimizer"
