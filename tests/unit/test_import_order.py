"""Holds every import of the four packages to the order of the house, and third-party libraries to their fences.

Each check is a function from sources (a mapping of path to text) to a list of sentences, one per violation, so that
the same function judges the real tree and, in `test_each_check_can_fail`, a tree that breaks its rule on purpose.
An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or spelled `import_module`.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hardware", "costmodels", "trials", "tuner")

# The packages that each package may import, from the lowest to the highest; `tuner.planners` is one of its own.
MAY_IMPORT = {
    "hardware": {"hardware"},
    "costmodels": {"hardware", "costmodels"},
    "trials": {"hardware", "costmodels", "trials"},
    "tuner.planners": {"hardware", "costmodels", "tuner.planners"},
    "tuner": {"tuner.forecast", "tuner.economics", "hardware", "costmodels", "trials", "tuner.planners", "tuner"},
}

# The rooms (folders) of each package, from the ground up, and the rooms of the same package that each may import.
# Files that stand loose in a package are the room named after the package.
ROOMS: dict[str, set[str]] = {
    "hardware.io": set(),
    "hardware": {"hardware.io"},
    "costmodels": set(),
    "costmodels.traced": set(),
    "costmodels.blocks": set(),
    "costmodels.optimizers": set(),
    "costmodels.job": {"costmodels.traced", "costmodels.blocks", "costmodels.optimizers"},
    "costmodels.operators": {"costmodels.blocks", "costmodels.job"},
    "costmodels.step": {"costmodels.blocks", "costmodels.optimizers", "costmodels.job", "costmodels.operators"},
    "costmodels.simulator": {"costmodels.blocks", "costmodels.job", "costmodels.operators", "costmodels.step"},
    "costmodels.sharding": {
        "costmodels.blocks",
        "costmodels.optimizers",
        "costmodels.job",
        "costmodels.operators",
        "costmodels.step",
    },
    "costmodels.xla": {"costmodels.blocks"},
    "costmodels.calibration": {"costmodels.blocks", "costmodels.job", "costmodels.operators", "costmodels.step"},
    "costmodels.surrogates": {
        *("costmodels.blocks", "costmodels.job", "costmodels.operators", "costmodels.step", "costmodels.calibration")
    },
    "trials.link_probe": set(),
    "trials.knobs": set(),
    "trials.ranks": set(),
    "trials": {"trials.ranks", "trials.link_probe", "trials.knobs"},
    "trials.profiling": {"trials"},
    "trials.replay": {"trials"},
    "trials.simulated": {"trials", "trials.knobs"},
    "trials.command": {"trials", "trials.ranks", "trials.profiling", "trials.link_probe", "trials.knobs"},
    "trials.training": {"trials", "trials.ranks"},
    "trials.torch_training": {"trials", "trials.ranks", "trials.profiling", "trials.training"},
    "trials.jax_training": {"trials", "trials.ranks", "trials.training"},
    "trials.on_ray": {"trials", "trials.ranks", "trials.link_probe"},
    "trials.registry": {
        "trials",
        *("trials.replay", "trials.simulated", "trials.command", "trials.torch_training", "trials.jax_training"),
    },
    "tuner.planners.engine": set(),
    "tuner.planners.scheduling": {"tuner.planners.engine"},
    "tuner.planners.pipeline": {"tuner.planners.engine"},
    "tuner.planners.sharding": {"tuner.planners.engine"},
    "tuner.planners.toast": {"tuner.planners.engine", "tuner.planners.sharding"},
    "tuner.planners.assignment": {"tuner.planners.engine", "tuner.planners.sharding"},
    "tuner.planners": {
        *("tuner.planners.assignment", "tuner.planners.engine", "tuner.planners.sharding", "tuner.planners.toast")
    },
    "tuner.space": set(),
    "tuner.search": {"tuner.space"},
    "tuner.knobs": {"tuner.space", "tuner.search"},
    "tuner.catalog": {"tuner.knobs"},
    "tuner.own_step": {"tuner.space", "tuner.search"},
    "tuner.export": {"tuner.space"},
    "tuner.capture": set(),
    "tuner.imports": {"tuner.export", "tuner.capture"},
    "tuner.rehearsal": {"tuner.capture", "tuner.imports", "tuner.export"},
    "tuner.plans": {"tuner.space", "tuner.export"},
    "tuner.subject": {*("tuner.space", "tuner.search", "tuner.own_step", "tuner.export", "tuner.plans", "tuner.knobs")},
    "tuner.study_file": {
        *("tuner.space", "tuner.search", "tuner.own_step", "tuner.export", "tuner.imports", "tuner.plans"),
        *("tuner.knobs", "tuner.catalog", "tuner.subject"),
    },
    "tuner.storage": {"tuner.space", "tuner.search", "tuner.study_file"},
    "tuner.forecast": {
        *("tuner.space", "tuner.search", "tuner.export", "tuner.plans", "tuner.study_file"),
        *("tuner.storage", "tuner.knobs", "tuner.subject"),
    },
    "tuner.answers": {
        "tuner.forecast",
        *("tuner.space", "tuner.search", "tuner.own_step", "tuner.export", "tuner.plans", "tuner.study_file"),
        *("tuner.storage", "tuner.knobs", "tuner.subject"),
    },
    "tuner.economics": {
        "tuner.storage",
        "tuner.study_file",
        "tuner.subject",
        "tuner.search",
        "tuner.forecast",
        "tuner.answers",
    },
    "tuner.calibrate": {
        *("tuner.space", "tuner.search", "tuner.study_file", "tuner.storage", "tuner.subject", "tuner.forecast")
    },
    "tuner.learn": {"tuner.search", "tuner.imports", "tuner.study_file", "tuner.storage", "tuner.calibrate"},
    "tuner.run": {
        "tuner.rehearsal",
        "tuner.forecast",
        "tuner.economics",
        "tuner.search",
        "tuner.study_file",
        "tuner.storage",
        "tuner.answers",
        "tuner.subject",
    },
    "tuner.place": {"tuner.space"},
    "tuner.replan": {
        "tuner.forecast",
        "tuner.economics",
        "tuner.space",
        "tuner.search",
        "tuner.study_file",
        "tuner.storage",
        "tuner.answers",
        "tuner.run",
        "tuner.subject",
    },
    "tuner.terminal": {
        "tuner.forecast",
        "tuner.economics",
        *("tuner.space", "tuner.search", "tuner.own_step", "tuner.export", "tuner.study_file", "tuner.storage"),
        *("tuner.answers", "tuner.calibrate", "tuner.run", "tuner.subject"),
    },
    "tuner.watch": {
        *("tuner.export", "tuner.study_file", "tuner.replan", "tuner.terminal", "tuner.forecast", "tuner.subject")
    },
    "tuner.report": {
        "tuner.forecast",
        "tuner.economics",
        *(
            "tuner.space",
            "tuner.search",
            "tuner.own_step",
            "tuner.export",
            "tuner.plans",
            "tuner.study_file",
            "tuner.storage",
        ),
        *("tuner.answers", "tuner.calibrate", "tuner.run", "tuner.subject"),
    },
    "tuner.atlas": {"tuner.study_file", "tuner.forecast", "tuner.economics", "tuner.answers", "tuner.report"},
    "tuner.dashboard": {
        "tuner.forecast",
        "tuner.economics",
        *("tuner.search", "tuner.study_file", "tuner.storage", "tuner.answers", "tuner.run", "tuner.terminal"),
        *("tuner.report", "tuner.subject"),
    },
    "tuner.cli": {
        "tuner.catalog",
        "tuner.forecast",
        "tuner.economics",
        *("tuner.space", "tuner.search", "tuner.own_step", "tuner.export", "tuner.capture", "tuner.imports"),
        "tuner.rehearsal",
        *(
            "tuner.plans",
            "tuner.study_file",
            "tuner.storage",
            "tuner.answers",
            "tuner.calibrate",
            "tuner.learn",
            "tuner.run",
            "tuner.replan",
            "tuner.place",
        ),
        *("tuner.terminal", "tuner.watch", "tuner.report", "tuner.atlas", "tuner.dashboard", "tuner.subject"),
    },
    "tuner": {
        "tuner.search",
        "tuner.study_file",
        "tuner.forecast",
        "tuner.answers",
        "tuner.place",
        "tuner.run",
        "tuner.cli",
    },
}

# The paths in which a library may be imported.
FENCES = {
    "ray": r"trials/on_ray/.*",
    "optuna": r"tuner/(?!planners[/.]).*",
    "torch": r".*torch.*",
    "transformers": r"costmodels/traced/with_torch/.*|tuner/planners/torch_transformers\.py",
    "torchtitan": r"tuner/planners/torch_titan\.py",
    "tensorboard": r"tuner/run/trackers/.*",
    "mlflow": r"tuner/run/trackers/.*",
    "wandb": r"tuner/run/trackers/.*",
    "jax": r".*jax.*",
    "jaxlib": r".*jax.*",
}
BANNED_NAMES = ("utils", "helpers", "common")

Sources = Mapping[str, str]
Check = Callable[[Sources], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`, whether c is a module or something inside a.b."""

    path: str
    line: int
    target: str
    is_relative: bool = False

    @property
    def where(self) -> str:
        """The place as an editor opens it."""
        return f"{self.path}:{self.line}"

    @property
    def library(self) -> str:
        """The top-level package that is imported."""
        return self.target.partition(".")[0]


@cache
def sources_of_the_house() -> Sources:
    """Every Python file of the four packages, by its path from the root of the repository."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_of(path: str) -> str:
    """The dotted name of the module in the file at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def named_in(names: Iterable[str], module: str) -> str | None:
    """Return the longest of `names` that `module` is or lies in; None if there is none."""
    return max((name for name in names if module == name or module.startswith(f"{name}.")), key=len, default=None)


@cache
def imports_in(path: str, source: str) -> tuple[Import, ...]:
    """Every import of one file."""
    return tuple(_imports_in(path, source))


def _imports_in(path: str, source: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source, filename=path)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(path=path, line=node.lineno, target=alias.name)
            case ast.ImportFrom(module=module, names=names, level=level):
                for alias in names:
                    target = ".".join(part for part in (module, alias.name) if part)
                    yield Import(path=path, line=node.lineno, target=target, is_relative=level > 0)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield Import(path=path, line=node.lineno, target=target, is_relative=target.startswith("."))


def absolute_imports(sources: Sources) -> list[Import]:
    """Every import of every file, without the relative ones, which a check of their own refuses."""
    found = [item for path, source in sources.items() for item in imports_in(path, source)]
    return [item for item in found if not item.is_relative]


def imports_going_up(sources: Sources) -> list[str]:
    """Find imports from a package that the importing package must not know."""
    violations = []
    for item in absolute_imports(sources):
        importer, imported = named_in(MAY_IMPORT, module_of(item.path)), named_in(MAY_IMPORT, item.target)
        if importer and imported and imported not in MAY_IMPORT[importer]:
            violations.append(f"{item.where}: {importer} must not import {item.target}, which is in {imported}")
    return violations


def imports_between_rooms(sources: Sources) -> list[str]:
    """Find imports from a room of the same package that the importing room must not know."""
    violations = []
    for item in absolute_imports(sources):
        module = module_of(item.path)
        if named_in(MAY_IMPORT, module) != named_in(MAY_IMPORT, item.target):
            continue
        importer, imported = named_in(ROOMS, module), named_in(ROOMS, item.target)
        if importer and imported and imported != importer and imported not in ROOMS[importer]:
            violations.append(f"{item.where}: {importer} must not import {item.target}, which is in {imported}")
    return violations


def folders_that_are_no_rooms(sources: Sources) -> list[str]:
    """Find folders that ROOMS does not name; a folder inside a room belongs to that room."""
    depth = {"tuner.planners": 3}
    found = set()
    for path in sources:
        package = named_in(MAY_IMPORT, module_of(path))
        folder = path.split("/")[:-1][: depth.get(str(package), 2)]
        if ".".join(folder) not in ROOMS:
            found.add(f"{path}: add the folder {'/'.join(folder)} to ROOMS, with the rooms that it may import")
    return sorted(found)


def libraries_outside_their_fence(sources: Sources) -> list[str]:
    """Imports of a fenced library in a file that is not about it."""
    return [
        f"{item.where}: {item.library} may be imported only in paths that match {FENCES[item.library]}"
        for item in absolute_imports(sources)
        if item.library in FENCES and not re.fullmatch(FENCES[item.library], item.path)
    ]


def relative_imports(sources: Sources) -> list[str]:
    """Imports that begin with a dot."""
    found = (item for path, source in sources.items() for item in imports_in(path, source) if item.is_relative)
    return [f"{item.where}: imports are absolute, and this one of {item.target} is relative" for item in found]


def module_cycles(sources: Sources) -> list[str]:
    """The first cycle among modules that import each other.

    An edge leads to the module that the statement names. The packages around that module are loaded too, but they are
    no edges: otherwise every package that re-exports its own modules would be a cycle.
    """
    modules = {module_of(path) for path in sources}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for item in absolute_imports(sources):
        prefixes = list(accumulate(item.target.split("."), "{}.{}".format))
        named = max((prefix for prefix in prefixes if prefix in modules), key=len, default=None)
        if named:
            edges[module_of(item.path)].add(named)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return [f"modules import each other: {' <- '.join(error.args[1])}"]
    return []


def banned_names(sources: Sources) -> list[str]:
    """Files and folders whose name says nothing about what is inside."""
    return [
        f"{path}: name a module after what it holds, not {part}"
        for path in sources
        for part in module_of(path).split(".")
        if part in BANNED_NAMES
    ]


def imports_in_the_tuners_door(sources: Sources) -> list[str]:
    """Find imports of `tuner/__init__.py` at import time, which everything below tuner would load.

    The standard library is no matter. A function may import, and so may what type checkers alone read.
    """
    path = "tuner/__init__.py"
    late = {
        line
        for node in ast.walk(ast.parse(sources.get(path, "")))
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = imports_in(path, sources.get(path, ""))
    return [
        f"{item.where}: must import nothing at import time"
        for item in found
        if item.line not in late and item.library not in sys.stdlib_module_names
    ]


CHECKS: tuple[Check, ...] = (
    imports_going_up,
    imports_between_rooms,
    folders_that_are_no_rooms,
    libraries_outside_their_fence,
    relative_imports,
    module_cycles,
    banned_names,
    imports_in_the_tuners_door,
)

BROKEN_HOUSES: tuple[tuple[Check, dict[str, str]], ...] = (
    (imports_going_up, {"hardware/link.py": "import costmodels.job.runtime"}),
    (imports_going_up, {"hardware/link.py": "def late():\n    from costmodels.job import runtime"}),
    (imports_going_up, {"costmodels/job/runtime.py": "from trials.backend import Observation"}),
    (imports_going_up, {"costmodels/job/runtime.py": "import importlib\nimportlib.import_module('tuner.space.rules')"}),
    (imports_going_up, {"trials/replay/backend.py": "from tuner import planners"}),
    (imports_going_up, {"trials/replay/backend.py": "import tuner"}),
    (imports_going_up, {"tuner/planners/planning.py": "import trials.backend"}),
    (imports_going_up, {"tuner/planners/planning.py": "from tuner.space import rules"}),
    (imports_between_rooms, {"hardware/io/errors.py": "import hardware.link"}),
    (imports_between_rooms, {"costmodels/job/runtime.py": "from costmodels.step.memory import peak as memory"}),
    (imports_between_rooms, {"trials/replay/backend.py": "from trials.command.backend import CommandBackend"}),
    (imports_between_rooms, {"tuner/planners/engine/workers.py": "from tuner.planners.toast import search"}),
    (imports_between_rooms, {"tuner/space/rules/rule.py": "def late():\n    from tuner.search import sampler"}),
    (folders_that_are_no_rooms, {"tuner/attic/box.py": ""}),
    (folders_that_are_no_rooms, {"tuner/planners/attic/box.py": ""}),
    (libraries_outside_their_fence, {"trials/backend.py": "import ray"}),
    (libraries_outside_their_fence, {"tuner/run/loop.py": "from ray.util import placement_group"}),
    (libraries_outside_their_fence, {"trials/on_ray/executor.py": "import optuna"}),
    (libraries_outside_their_fence, {"tuner/planners/toast/search.py": "from optuna import samplers"}),
    (libraries_outside_their_fence, {"costmodels/step/memory/peak.py": "import torch.nn as nn"}),
    (libraries_outside_their_fence, {"costmodels/job/hugging_face.py": "from transformers import AutoConfig"}),
    (libraries_outside_their_fence, {"costmodels/sharding/frontends/torch/graph.py": "import jax.numpy"}),
    (relative_imports, {"hardware/link.py": "from . import device"}),
    (relative_imports, {"hardware/link.py": "from .device import Device"}),
    (module_cycles, {"hardware/a.py": "import hardware.b", "hardware/b.py": "from hardware.a import thing"}),
    (module_cycles, {"hardware/a.py": "from hardware import b", "hardware/b.py": "def late():\n    import hardware.a"}),
    (module_cycles, {"hardware/__init__.py": "from hardware.a import A", "hardware/a.py": "from hardware import A"}),
    (banned_names, {"tuner/utils.py": ""}),
    (banned_names, {"tuner/common/names.py": ""}),
    (imports_in_the_tuners_door, {"tuner/__init__.py": "from tuner.run.loop import run"}),
)


def test_every_package_is_read():
    """The checks see modules of all four packages, so that none of them passes for want of files."""
    seen = {path.partition("/")[0] for path in sources_of_the_house()}

    assert seen == set(PACKAGES)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_house_keeps_its_rule(check):
    """No file of the four packages breaks this rule."""
    assert check(sources_of_the_house()) == []


@pytest.mark.parametrize(("check", "sources"), BROKEN_HOUSES, ids=lambda value: getattr(value, "__name__", None))
def test_each_check_can_fail(check, sources):
    """A tree that breaks a rule on purpose is caught by the rule's check, with the file named."""
    violations = check(sources)

    assert len(violations) == 1
    assert any(path in violations[0] or module_of(path) in violations[0] for path in sources)


def test_every_check_is_shown_to_fail():
    """Each check has at least one broken tree of its own."""
    assert {check for check, _ in BROKEN_HOUSES} == set(CHECKS)


def test_a_light_import_loads_no_heavy_library():
    """Importing tuner and its planners loads neither ray nor optuna, and what only predicts needs no ray."""
    program = (
        "import sys, tuner, tuner.planners; print(sorted({'ray', 'optuna'} & set(sys.modules)));"
        "from tuner import load_study; print(sorted({'ray'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n[]\n"
