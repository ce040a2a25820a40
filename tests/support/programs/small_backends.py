"""Torch backends of tiny jobs on a few processor cores."""

from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.runtime import find_runtime
from hardware.cluster_file import read_described_cluster
from tests.support.programs.training_ranks import LLAMA, job_of
from trials.torch_training.backend import TorchBackend

DP = ParallelConfig(dp=2, mbs=2, sequence_parallel=False)
PP = ParallelConfig(pp=2, mbs=2, sequence_parallel=False)


def cluster_of(devices, hosts=1):
    """Build a cluster of hosts with some cores."""
    return read_described_cluster({"name": "cpu-host", "hosts": hosts, "devices_per_host": devices}, Path()).cluster


def backend_of(model=LLAMA, devices=2, **changes):
    """Build a backend with three steps on two cores by default."""
    options = {"warmup_steps": 1, "min_steps": 3, "max_steps": 3, "profiles": False, "hang_limit_s": 20.0} | changes
    return TorchBackend(
        job=job_of(model), cluster=cluster_of(devices), runtime=find_runtime("torch-reference"), device="cpu", **options
    )
