"""Plan as a file of JSON that programs read: all layouts by name, and the table that a traced step runs by.

    {"format": "plan", "by_hand": false, "micro_batches": 1, "mesh": {"data": 2, "model": 2},
     "parameters": {NAME: {"shape": [...], "axes": [[...], ...]}}, "states": {...}, "inputs": {...},
     "activations": {...}, "served": [[...], ...]}

`mesh` has the axes with their sizes, the slowest first. `axes` has for each dim of a tensor the axes that cut it, major
to minor: of parameters, of the optimizer's states, and of inputs and buffers when the step begins, and of what
operators make after partial sums are added up. `served` has for each axis the number of the factor that it serves at
each operator, or -1 (`served.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from costmodels.sharding.graph import TensorKind
from costmodels.sharding.plan import Plan
from hardware.io.config_file import StrictModel, parse_json, read_text, validate_mapping
from hardware.io.errors import ConfigError

MOST_BYTES = 1 << 30
"""Longest file that is read [bytes]; a step of a hundred thousand operators has some tens of MiB."""


class TensorLayout(StrictModel):
    """Layout of one tensor.

    Attributes:
        shape: Shape of the whole tensor.
        axes: For each dim, the axes of the mesh that cut it, major to minor.
    """

    shape: list[int]
    axes: list[list[str]]


class PlanFile(StrictModel):
    """Content of the file; see the module.

    Attributes:
        format: Name of the format.
        by_hand: Whether the plan is one that frameworks write by hand.
        micro_batches: Number of micro-batches before each update.
        mesh: Axes and their sizes, the slowest first; empty where nothing is cut.
        parameters: Layouts of the parameters, by name, when a step begins.
        states: Layouts of the optimizer's states.
        inputs: Layouts of inputs and buffers.
        activations: Layouts of what operators make, by name.
        served: For each axis, the number of the factor that it serves at each operator, or -1.
    """

    format: Literal["plan"] = "plan"
    by_hand: bool
    micro_batches: int = Field(default=1, ge=1)
    mesh: dict[str, int]
    parameters: dict[str, TensorLayout]
    states: dict[str, TensorLayout]
    inputs: dict[str, TensorLayout]
    activations: dict[str, TensorLayout]
    served: list[list[int]]


def plan_text(plan: Plan | None, *, by_hand: bool, micro_batches: int = 1) -> str:
    """Return the text of a plan's file, with one line for each tensor; that of None has no axes and no tensors."""
    content = {
        "format": "plan",
        "by_hand": by_hand,
        "micro_batches": micro_batches,
        "mesh": {} if plan is None else dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        **{group: {} if plan is None else _layouts(plan, group) for group in _GROUPS},
        "served": [] if plan is None else plan.served.T.tolist(),
    }
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()) + "\n}\n"


_GROUPS = ("parameters", "states", "inputs", "activations")
_OF_SOURCES = {TensorKind.PARAMETER: "parameters", TensorKind.OPTIMIZER: "states"}


def _layouts(plan: Plan, group: str) -> dict[str, dict[str, Any]]:
    graph = plan.graph
    found = {}
    for op in graph.ops:
        for number in op.results:
            tensor = graph.tensors[number]
            if group == (_OF_SOURCES.get(tensor.kind, "inputs") if op.is_source else "activations"):
                found[tensor.name] = {"shape": list(tensor.shape), "axes": [list(cut) for cut in plan.dims_of(number)]}
    return found


def _lines(value: Any) -> str:
    if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()) + "\n}"
    return json.dumps(value)


def read_plan(path: Path) -> PlanFile:
    """Read a plan's file.

    Raises:
        ConfigError: It cannot be read, or is no plan.
    """
    try:
        loaded = parse_json(read_text(path, most_bytes=MOST_BYTES))
        if not isinstance(loaded, dict) or loaded.get("format") != "plan":
            raise ConfigError("is no file of a plan", nearest="the path that {plan} in trial.command stands for")
        return validate_mapping(PlanFile, loaded)
    except ConfigError as error:
        raise error.in_file(str(path)) from None
