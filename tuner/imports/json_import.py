"""Importer for the files that `meshtune export --to json` writes."""

from __future__ import annotations

from costmodels.job.model_catalog import model_names
from costmodels.job.parallel_config import DEGREES, ENUMERATED_DIMENSIONS, FURTHER_DIMENSIONS, HAND, ParallelConfig
from costmodels.job.runtime import UNKNOWN, runtime_names
from hardware.io.errors import ConfigError, did_you_mean
from tuner.imports.imported import Imported, Unread
from tuner.imports.keys import Keys, json_mapping

_JOB = ("sequence_length", "global_batch_size", "precision", "optimizer")


def import_json(text: str) -> Imported:
    """Read the configuration and the job, and the name of the model if the catalog contains it.

    Raises:
        ConfigError: the text is not such a file, or a value is invalid.
    """
    keys = Keys(json_mapping(text))
    given = keys.value("config")
    if not isinstance(given, dict):
        raise ConfigError("has no key `config`, which `meshtune export --to json` writes")
    known = DEGREES + FURTHER_DIMENSIONS
    for name in given:
        if name not in known:
            raise ConfigError("unknown key", key=f"config.{name}", value=given[name], nearest=did_you_mean(name, known))
    if not isinstance(given.get("assignment", ""), str):
        raise ConfigError("must be text", key="config.assignment", value=given["assignment"])
    try:
        config = ParallelConfig(**given)
    except ConfigError as error:
        raise error.under("config") from None
    further = config.values(ENUMERATED_DIMENSIONS)
    model, runtime = keys.text("job.model"), keys.text("runtime")
    groups = keys.value("cluster.groups")
    of = Keys(groups[0]) if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict) else Keys({})
    return Imported(
        framework="json",
        runtime=runtime if runtime in runtime_names() else UNKNOWN,
        model_name=model if model in model_names() else "",
        job={name: value for name in _JOB if (value := keys.value(f"job.{name}")) is not None} | further,
        degrees={name: getattr(config, name) for name in DEGREES},
        assignment=str(config.assignment),
        hosts=of.count("hosts"),
        devices_per_host=of.count("devices_per_host"),
        unread=()
        if config.plan == HAND
        else (Unread(what="config.plan", why=f"{config.plan} is no framework's; read as by hand"),),
    )
