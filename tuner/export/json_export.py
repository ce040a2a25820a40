"""Exporter that writes the configuration as JSON, together with the job and the cluster that it was found for."""

from __future__ import annotations

import json
from typing import Any

from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.setting import Setting
from hardware.launched_hosts import launched, launched_numbers
from tuner.export.exporter import Export


def export_json(setting: Setting, config: ParallelConfig) -> Export:
    """Return one JSON object whose key `config` holds every dimension by name.

    `ParallelConfig(**config)` restores the configuration.
    """
    job, cluster = setting.job, setting.cluster
    content = {
        "config": config.values(DEGREES + FURTHER_DIMENSIONS),
        "num_micro_batches": job.global_batch_size // (config.dp * config.mbs),
        "job": {
            "model": job.model.name,
            "num_parameters": job.model.num_parameters,
            "num_layers": job.model.num_layers,
            "padded_layers": setting.padded_layers,
            "sequence_length": job.sequence_length,
            "global_batch_size": job.global_batch_size,
            **_describe_sequences(setting, config),
            "precision": job.precision,
            "optimizer": job.optimizer,
        },
        "cluster": {
            "name": cluster.name,
            "devices": cluster.num_devices,
            "hosts_in_rank_order": list(launched_numbers(cluster, config.assignment.hosts)),
            "groups": [
                {"device": group.device.name, "hosts": group.hosts, "devices_per_host": group.devices_per_host}
                for group in launched(cluster).groups
            ],
        },
        "runtime": setting.runtime.name,
        "facts": dict(setting.runtime.stated),
    }
    return Export(target="json", text=json.dumps(content, indent=2, allow_nan=False) + "\n")


def _describe_sequences(setting: Setting, config: ParallelConfig) -> dict[str, Any]:
    """Return the keys of a job whose sequences vary in length."""
    sequences = setting.job.sequences
    if sequences is None:
        return {}
    return {
        "sequences": {"layout": sequences.layout, "order": sequences.order, "mean_length": sequences.mean_length},
        "micro_batch_tokens": config.mbs * setting.job.largest.sequence_length,
    }
