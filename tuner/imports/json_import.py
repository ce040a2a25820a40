"""What `meshtune export --to json` writes, read back."""

from __future__ import annotations

from costmodels.job.model_catalog import model_names
from costmodels.job.parallel_config import DEGREES, FURTHER_DIMENSIONS, ParallelConfig
from costmodels.job.runtime import runtime_names
from hardware.io.errors import ConfigError, did_you_mean
from tuner.imports.imported import Imported
from tuner.imports.keys import Keys, json_mapping

_JOB = ("sequence_length", "global_batch_size", "precision", "optimizer")


def import_json(text: str) -> Imported:
    """The configuration and the job; the model where the catalog has it.

    Raises:
        ConfigError: it is no such file, or a value cannot work.
    """
    keys = Keys(json_mapping(text))
    told = keys.value("config")
    if not isinstance(told, dict):
        raise ConfigError("holds no `config` as `meshtune export --to json` writes it")
    known = DEGREES + FURTHER_DIMENSIONS
    for name in told:
        if name not in known:
            raise ConfigError("unknown key", key=f"config.{name}", value=told[name], nearest=did_you_mean(name, known))
    if not isinstance(told.get("assignment", ""), str):
        raise ConfigError("must be text", key="config.assignment", value=told["assignment"])
    try:
        config = ParallelConfig(**told)
    except ConfigError as error:
        raise error.under("config") from None
    further = config.values([name for name in FURTHER_DIMENSIONS if name != "assignment"])
    model, runtime = keys.text("job.model"), keys.text("runtime")
    groups = keys.value("cluster.groups")
    of = Keys(groups[0]) if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict) else Keys({})
    return Imported(
        framework="json",
        runtime=runtime if runtime in runtime_names() else "megatron-core",
        model_name=model if model in model_names() else "",
        job={name: value for name in _JOB if (value := keys.value(f"job.{name}")) is not None} | further,
        degrees={name: getattr(config, name) for name in DEGREES},
        assignment=str(config.assignment),
        hosts=of.count("hosts"),
        devices_per_host=of.count("devices_per_host"),
    )
