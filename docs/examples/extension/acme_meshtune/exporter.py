"""Exporter for Acme's launcher, which takes degrees as `--NAME N`."""

from costmodels.job.parallel_config import DEGREES, ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import Export


def export_acme(setting: Setting, config: ParallelConfig) -> Export:
    """Write a configuration as flags of Acme's launcher."""
    flags = [f"--{name} {getattr(config, name)}" for name in DEGREES if getattr(config, name) > 1]
    notes = () if config.recompute == "none" else (f"recompute: the launcher has no {config.recompute}",)
    text = "\n".join([*(f"# {note}" for note in notes), f"acme-train --model {setting.job.model.name}", *flags]) + "\n"
    return Export(target="acme", text=text, notes=notes)
