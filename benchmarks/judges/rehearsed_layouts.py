"""Rehearse random layouts of Megatron-LM, and hold the rules of the space against what the framework says.

    python -m benchmarks.judges.rehearsed_layouts --megatron DIR [--engine DIR] [--count 300] [--seed 0] [--json]

DIR of `--megatron` is a tree of Megatron-LM. The layouts are those of `judges.launchable_layouts`: small models, and
layouts that break none of the rules or one. Each is exported, and unmodified `pretrain_gpt.py` makes two steps with
these flags as the first and the last rank, above Transformer Engine's own Python code.

Columns: both counts layouts that the rules offer and the framework runs; neither those that both refuse. lost counts
layouts that the framework runs and the rules refuse, without those with a stated reason (known). offered counts layouts
that the rules offer and the framework refuses. unknown counts those of which the rehearsal cannot tell. lost and
offered must be 0, otherwise the exit status is 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.megatron_parser import model_flags
from benchmarks.support.oracles.draws import VOCABULARY, draws
from benchmarks.support.oracles.registry import FRAMEWORKS
from benchmarks.support.timing import benchmark_parser, count_at_least, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from tuner.export import find_exporter
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.program import Program
from tuner.rehearsal.run import Case, enough_micro_batches, rehearse

PROGRAM = "judges.rehearsed_layouts"
LIMIT_S = 7200.0
"""Longest time for all layouts [s]."""
DISAGREES = 1
_DATA = (
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    str(VOCABULARY),
    "--transformer-impl",
    "transformer_engine",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts and what disagrees, and return the exit status."""
    parser = benchmark_parser(PROGRAM, __doc__)
    parser.add_argument("--megatron", type=Path, required=True, metavar="DIR", help="tree of Megatron-LM")
    engine = Path(sys.prefix) / "transformer-engine"
    parser.add_argument("--engine", type=Path, default=engine, metavar="DIR", help="Transformer Engine's Python code")
    parser.add_argument("--count", type=count_at_least(1), default=300, help="number of layouts (300)")
    parser.add_argument("--seed", type=count_at_least(0), default=0, help="seed of the draws (0)")
    given = parser.parse_args(argv)
    framework = FRAMEWORKS["megatron"]
    drawn = list(draws(framework.edges, given.count, given.seed))
    path = os.pathsep.join(filter(None, (str(given.engine), os.environ.get("PYTHONPATH"))))
    cases = [case for setting, config, _ in drawn for case in _cases(setting, config, given.megatron, path)]
    device = drawn[0][0].cluster.devices[0]
    answers = list(rehearse(cases, device=device, limit_s=LIMIT_S, unconfined=True, environment=os.environ))
    found, lines = Counter[str](), list[str]()
    for at, (_, config, broken) in enumerate(drawn):
        word, told = _judged(answers[2 * at : 2 * at + 2], broken, framework.known)
        found[word] += 1
        if word not in ("both", "neither", "known"):
            lines.append(f"{word}: {config}: {told}")
    if given.json:
        print(json.dumps({"counts": found, "disagree": lines}, indent=2))
    else:
        for line in lines:
            tell(line)
        print(", ".join(f"{word}: {number}" for word, number in sorted(found.items())))
    return DISAGREES if found["lost"] or found["offered"] else 0


def _cases(setting: Setting, config: ParallelConfig, megatron: Path, path: str) -> list[Case]:
    """Return the runs of a layout as the first and the last rank."""
    export, world = find_exporter("megatron")(setting, config), setting.cluster.num_devices
    words = (*model_flags(setting), *_DATA, *export.arguments)
    if config.ep > 1 and not setting.job.model.is_moe:
        words += ("--expert-model-parallel-size", str(config.ep))
    program = Program(
        interpreter=sys.executable,
        script=megatron / "pretrain_gpt.py",
        module=None,
        arguments=words,
        directory=megatron,
        environment={**dict(export.environment), "PYTHONPATH": path},
    )
    most = enough_micro_batches(config)
    return [Case(program=program, world=world, rank=rank, stage=0, most_micro_batches=most) for rank in (0, world - 1)]


def _judged(answers: Sequence[RankAnswer], broken: dict[str, str], known: object) -> tuple[str, str]:
    """Return the column of a layout, and what is to be told of it."""
    refused = next((one for one in answers if one.verdict == "refused"), None)
    unknown = next((one for one in answers if one.verdict == "unknown"), None)
    if refused is not None:
        return ("neither" if broken else "offered"), f"{refused.error} {list(refused.where[-2:])}"
    if unknown is not None:
        return "unknown", f"{unknown.error} {list(unknown.where[-2:])}"
    if not broken:
        return "both", ""
    assert isinstance(known, dict), "the registry's reasons"
    return ("known" if broken.keys() <= known.keys() else "lost"), "; ".join(broken.values())


if __name__ == "__main__":
    sys.exit(main())
