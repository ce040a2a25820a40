"""Importer for the flags of Acme's launcher."""

import re

from costmodels.job.parallel_config import DEGREES
from hardware.io.errors import ConfigError
from tuner.imports import Imported


def import_acme(text: str) -> Imported:
    """Read `acme-train --model NAME --batch N --length N` and the degrees of its flags."""
    said = dict(re.findall(r"--(\w+)[ =](\S+)", text))
    if "model" not in said:
        raise ConfigError("names no model", key="--model")
    return Imported(
        framework="acme",
        runtime="acme-trainer",
        model_name=said["model"],
        job={"global_batch_size": int(said["batch"]), "sequence_length": int(said["length"])},
        degrees={name: int(said.get(name, 1)) for name in DEGREES if name != "dp"},
    )
