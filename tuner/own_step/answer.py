"""Answer of a study of a user's own step: its mesh, the layouts of its tensors, and a program that applies both.

`jax_program.py` and `torch_program.py` make it, for steps in their library; `programs.py` chooses between them.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from costmodels.job.parallel_config import ParallelConfig
from trials.own_step import World
from tuner.own_step.plans import OwnStepPlans

WIDTH = 108
"""Width to which tables of numbers are wrapped."""

OWN_TARGETS: tuple[str, ...] = get_args(World)
"""Targets of exports: the libraries that a step may be written in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafSpec:
    """Layout of one tensor.

    Attributes:
        path: Path or name of the tensor; empty for a single returned array.
        type: Type and shape, such as `float32[512,2048]`.
        spec: Layout as Python writes it, such as `P(None, 'model')` or `(Shard(1), Replicate())`.
    """

    path: str
    type: str
    spec: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAnswer:
    """Shardings of a user's step on the mesh of one candidate.

    Attributes:
        world: Library of the step.
        spec_title: Name of the layouts in this library.
        mesh: Axes and their sizes, the slowest first.
        mesh_line: Line of Python that makes the mesh.
        groups: Tensors with their layouts, by what they are to the step, such as `arguments`.
        served: For each axis, the number of the factor that it serves at each operator, or -1.
        kept: Paths of the outputs that replace an argument in the next step, which lie as the argument does.
        donated: Numbers of the arguments whose memory the outputs take over.
        num_changes: Number of changes of layout inside the step.
    """

    world: World
    spec_title: str
    mesh: dict[str, int]
    mesh_line: str
    groups: dict[str, tuple[LeafSpec, ...]]
    served: tuple[tuple[int, ...], ...]
    kept: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()
    num_changes: int

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def is_whole(self) -> bool:
        """Whether every device has all of the inputs, or of the arguments, of a mesh of several devices."""
        leaves = self.groups.get("inputs") or self.groups.get("arguments", ())
        return self.num_devices > 1 and not any("Shard(" in leaf.spec or "'" in leaf.spec for leaf in leaves)

    @property
    def axes_in_words(self) -> str:
        """Axes and their sizes, such as `data=2, model=4`."""
        return ", ".join(f"{name}={size}" for name, size in self.mesh.items())

    @property
    def served_text(self) -> str:
        """Rows of a list of lists of numbers, as a program writes them."""
        rows = (textwrap.indent(textwrap.fill(", ".join(map(str, row)), WIDTH), " " * 8) for row in self.served)
        return "\n".join(f"    [\n{row},\n    ]," for row in rows)

    def to_json(self) -> dict[str, Any]:
        """Return mesh and layouts as JSON; of a step in JAX also which results replace arguments."""
        found = {"mesh": self.mesh} | {name: [asdict(leaf) for leaf in leaves] for name, leaves in self.groups.items()}
        return found | ({"kept": self.kept, "donated": self.donated} if self.world == "jax" else {})


def module_name(study: str, out: Path | None = None) -> str:
    """Return the name of the exported module: that of its file, or one made of the study's name."""
    stem = out.stem if out is not None else f"{study}_sharded"
    name = "".join(char if char.isalnum() else "_" for char in stem)
    return name if name.isidentifier() else f"study_{name}"


def micro_batches_argument(plans: OwnStepPlans, chosen: ParallelConfig) -> str:
    """Return the argument with which an exported program calls the factory; empty if it takes none."""
    return f"micro_batches={plans.step_of(chosen).micro_batches}" if plans.mbs else ""


def grouped_lines(leaves: Sequence[LeafSpec], *, most: int) -> list[str]:
    """Return specs as lines, with one line for all leaves whose paths differ in numbers only and whose specs agree.

    Args:
        leaves: Leaves with their specs.
        most: Most lines; a last one tells how many are left out.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for leaf in leaves:
        groups.setdefault((re.sub(r"\d+", "*", leaf.path), leaf.type, leaf.spec), []).append(leaf.path)
    names = [
        f"{alike} ({len(paths)})" if len(paths) > 1 else paths[0] or "(returned)"
        for (alike, _, _), paths in groups.items()
    ]
    widths = [max(map(len, texts), default=0) for texts in (names, [kind for _, kind, _ in groups])]
    lines = [
        f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {spec}" for name, (_, kind, spec) in zip(names, groups, strict=True)
    ]
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more; --json lists all"]
