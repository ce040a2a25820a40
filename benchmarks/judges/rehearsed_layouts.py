"""Rehearse random layouts of Megatron-LM, and hold the rules of the space against what the framework says.

    python -m benchmarks.judges.rehearsed_layouts [--megatron DIR] [--engine DIR] [--count 300] [--seed 0]
        [--answers FILE] [--limit 7200] [--json]

The layouts are those of `judges.launchable_layouts`: small models, and layouts that break none of the rules or one.
Each is exported, and makes two steps with these flags as the first and the last rank, above Transformer Engine's own
Python code. DIR of `--megatron` is a tree of Megatron-LM, whose unmodified `pretrain_gpt.py` runs; without it a short
program on the installed megatron-core.

`--answers` keeps what each rank said in a file as it comes: with the same file a run goes on where the last one ended,
and asks the rules again. After `--limit` seconds the layouts whose two ranks have answered are counted.

Columns: both counts layouts that the rules offer and the framework runs; neither those that both refuse. lost counts
layouts that the framework runs and the rules refuse, without those with a stated reason (known). offered counts layouts
that the rules offer and the framework refuses. unknown counts those of which the rehearsal cannot tell, left those that
have not run. lost and offered must be 0, otherwise the exit status is 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.megatron_parser import model_flags
from benchmarks.support.oracles.draws import VOCABULARY, draws
from benchmarks.support.oracles.registry import FRAMEWORKS
from benchmarks.support.rehearsed_layouts import FRAMEWORKS as PROGRAMS
from benchmarks.support.timing import benchmark_parser, count_at_least, tell
from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from hardware.device import Device
from tests.support.rehearsal.megatron_study import ENGINE
from tuner.export import find_exporter
from tuner.rehearsal.program import Program
from tuner.rehearsal.run import Case, enough_micro_batches, rehearse

PROGRAM = "judges.rehearsed_layouts"
DISAGREES = 1
TOLD_EVERY = 20
"""Number of answers after which progress is told."""
_DATA = (
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    str(VOCABULARY),
    "--transformer-impl",
    "transformer_engine",
)


@dataclass
class Answers:
    """What the ranks of layouts said, each asked once.

    Attributes:
        file: File that keeps them; None for none.
        known: Verdict, error and last lines of code, by the arguments and the rank.
    """

    file: Path | None
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file."""
        if self.file is not None and self.file.is_file():
            for line in self.file.read_text(encoding="utf-8").splitlines():
                self.known |= json.loads(line)

    def ask(self, cases: Sequence[Case], device: Device, limit_s: float) -> None:
        """Rehearse what is not known, until the time is over [s]."""
        missing = [case for case in cases if _key(case) not in self.known]
        if not missing:
            return
        deadline_s = time.monotonic() + limit_s
        answers = rehearse(missing, device=device, limit_s=limit_s, unconfined=True, environment=os.environ)
        for number, (case, answer) in enumerate(zip(missing, answers, strict=True), start=1):
            if time.monotonic() >= deadline_s:
                return
            said = {_key(case): {"verdict": answer.verdict, "error": answer.error, "where": answer.where[-2:]}}
            self.known |= said
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(said) + "\n")
            if number % TOLD_EVERY == 0:
                tell(f"{number} of {len(missing)} ranks")

    def of(self, cases: Sequence[Case]) -> list[dict[str, Any]] | None:
        """Return what the ranks of a layout said; None if one was not asked."""
        keys = [_key(case) for case in cases]
        return [self.known[key] for key in keys] if self.known.keys() >= set(keys) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts and what disagrees, and return the exit status."""
    parser = benchmark_parser(PROGRAM, __doc__)
    parser.add_argument("--megatron", type=Path, metavar="DIR", help="tree of Megatron-LM (installed one)")
    parser.add_argument("--engine", type=Path, default=ENGINE, metavar="DIR", help="Transformer Engine's Python code")
    parser.add_argument("--count", type=count_at_least(1), default=300, help="number of layouts (300)")
    parser.add_argument("--seed", type=count_at_least(0), default=0, help="seed of the draws (0)")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="file that keeps the answers (none)")
    parser.add_argument("--limit", type=float, default=7200.0, metavar="S", help="time limit of all layouts (7200)")
    given = parser.parse_args(argv)
    framework = FRAMEWORKS["megatron"]
    drawn = list(draws(framework.edges, given.count, given.seed))
    path = os.pathsep.join(filter(None, (str(given.engine), os.environ.get("PYTHONPATH"))))
    script = PROGRAMS["megatron-core"].script if given.megatron is None else given.megatron / "pretrain_gpt.py"
    cases = [_cases(setting, config, script, path) for setting, config, _ in drawn]
    answers = Answers(given.answers)
    answers.ask([case for both in cases for case in both], drawn[0][0].cluster.devices[0], given.limit)
    found, lines = Counter[str](), list[str]()
    for own, (_, config, broken) in zip(cases, drawn, strict=True):
        word, told = _judged(answers.of(own), broken, framework.known)
        found[word] += 1
        if word in ("lost", "offered", "unknown"):
            lines.append(f"{word}: {config}: {told}")
    if given.json:
        print(json.dumps({"counts": found, "disagree": lines}, indent=2))
    else:
        for line in lines:
            tell(line)
        print(", ".join(f"{word}: {number}" for word, number in sorted(found.items())))
    return DISAGREES if found["lost"] or found["offered"] else 0


def _cases(setting: Setting, config: ParallelConfig, script: Path, path: str) -> list[Case]:
    """Return the runs of a layout as the first and the last rank."""
    export, world = find_exporter("megatron")(setting, config), setting.cluster.num_devices
    words = (*model_flags(setting), *_DATA, *export.arguments)
    if config.ep > 1 and not setting.job.model.is_moe:
        words += ("--expert-model-parallel-size", str(config.ep))
    program = Program(
        interpreter=sys.executable,
        script=script,
        module=None,
        arguments=words,
        directory=script.parent,
        environment={**dict(export.environment), "PYTHONPATH": path},
    )
    most = enough_micro_batches(config)
    return [Case(program=program, world=world, rank=rank, stage=0, most_micro_batches=most) for rank in (0, world - 1)]


def _key(case: Case) -> str:
    program = case.program
    given = [str(program.script), program.arguments, program.environment, case.world, case.rank]
    return hashlib.sha256(json.dumps(given).encode()).hexdigest()


def _judged(
    answers: Sequence[Mapping[str, Any]] | None, broken: Mapping[str, str], known: Mapping[str, str]
) -> tuple[str, str]:
    """Return the column of a layout, and what is to be told of it."""
    if answers is None:
        return "left", ""
    refused, unknown = (
        next((f"{one['error']} {list(one['where'])}" for one in answers if one["verdict"] == verdict), None)
        for verdict in ("refused", "unknown")
    )
    if refused is not None:
        return ("neither" if broken else "offered"), refused
    if unknown is not None:
        return "unknown", unknown
    if not broken:
        return "both", ""
    return ("known" if broken.keys() <= known.keys() else "lost"), "; ".join(broken.values())


if __name__ == "__main__":
    sys.exit(main())
