"""Run of a rehearsal: a process in the program's own environment, behind a boundary, answers rank by rank."""

from __future__ import annotations

import json
import os
import select
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodels.job.parallel_config import ParallelConfig
from costmodels.xla.target import target_of
from hardware.compute_capability import CAPABILITIES, capability_of
from hardware.device import Device
from trials.command.process_tree import Supervised, start_supervised
from tuner.capture.room.enter import BOUNDARIES, OUTCOME, Outcome, Setting, start_behind
from tuner.capture.room.keeper import Bounds
from tuner.capture.run_script import NoBoundaryError
from tuner.capture.scratch import short_folder
from tuner.rehearsal.answer import RankAnswer
from tuner.rehearsal.program import Program

STEPS = 2
"""Steps of a rehearsal: the optimizer makes its states in the first, so that the second has the peak."""
LIMIT_S = 600.0
"""Default time limit of a rehearsal [s]."""
MODULE = "tuner.rehearsal.entrance"
_HERE = Path(__file__).parent
_ROOMS = ("both_rooms", "torch_room", "jax_room")
_SHARED = (("costmodels", "xla", "groups.py"), ("costmodels", "xla", "compiler.py"))
"""Modules that the room of JAX takes along."""
_QUIET = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
}
"""Variables of the process: nothing is compiled, computed, or asked of a device or the network."""
_BYTES_AT_ONCE = 1 << 16
_PATIENCE_S = 10.0
"""Time that the boundary, which has the same limit, may take to end the program by itself [s]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Run of a program as one rank of a world.

    Attributes:
        program: Program to run.
        world: Number of ranks.
        rank: Number of the rank.
        stage: Number of its pipeline stage.
        most_micro_batches: Largest number of micro-batches that a step makes; None for all.
        most_before_last: The same for all steps but the last; None for no difference.
    """

    program: Program
    world: int
    rank: int
    stage: int
    most_micro_batches: int | None = None
    most_before_last: int | None = None


def one_rank_a_stage(config: ParallelConfig) -> tuple[int, ...]:
    """Return the first rank of every stage; the ranks of one follow each other (megatron-core parallel_state.py)."""
    per_stage = config.num_devices // config.pp
    return tuple(stage * per_stage for stage in range(config.pp))


def enough_micro_batches(config: ParallelConfig) -> int:
    """Return the number of micro-batches after which a pipeline of 1F1B, interleaved too, holds no more than before.

    A stage holds pp micro-batches at most, and with chunks those of the warm-up, fewer than two rounds of pp (Narayanan
    et al. 2021, section 2.2).
    """
    return max(2 * config.pp, 3)


def cases_of(
    program: Program,
    config: ParallelConfig,
    ranks: Sequence[int],
    most_micro_batches: int | None,
    *,
    has_order: bool = False,
) -> tuple[Case, ...]:
    """Return the runs of a program, with the flags of a configuration, as several ranks.

    With an order, steps before the last make half as many micro-batches, of which follows the time of one more.
    """
    world, per_stage = config.num_devices, config.num_devices // config.pp
    return tuple(
        Case(
            program=program,
            world=world,
            rank=rank,
            stage=rank // per_stage,
            most_micro_batches=most_micro_batches,
            most_before_last=config.pp if has_order and most_micro_batches is not None else None,
        )
        for rank in ranks
    )


def _told_capability(device: Device) -> tuple[int, int]:
    return capability_of(device) or CAPABILITIES["H100"]


def rehearse(
    cases: Sequence[Case],
    *,
    device: Device,
    jobs: int = 1,
    limit_s: float = LIMIT_S,
    unconfined: bool = False,
    has_order: bool = False,
    environment: Mapping[str, str],
) -> Iterator[RankAnswer]:
    """Run a program as several ranks, and yield the answers in their order, each as it comes.

    Args:
        cases: Runs, one at least; their programs differ in arguments and variables alone.
        device: Device that the program believes to be on.
        jobs: Number of ranks that run at once, each on a core of its own and in some 400 MB.
        limit_s: Time limit of all [s].
        unconfined: Whether the program runs without a boundary if none is possible.
        has_order: Whether the order of operators and collectives is recorded, in one more step.
        environment: Variables beside those of the program.

    Raises:
        NoBoundaryError: no boundary is possible, and nothing was started.
        OSError: the interpreter cannot be started.
    """
    reasons: dict[str, str] = {}
    program = cases[0].program
    for boundary in (*BOUNDARIES, *([""] if unconfined else [])):
        with short_folder() as folder:
            for name in ("bin", "base", "records", "out", "tmp"):
                (folder / name).mkdir()
            _write_request(folder, cases, device, environment, jobs=jobs, has_order=has_order)
            running = _start(folder, boundary, program, limit_s, environment)
            told, began_s = 0, time.monotonic()
            for answer in _answers(running, cases, limit_s, _told_capability(device), environment):
                told += 1
                yield answer
            refused = _refusal(folder) if boundary and not told else ""
            if not refused:
                is_late = time.monotonic() - began_s >= limit_s
                ended = f"it took more than {limit_s:g} s" if is_late else "its process was killed"
                yield from (_without_answer(case, ended) for case in cases[told:])
                return
            reasons[boundary] = refused
    raise NoBoundaryError(reasons)


def _write_request(
    folder: Path, cases: Sequence[Case], device: Device, environment: Mapping[str, str], *, jobs: int, has_order: bool
) -> None:
    """Write what the room reads, and the room itself, alone on its path."""
    package = folder / "path" / "tuner" / "rehearsal"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    shutil.copyfile(_HERE / "entrance.py", package / "entrance.py")
    for room in _ROOMS:
        shutil.copytree(_HERE / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    for module in _SHARED:
        shared = folder.joinpath("path", *module)
        shared.parent.mkdir(parents=True, exist_ok=True)
        for place in (shared.parent.parent, shared.parent):
            (place / "__init__.py").touch()
        shutil.copyfile(_HERE.parents[1].joinpath(*module), shared)
    facts = {
        "name": device.name,
        "capability": _told_capability(device),
        "memory_bytes": device.memory_bytes,
        "num_sms": device.num_sms or 132,
        "per_host": device.devices_per_host,
    }
    program = cases[0].program  # whose variables the process has
    usual = {name: environment.get(name) for name in program.environment}
    request = {
        "script": None if program.script is None else str(program.script),
        "module": program.module,
        "steps": STEPS + has_order,
        "has_order": has_order,
        "target": target_of(device),
        "jobs": jobs,
        "device": facts,
        "cases": [
            {
                "rank": case.rank,
                "world": case.world,
                "most_micro_batches": case.most_micro_batches,
                "most_before_last": case.most_before_last,
                "arguments": case.program.arguments,
                "environment": usual | dict(case.program.environment),
            }
            for case in cases
        ],
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")


def _start(folder: Path, boundary: str, program: Program, limit_s: float, environment: Mapping[str, str]) -> Supervised:
    """Start the room's process behind a boundary, or without one."""
    command = (program.interpreter, "-m", MODULE, str(folder / "request.json"))
    given = _set({**environment, **program.environment})
    searched = (str(folder / "path"), given.get("PYTHONPATH"))
    variables = given | _QUIET | {"PYTHONPATH": os.pathsep.join(filter(None, searched))}
    variables |= {"TMPDIR": str(folder / "tmp"), "PWD": str(program.directory)}
    if not boundary:
        return start_supervised(command, variables, program.directory)
    bounds = Bounds(seconds=limit_s, memory_bytes=64 << 30)
    setting = Setting(
        command=command,
        directory=str(program.directory),
        environment=variables,
        folder=str(folder),
        stand_ins=(),
        own=(),
        boundary=boundary,
        bounds=bounds,
    )
    return start_behind(setting)


def _set(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the variables that are not removed."""
    return {name: text for name, text in variables.items() if text is not None}


def _answers(
    running: Supervised,
    cases: Sequence[Case],
    limit_s: float,
    capability: tuple[int, int],
    environment: Mapping[str, str],
) -> Iterator[RankAnswer]:
    """Yield the answers among the lines that the process writes; end it at the time limit, or if nobody reads on."""
    deadline_s, rest, left = time.monotonic() + limit_s + _PATIENCE_S, b"", list(cases)
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not select.select([running.output], [], [], left_s)[0]:
                return
            read = os.read(running.output, _BYTES_AT_ONCE)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                if line.startswith(b'{"rank"'):
                    case = left.pop(0)
                    variables = {**environment, **case.program.environment}
                    yield RankAnswer.from_json(json.loads(line), case.stage, capability, variables)
    finally:
        os.close(running.life_line)
        running.wait()
        os.close(running.output)


def _refusal(folder: Path) -> str:
    """Return why the boundary was not possible, or nothing."""
    try:
        return Outcome.from_json((folder / "out" / OUTCOME).read_text(encoding="utf-8")).refused
    except FileNotFoundError:
        return ""


def _without_answer(case: Case, ended: str) -> RankAnswer:
    words = f"the rehearsal ended before an answer: {ended}"
    return RankAnswer(rank=case.rank, stage=case.stage, verdict="unknown", error=words, parts={}, invented={})
