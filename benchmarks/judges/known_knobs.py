"""Draw layouts with values of known knobs, and let the frameworks' own parsers read what trials would be given.

    python -m benchmarks.judges.known_knobs [--count 500] [--target megatron,torchtitan] [--seed 0] [--recommended]
        [--json]

For each framework `--count` configurations that it can run are drawn (benchmarks/support/export_samples.py), each with
random values of all knobs of the catalog that suit its model and cluster, or of the recommended ones. What a trial of
the backend `command` would be given, flags, variables and files, is read by the framework's own parser, as far as it is
installed (benchmarks/support/framework_parsers.py). NeMo's overrides are held to the fields of its configurations.
MindSpeed-LLM's flags that are Megatron-LM's are read by that parser, and the others are held to the names of its
arguments (tuner/imports/megatron_arguments.yaml).

Columns: knobs counts the different knobs that were set, values their values; set is the mean number of knobs that a
configuration sets beside today's values; refused counts configurations that the framework does not accept, and must be
0, otherwise the exit status is 1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.export_samples import OPENED, samples
from benchmarks.support.framework_parsers import KNOB_PARSERS, KnobParser, Refused
from benchmarks.support.framework_rows import framework_parser, rows_of
from benchmarks.support.timing import USERS_MISTAKE, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError
from trials.command.backend import CommandBackend
from trials.command.host_program import HostPlan
from trials.command.knob_files import TrialFile
from trials.command.log_pattern import find_pattern
from trials.knobs.knob import Knob, active_knobs
from tuner.export import find_exporter
from tuner.knobs.catalog import known_knobs
from tuner.knobs.needs import unmet_needs
from tuner.space.enumeration import SpaceOptions
from tuner.study_file.exported_flags import flag_exporters
from tuner.study_file.known_knobs import KnobCatalog


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each framework and return the exit status."""
    options = framework_parser("judges.known_knobs", __doc__, KNOB_PARSERS)
    options.add_argument("--recommended", action="store_true", help="only the knobs that studies get as recommended")
    given = options.parse_args(arguments)

    def row_of(target: str, parser: KnobParser | None) -> dict[str, Any] | None:
        if parser is None:
            return None
        return measure(target, given.count, given.seed, parser, only_recommended=given.recommended)

    try:
        rows = rows_of(given, KNOB_PARSERS, row_of)
    except ConfigError as error:
        tell(f"known_knobs: {error}")
        return USERS_MISTAKE
    return int(any(row["refused"] for row in rows))


def measure(target: str, count: int, seed: int, parser: KnobParser, *, only_recommended: bool) -> dict[str, Any]:
    """Compute one row, with up to five examples of what was refused."""
    rng = np.random.default_rng(seed)
    choose = recommended if only_recommended else suitable
    seen, wrong, total, refused = set[tuple[str, Any]](), Counter[str](), 0, 0
    for setting, layout in samples(target, count, seed):
        knobs = choose(target, setting)
        config = with_random_values(layout, knobs, rng)
        chosen = [(knob, value) for knob, value in active_knobs(knobs, config) if value != knob.today]
        total += len(chosen)
        seen |= {(knob.name, value) for knob, value in chosen}
        try:
            parser(plan_of(target, setting, knobs, config), config, setting)
        except Refused as error:
            refused += 1
            values = ", ".join(f"{knob.name}={value}" for knob, value in chosen)
            wrong[f"{layout} with {values}: {' '.join(str(error).split())[-300:]}"] += 1
    return {
        "target": target,
        "configurations": count,
        "knobs": len({name for name, _ in seen}),
        "values": len(seen),
        "set": total / count,
        "refused": refused,
        "wrong": list(wrong)[:5],
    }


@cache
def suitable(target: str, setting: Setting) -> tuple[Knob, ...]:
    """Return all knobs of a framework that suit a setting."""
    names = [
        known.name
        for known in known_knobs(target).values()
        if not known.dimension and not unmet_needs(setting, known.needs)
    ]
    return _catalog(target, setting).build(names).knobs


@cache
def recommended(target: str, setting: Setting) -> tuple[Knob, ...]:
    """Return the knobs that a study of a setting gets as recommended."""
    return _catalog(target, setting).build("recommended").knobs


def _catalog(target: str, setting: Setting) -> KnobCatalog:
    return KnobCatalog(setting=setting, options=SpaceOptions(opened=OPENED), framework=target, files=("config",))


def with_random_values(layout: ParallelConfig, knobs: Sequence[Knob], rng: np.random.Generator) -> ParallelConfig:
    """Return a layout with a random value of each knob; one that is not set has today's."""
    chosen: dict[str, Any] = {knob.name: knob.today for knob in knobs}
    for knob in knobs:  # a condition compares only knobs that stand before
        if knob.when.holds_for(layout, chosen):
            chosen[knob.name] = knob.values[int(rng.integers(len(knob.values)))]
    return replace(layout, knobs=tuple(chosen.items()))


def plan_of(target: str, setting: Setting, knobs: tuple[Knob, ...], config: ParallelConfig) -> HostPlan:
    """Return the work of a host in a trial of the backend `command`."""
    exporters: Mapping[str, Any] = flag_exporters(setting)
    has_flags = target in exporters
    export = find_exporter(target)(setting, config)
    file = TrialFile(name="config", file_name="config.json", text=export.text)
    is_file = any(knob.place.file for knob in knobs)
    backend = CommandBackend(
        job=setting.job,
        cluster=setting.cluster,
        arguments=("train", "{flags}") if has_flags else ("train", "{knobs}"),
        environment=(),
        flags=exporters[target].write if has_flags else None,
        directory=Path(),
        pattern=find_pattern("megatron"),
        knobs=knobs,
        files=(file,) if is_file else (),
        logs=None,
        profile=None,
        profile_root=Path(),
    )
    return backend.plan(config, 0)


if __name__ == "__main__":
    sys.exit(main())
