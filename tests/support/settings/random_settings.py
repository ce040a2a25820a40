"""Hypothesis strategies for all jobs, clusters, runtimes and configurations that the cost model supports."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from costmodels.job.model_catalog import find_model, model_names
from costmodels.job.parallel_config import OFFLOAD_MODES, RECOMPUTE_MODES, ZERO_STAGES, ConfigGrid, ParallelConfig
from costmodels.job.runtime import RuntimeProfile, find_runtime, runtime_names
from costmodels.job.setting import Setting
from costmodels.job.training_job import TrainingJob
from hardware.cluster import Cluster
from hardware.cluster_file import cluster_from_mapping, find_cluster

MEGATRON = find_runtime("megatron-core")
MIXED = cluster_from_mapping({"groups": [{"name": "dgx-a100", "hosts": 1}, {"name": "dgx-h100", "hosts": 1}]}, Path())
PRECISIONS_OF_ALL = ("bf16", "fp16")  # what every device below has units for
CLUSTERS = {
    "one DGX H100": find_cluster("dgx-h100"),
    "four DGX A100": find_cluster("dgx-a100", hosts=4),
    "two Ascend hosts": find_cluster("ascend-910b", hosts=2),
    "three hosts of four TPUs": find_cluster("tpu-v3", hosts=3),
    "A100 and H100": MIXED,
}


@dataclass(frozen=True)
class Case:
    """Setting of one job on one cluster, and configurations for it."""

    job: TrainingJob
    cluster: Cluster
    runtime: RuntimeProfile
    grid: ConfigGrid

    @property
    def setting(self) -> Setting:
        """The setting of its configurations."""
        return Setting(job=self.job, cluster=self.cluster, runtime=self.runtime)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def meshes(num_devices: int) -> list[tuple[int, ...]]:
    """Enumerate all (pp, tp, dp, cp, up) with this product."""
    return [mesh for mesh in itertools.product(divisors(num_devices), repeat=5) if math.prod(mesh) == num_devices]


MESHES = {cluster.num_devices: meshes(cluster.num_devices) for cluster in CLUSTERS.values()}


@st.composite
def cases(draw, max_configs: int = 12) -> Case:
    """Draw a catalog model on a cluster, under a runtime, with up to `max_configs` configurations."""
    model = find_model(draw(st.sampled_from(model_names())))
    cluster = draw(st.sampled_from(list(CLUSTERS.values())))
    runtime = find_runtime(draw(st.sampled_from(runtime_names())))
    per_replica = draw(st.sampled_from([1, 4, 12]))
    job = TrainingJob(
        model=model,
        sequence_length=draw(st.sampled_from([1024, 4096, 32768])),
        global_batch_size=cluster.num_devices * per_replica,
        precision=draw(st.sampled_from(PRECISIONS_OF_ALL)),
    )
    configs = []
    for _ in range(draw(st.integers(1, max_configs))):
        pp, tp, dp, cp, up = draw(
            st.sampled_from(MESHES[cluster.num_devices]).filter(lambda m: m[0] <= model.num_layers)
        )
        experts = math.gcd(max(model.num_experts, 1), dp * cp * up)
        expert_tp = draw(st.sampled_from([0, 0, *divisors(tp)])) if model.is_moe else 0
        configs.append(
            ParallelConfig(
                pp=pp,
                tp=tp,
                dp=dp,
                cp=cp,
                up=up,
                vpp=draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1,
                ep=draw(st.sampled_from(divisors(experts))),
                mbs=draw(st.sampled_from(divisors(job.global_batch_size // dp))),
                recompute=draw(st.sampled_from(RECOMPUTE_MODES)),
                offload=draw(st.sampled_from(("none", *OFFLOAD_MODES))),
                zero_stage=draw(st.sampled_from(ZERO_STAGES)),
                sequence_parallel=draw(st.booleans()),
                expert_tp=expert_tp,
                dp_shard=draw(st.sampled_from([0, 0, *divisors(dp)])),
                recompute_layers=draw(st.sampled_from([0, 0, 1, 3])),
            )
        )
    return Case(job, cluster, runtime, ConfigGrid.from_configs(configs))


def job_of(model: str = "llama3-8b", *, sequence_length: int = 4096, batch: int = 64, **fields) -> TrainingJob:
    """Build a job of a catalog model, with replaced fields."""
    spec = find_model(model).changed(**fields) if fields else find_model(model)
    return TrainingJob(model=spec, sequence_length=sequence_length, global_batch_size=batch)


def setting_for(job: TrainingJob, cluster: Cluster, runtime: RuntimeProfile = MEGATRON) -> Setting:
    """Bundle a job, a cluster and a runtime, which is Megatron-Core's by default."""
    return Setting(job=job, cluster=cluster, runtime=runtime)


def grid_of(*configs: ParallelConfig) -> ConfigGrid:
    """Return the configurations as a grid."""
    return ConfigGrid.from_configs(configs)
