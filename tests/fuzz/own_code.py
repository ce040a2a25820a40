"""Targets: code of the user's that a command starts or imports: hooks of a watch, and modules with a step of one's own.

Nothing that an input says is run as it stands. Hooks are programs that the target has written, with the input's words
as their arguments; modules are put together from statements of a table, with the input's values as literals.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import itertools
import json
import os
import shlex
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from costmodels.sharding.frontends.factories import program_of_factory, takes_micro_batches
from tests.fuzz.mutation import of_json
from tests.fuzz.target import Target
from tuner.watch.hook import call_hook, check_hook

HOOKS = {
    "quiet": "cat > /dev/null",
    "deaf": "exec < /dev/null; exit 0",
    "failing": "exit 3",
    "killed": "kill -9 $$",
    "printing": "env | head -c 20000 | tr -d '\\n' > /dev/null; head -c 100 > /dev/null",
}
"""Programs that a hook may be, all of them harmless."""

CALL = {
    "command": "./quiet --job 'a b'",
    "decision": "move",
    "names": ["n0", "node-1.cluster"],
    "flags": "--tensor-model-parallel-size 8",
    "target": "megatron",
    "config": {"tp": 8},
}
CALLS = tuple(json.dumps(CALL | {"command": f"./{name} x"}).encode() for name in HOOKS)


def _call(data: bytes, folder: Path) -> None:
    """Check a hook as a watch does, and call it if it is one of ours."""
    told = _mapping(data)
    for name, body in HOOKS.items():
        if not (folder / name).exists():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
            (folder / name).chmod(0o755)
    (folder / "closed").touch()
    here = Path.cwd()
    os.chdir(folder)
    try:
        command = str(told.get("command", ""))
        check_hook(command)
        program = shlex.split(command)[0]
        if program.startswith("./") and program[2:] in HOOKS:
            names, config = told.get("names"), told.get("config")
            payload = {
                "decision": str(told.get("decision")),
                "forced": bool(told.get("forced")),
                "pays": bool(told.get("pays")),
                "flags": {"text": str(told.get("flags")), "target": str(told.get("target"))},
                "best": {
                    "names": [str(name) for name in names] if isinstance(names, list) else [],
                    "config": {
                        name: str(value) for name, value in (config if isinstance(config, dict) else {}).items()
                    },
                },
                "in_training": {"checkpoint": str(told.get("checkpoint")), "step": told.get("step", 0)},
            }
            assert isinstance(call_hook(command, payload), str), "a hook's failure is told, not raised"
    finally:
        os.chdir(here)


STATEMENTS = {
    "print": "print({0!r})",
    "write": "os.write(1, repr({0!r}).encode())",
    "original": "sys.__stdout__.write(repr({0!r}))",
    "warn": "warnings.warn(repr({0!r})[:9])",
    "exit": "sys.exit({0!r})",
    "raise": "raise Unusual({0!r})",
    "interrupt": "raise KeyboardInterrupt({0!r})",
    "generator": "raise GeneratorExit({0!r})",
    "stop": "raise StopIteration({0!r})",
    "error": "raise ValueError({0!r})",
    "assert": "assert not {0!r}, {0!r}",
    "mute": "raise Mute",
    "cause": "raise Unusual from ValueError({0!r})",
    "missing": "import no_such_module",
    "deep": "deep = lambda: deep()\ndeep()",
    "close": "sys.stdout.close()",
    "close both": "sys.stdout.close(); sys.stderr.close()",
    "no streams": "sys.stdout = sys.stderr = None",
    "closed descriptors": "os.close(1); os.close(2)",
    "leave": "os.chdir('/')",
    "ignore": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "process": "subprocess.run(['/bin/echo', 'process'], check=False)",
    "c": "ctypes.CDLL(None).puts(b'c')",
    "arguments": "argparse.ArgumentParser().parse_args([repr({0!r})])",
    "name": "step = {0!r}",
    "nothing": "pass",
}
RESULTS = {
    "step": "(lambda params, x: (params - x.sum(), x.sum()), (SHAPE, SHAPE), ('params',))",
    "no donated": "(lambda params, x: x, (SHAPE, SHAPE))",
    "value": "{0!r}",
    "arguments": "(lambda x: x, {0!r})",
    "donated": "(lambda x: x, (SHAPE,), {0!r})",
    "many": "(lambda x: x, (SHAPE,), (), {0!r})",
    "raising": "(raising, (SHAPE,))",
    "too few": "(lambda x, y: x, (SHAPE,))",
    "text": "(lambda x: {0!r}, (SHAPE,))",
    "class": "(Unusual, (SHAPE,))",
    "generator": "(one for one in ())",
    "endless": "itertools.count()",
}
MODULE = """
import argparse, ctypes, itertools, os, signal, subprocess, sys, warnings

class Unusual(BaseException):
    pass

class Mute(BaseException):
    def __str__(self):
        raise Unusual

class Shape:
    shape, dtype, weak_type = (4,), __import__("numpy").dtype("float32"), False

SHAPE = __import__("jax").ShapeDtypeStruct((4,), "float32")

def raising(x):
    raise Unusual(x)

{at_import}

def step({parameters}):
    {in_factory}
    return {result}
"""
STEP = {
    "import": [{"do": "nothing", "with": 0}],
    "factory": [{"do": "print", "with": "hello"}],
    "returns": {"do": "step", "with": None},
    "parameters": "",
    "name": "step",
}
STEPS = (
    json.dumps(STEP).encode(),
    *(
        json.dumps(STEP | {"import": [{"do": name, "with": "x"}]}).encode()
        for name in ("print", "write", "original", "warn", "no streams", "leave", "ignore", "process", "c")
    ),
)

_NUMBERS = itertools.count()


def _mapping(data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _filled(table: dict[str, str], one: Any) -> str:
    """The statement that an input names, with its value; some statement of the table if it names none."""
    told = one if isinstance(one, dict) else {"with": one}
    name = told.get("do")
    names = list(table)
    chosen = name if isinstance(name, str) and name in table else names[len(str(name)) % len(names)]
    return table[chosen].format(told.get("with"))


def _import_step(data: bytes, folder: Path) -> None:
    """Import and trace a module, and look at what is left of the process; its name is new each time."""
    told = _mapping(data)
    at_import = told.get("import")
    in_factory = told.get("factory")
    lines = {
        "at_import": "\n".join(_filled(STATEMENTS, one) for one in (at_import if isinstance(at_import, list) else [])),
        "in_factory": "\n    ".join(
            "; ".join(_filled(STATEMENTS, one).splitlines())
            for one in (in_factory if isinstance(in_factory, list) and in_factory else ["nothing"])
        ),
        "result": _filled(RESULTS, told.get("returns")),
        "parameters": "micro_batches=1" if told.get("parameters") else "",
    }
    module = f"own_{os.getpid()}_{next(_NUMBERS)}"
    (folder / f"{module}.py").write_text(MODULE.format(**lines), encoding="utf-8", errors="backslashreplace")
    importlib.invalidate_caches()
    name = f"{module}:{told.get('name', 'step')}"
    before = _state()
    try:
        with redirect_stdout(io.StringIO()) as answer:
            takes_micro_batches(name, "jax", option="--jax", folder=str(folder))
            program_of_factory(name)
            assert answer.getvalue() == "", "what a module prints is no part of the answer"
    finally:
        sys.modules.pop(module, None)
        assert _state() == before, "a module leaves the process as it was"


def _state() -> tuple[Any, ...]:
    descriptors = tuple((os.fstat(number).st_dev, os.fstat(number).st_ino) for number in (1, 2))
    return Path.cwd(), signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr, descriptors


TARGETS = (
    Target(name="hook", read=_call, mutation=of_json, seeds=lambda: CALLS),
    # a machine without JAX refuses all of them
    *(
        (Target(name="own step", read=_import_step, mutation=of_json, seeds=lambda: STEPS),)
        if importlib.util.find_spec("jax")
        else ()
    ),
)
