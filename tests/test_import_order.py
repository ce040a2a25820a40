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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hardware", "costmodels", "trials", "tuner")

# What each room may import, from the lowest to the highest; `tuner.planners` is a room of its own inside tuner.
MAY_IMPORT = {
    "hardware": {"hardware"},
    "costmodels": {"hardware", "costmodels"},
    "trials": {"hardware", "costmodels", "trials"},
    "tuner.planners": {"hardware", "costmodels", "tuner.planners"},
    "tuner": {"hardware", "costmodels", "trials", "tuner.planners", "tuner"},
}

# The paths in which a library may be imported.
FENCES = {
    "ray": r"trials/ray_[^/]*\.py",
    "optuna": r"tuner/(?!planners[/.]).*",
    "torch": r".*torch.*",
    "jax": r".*jax.*",
    "jaxlib": r".*jax.*",
    "sklearn": r"(?!)",  # nowhere: it is the tests' oracle
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


def sources_of_the_house() -> Sources:
    """Every Python file of the four packages, by its path from the root of the repository."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_of(path: str) -> str:
    """The dotted name of the module in the file at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str | None:
    """The room that a dotted name belongs to; None if it is not ours."""
    rooms = [room for room in MAY_IMPORT if module == room or module.startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imports_in(path: str, source: str) -> Iterator[Import]:
    """Every import of one file."""
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
    """Imports from a room that the importing room must not know."""
    violations = []
    for item in absolute_imports(sources):
        importer, imported = room_of(module_of(item.path)), room_of(item.target)
        if importer and imported and imported not in MAY_IMPORT[importer]:
            violations.append(f"{item.where}: {importer} must not import {item.target}, which is in {imported}")
    return violations


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
    """Imports in `tuner/__init__.py`, which would be loaded by everything below tuner."""
    found = imports_in("tuner/__init__.py", sources.get("tuner/__init__.py", ""))
    return [f"{item.where}: must import nothing" for item in found if item.library != "__future__"]


CHECKS: tuple[Check, ...] = (
    imports_going_up,
    libraries_outside_their_fence,
    relative_imports,
    module_cycles,
    banned_names,
    imports_in_the_tuners_door,
)

BROKEN_HOUSES: tuple[tuple[Check, dict[str, str]], ...] = (
    (imports_going_up, {"hardware/link.py": "import costmodels.job"}),
    (imports_going_up, {"hardware/link.py": "def late():\n    from costmodels import job"}),
    (imports_going_up, {"costmodels/job.py": "from trials.backend import Observation"}),
    (imports_going_up, {"costmodels/job.py": "import importlib\nimportlib.import_module('tuner.space')"}),
    (imports_going_up, {"trials/replay.py": "from tuner import planners"}),
    (imports_going_up, {"trials/replay.py": "import tuner"}),
    (imports_going_up, {"tuner/planners/exhaustive.py": "import trials.ray_workers"}),
    (imports_going_up, {"tuner/planners/exhaustive.py": "from tuner.space import grid"}),
    (libraries_outside_their_fence, {"trials/backend.py": "import ray"}),
    (libraries_outside_their_fence, {"tuner/study.py": "from ray.util import placement_group"}),
    (libraries_outside_their_fence, {"trials/ray_executor.py": "import optuna"}),
    (libraries_outside_their_fence, {"tuner/planners/mcts.py": "from optuna import samplers"}),
    (libraries_outside_their_fence, {"costmodels/memory.py": "import torch.nn as nn"}),
    (libraries_outside_their_fence, {"costmodels/frontends/torch.py": "import jax.numpy"}),
    (libraries_outside_their_fence, {"costmodels/a.py": "from sklearn import gaussian_process"}),
    (relative_imports, {"hardware/link.py": "from . import device"}),
    (relative_imports, {"hardware/link.py": "from .device import Device"}),
    (module_cycles, {"hardware/a.py": "import hardware.b", "hardware/b.py": "from hardware.a import thing"}),
    (module_cycles, {"hardware/a.py": "from hardware import b", "hardware/b.py": "def late():\n    import hardware.a"}),
    (module_cycles, {"hardware/__init__.py": "from hardware.a import A", "hardware/a.py": "from hardware import A"}),
    (banned_names, {"tuner/utils.py": ""}),
    (banned_names, {"tuner/common/names.py": ""}),
    (imports_in_the_tuners_door, {"tuner/__init__.py": "from tuner.study import run"}),
)

SOUND_HOUSE = {
    "hardware/__init__.py": "from hardware.link import Link",
    "hardware/link.py": "from __future__ import annotations\nimport math",
    "costmodels/surrogate.py": "from hardware.link import Link",
    "costmodels/frontends/torch.py": "import torch",
    "trials/ray_executor.py": "import ray\nimport costmodels.surrogate",
    "tuner/__init__.py": "from __future__ import annotations",
    "tuner/planners/exhaustive.py": "from costmodels import surrogate",
    "tuner/sampler.py": "import optuna\nfrom trials import ray_executor\nfrom tuner.planners import exhaustive",
}


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


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_sound_house_passes(check):
    """A small tree that keeps every rule, with each library in its right place, is not accused of anything."""
    assert check(SOUND_HOUSE) == []


def test_every_check_is_shown_to_fail():
    """Each check has at least one broken tree of its own."""
    assert {check for check, _ in BROKEN_HOUSES} == set(CHECKS)


LIGHT = [package for package in ("tuner", "tuner.planners") if (ROOT / package.replace(".", "/")).is_dir()]


@pytest.mark.parametrize("package", LIGHT)
def test_a_light_import_loads_no_heavy_library(package):
    """Importing tuner, or its planners, loads none of ray, optuna and sklearn."""
    program = f"import sys, {package}; print(sorted({{'ray', 'optuna', 'sklearn'}} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
