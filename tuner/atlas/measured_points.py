"""Measured runs of the atlas's models: published runs whose model has the sizes of one of the catalog."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from costmodels.calibration.measured_runs import MeasuredRun, read_measured_and_skipped
from costmodels.job.model_catalog import find_model
from costmodels.job.model_spec import ModelSpec
from hardware.device import find_device
from hardware.io.errors import ConfigError


def measured_by_model(paths: Sequence[Path], models: Sequence[str]) -> dict[str, list[MeasuredRun]]:
    """Return the completed runs of each model of the catalog, from files in the form of configs/measured/README.md.

    Args:
        paths: CSV files.
        models: Names of models of the catalog.

    Raises:
        ConfigError: A file cannot be read.
    """
    sizes: dict[tuple[object, ...], str] = {sizes_of(find_model(name)): name for name in models}
    found: dict[str, list[MeasuredRun]] = defaultdict(list)
    for path in paths:
        runs, _ = read_measured_and_skipped([path.absolute()], Path())
        for run in runs:
            name = sizes.get(sizes_of(run.model))
            if name is not None and run.step_time_s is not None and not run.is_failed:
                found[name].append(run)
    return {name: sorted(runs, key=lambda run: (run.device, run.devices, run.source)) for name, runs in found.items()}


def sizes_of(model: ModelSpec) -> tuple[object, ...]:
    """Return the sizes by which a published model is one of the catalog: widths and kinds of all blocks.

    Vocabulary, biases and heads may differ.
    """
    return model.hidden_size, tuple(
        tuple((block.kind, getattr(block, "ffn_size", 0), getattr(block, "num_experts", 0)) for block in layer)
        for layer in model.layers
    )


def device_name(run: MeasuredRun) -> str:
    """Return the name that the catalog has for a run's device; as the row spells it if it has none."""
    try:
        return find_device(run.device).name
    except ConfigError:
        return run.device


def by_device(runs: Sequence[MeasuredRun]) -> Mapping[str, list[MeasuredRun]]:
    """Return runs by the name of their device."""
    found: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        found[device_name(run)].append(run)
    return dict(found)
