"""Ask training frameworks themselves whether they run a layout, and hold the rules of the space against their answers.

    python -m benchmarks.judges.launchable_layouts [--count 500] [--target megatron,torchtitan] [--seed 0] [--json]

For each framework `--count` layouts around the edges of its rules are drawn (benchmarks/support/oracles/draws.py):
small models on a few devices, and layouts that break none of the rules or one. The framework's own code is asked, on
this machine's CPU: its parser and validation, its process groups, its model and its schedule, as ranks of a world that
does not exist. The modules beside the draws say which parts are real. `make frameworks` installs the pinned versions.

Columns: both counts layouts that the rules offer and the framework runs; neither those that both refuse. lost counts
layouts that the framework runs and the rules refuse; known are those of them with a stated reason (registry.py beside
the draws). offered counts layouts that the rules offer and the framework refuses. unlike counts layouts about which the
list of the space and its reasons disagree. lost, offered and unlike must be 0, otherwise the exit status is 1.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from benchmarks.support.framework_rows import framework_parser, rows_of
from benchmarks.support.oracles import children
from benchmarks.support.oracles.draws import draws, is_listed
from benchmarks.support.oracles.registry import FRAMEWORKS, Framework, installed
from benchmarks.support.timing import USERS_MISTAKE, tell
from costmodels.job.setting import Setting
from hardware.io.errors import ConfigError

LIMIT_S = 7200
"""Longest time for all layouts of one framework [s]."""
COLUMNS = ("both", "neither", "lost", "known", "offered", "unlike")


def measure(target: str, count: int, seed: int) -> dict[str, Any]:
    """Compute one row in a process of its own, with all layouts of the three lists under `wrong`."""
    row: dict[str, Any] = children.ask(lambda: _row(target, FRAMEWORKS[target], count, seed), LIMIT_S)
    return row


def failed(row: dict[str, Any]) -> bool:
    """Return whether the rules and the framework, or the rules and the list, disagree."""
    return any(row[name] for name in ("lost", "offered", "unlike"))


def _row(target: str, framework: Framework, count: int, seed: int) -> dict[str, Any]:
    start, found, lists = time.perf_counter(), Counter[str](), list[str]()
    oracle, reasons = framework.make(), Counter[str]()
    for setting, config, broken in draws(framework.edges, count, seed):
        refused = oracle(setting, config)
        told = f"{config} {_facts(setting)}"
        if bool(broken) == bool(refused):
            found["neither" if refused else "both"] += 1
        elif refused:
            found["offered"] += 1
            lists.append(f"offered wrongly: {told}: {refused}")
        elif broken.keys() <= framework.known.keys():
            found["known"] += 1
            reasons.update(broken.keys())
        else:
            found["lost"] += 1
            lists.append(f"lost: {told}: {'; '.join(f'{name}: {reason}' for name, reason in broken.items())}")
        if is_listed(setting, config) == bool(broken):
            found["unlike"] += 1
            lists.append(f"{'not listed' if not broken else 'listed'}: {told}: breaks {[*broken]}")
    lists += [f"known: {number} by {rule}: {framework.known[rule]}" for rule, number in sorted(reasons.items())]
    return {
        "target": target,
        "layouts": count,
        **{name: found[name] for name in COLUMNS},
        "seconds": round(time.perf_counter() - start, 1),
        "wrong": lists,
    }


def _facts(setting: Setting) -> str:
    model, job = setting.job.model, setting.job
    return (
        f"({setting.cluster.num_devices} devices, {model.num_layers} layers, {model.sizes('heads')} heads, "
        f"{model.sizes('kv_heads')} key-value heads, {model.sizes('scanned_groups')} groups of states, "
        f"widths {model.sizes('ffn')}, {model.num_experts} experts, "
        f"{job.sequence_length} tokens, batch {job.global_batch_size}, {'tied' if model.tied_embeddings else 'untied'})"
    )


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each framework and return the exit status."""
    given = framework_parser("judges.launchable_layouts", __doc__, FRAMEWORKS).parse_args(arguments)
    asked = {name: lambda name=name: installed(name) for name in FRAMEWORKS}
    try:
        rows = rows_of(given, asked, lambda target, found: found and measure(target, given.count, given.seed))
    except ConfigError as error:
        tell(f"launchable_layouts: {error}")
        return USERS_MISTAKE
    return int(len(rows) < len(given.target.split(",")) or any(failed(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
