"""Exports of a sharding plan to a framework: the file, an excerpt for the terminal, and notes on its limits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodels.job.parallel_config import ParallelConfig
from costmodels.job.setting import Setting
from costmodels.sharding.exports.jax_specs import JaxSpecs, Spec, jax_specs
from costmodels.sharding.exports.megatron_template import MegatronParallelism, megatron_parallelism
from costmodels.sharding.exports.torch_placements import torch_placements
from costmodels.sharding.plan import Plan
from hardware.io.errors import ConfigError, did_you_mean
from tuner.export import find_exporter

NUM_SHOWN = 8
"""Number of lines of a list shown on the terminal."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanSource:
    """Plan to export, with its origin.

    Attributes:
        plan: Sharding plan of the step.
        candidate: Setting and configuration of a study's candidate; None for other programs.
        outputs: Paths of a JAX function's outputs with their tensors; None for other programs.
        stablehlo: Annotated StableHLO text of a JAX function; None for other programs.
        is_propagated: Whether JAX's compiler lays out everything between the arguments and the outputs.
    """

    plan: Plan
    candidate: tuple[Setting, ParallelConfig] | None = None
    outputs: tuple[tuple[str, str | None], ...] | None = None
    stablehlo: str | None = None
    is_propagated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanExport:
    """Plan written for one framework.

    Attributes:
        target: Name of the export target.
        content: Export as data for `--json`.
        text: Text of the file to write.
        lines: Excerpt for the terminal.
        notes: Limits of the export, one sentence each.
    """

    target: str
    content: dict[str, Any]
    text: str
    lines: tuple[str, ...]
    notes: tuple[str, ...] = ()


def export_plan(target: str, source: PlanSource) -> PlanExport:
    """Export a plan to a framework.

    Raises:
        ConfigError: The target is unknown, or it cannot run the plan.
    """
    return find_plan_exporter(target)(source)


def find_plan_exporter(target: str) -> Callable[[PlanSource], PlanExport]:
    """Return the exporter of a target.

    Raises:
        ConfigError: The target is unknown.
    """
    if target not in PLAN_EXPORTERS:
        raise ConfigError(
            "is no export target for plans", key="--export", value=target, nearest=did_you_mean(target, PLAN_EXPORTERS)
        )
    return PLAN_EXPORTERS[target]


def _format_file(content: dict[str, Any]) -> str:
    """Format as JSON with one line per argument, operator or change, however deeply these are nested."""
    return (
        "{\n" + ",\n".join(f"  {json.dumps(key)}: {_format_value(value)}" for key, value in content.items()) + "\n}\n"
    )


def _format_value(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n  }"
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return "[\n" + ",\n".join(f"    {json.dumps(each)}" for each in value) + "\n  ]"
    return json.dumps(value)


def named_lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Format pairs of name and text in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {told}" for name, told in rows]


def _format_rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [*named_lines(rows[:NUM_SHOWN]), *_more(len(rows))]


def _more(number: int) -> list[str]:
    return [f"  and {number - NUM_SHOWN:,} more"] if number > NUM_SHOWN else []


def _specs_of(source: PlanSource) -> JaxSpecs:
    specs = jax_specs(source.plan, source.outputs)
    return replace(specs, constraints=(), broken=()) if source.is_propagated else specs


def _export_jax(source: PlanSource) -> PlanExport:
    specs = _specs_of(source)
    content = specs.to_json()
    return PlanExport(
        target="jax",
        content=content,
        text=_format_file(content),
        lines=(
            f"JAX: Mesh({_mesh_in_words(specs.mesh)}), {len(specs.arguments)} arguments, {len(specs.outputs)} outputs, "
            f"{len(specs.constraints):,} constraints",
            *_format_rows([(name, _spec_in_words(spec)) for name, spec in specs.arguments.items()]),
            *_format_rows(
                [(each.op, f"{each.at} of {each.tensor}: {_spec_in_words(each.spec)}") for each in specs.constraints]
            ),
        ),
        notes=_broken_notes("JAX", specs.broken),
    )


def _export_shardy(source: PlanSource) -> PlanExport:
    if source.stablehlo is None:
        raise ConfigError(
            "is only for plans of JAX functions, which are lowered to StableHLO",
            key="--export",
            value="shardy",
            nearest="use --jax, or export to jax, megatron or torch",
        )
    text = source.stablehlo
    lines = [line.strip() for line in text.splitlines()]
    pinned = [line for line in lines if " = sdy.sharding_constraint " in line]
    return PlanExport(
        target="shardy",
        content={"format": "shardy", "text": text},
        text=text,
        lines=(
            f"Shardy: {len(lines):,} lines of StableHLO, {len(pinned):,} constraints",
            *(f"  {line}" for line in lines if line.startswith("sdy.mesh ")),
            *(f"  {line}" for line in pinned[:NUM_SHOWN]),
            *_more(len(pinned)),
        ),
        notes=_broken_notes("JAX", _specs_of(source).broken),
    )


def _export_torch(source: PlanSource) -> PlanExport:
    placements = torch_placements(source.plan)
    content = placements.to_json()
    return PlanExport(
        target="torch",
        content=content,
        text=_format_file(content),
        lines=(
            f"torch: init_device_mesh({_mesh_in_words(placements.mesh)}), {len(placements.arguments)} tensors, "
            f"{len(placements.redistributions):,} redistributions",
            *_format_rows([(name, f"[{', '.join(each)}]") for name, each in placements.arguments.items()]),
            *_format_rows(
                [
                    (each.op, f"{each.at} of {each.tensor}: [{', '.join(each.before)}] to [{', '.join(each.after)}]")
                    for each in placements.redistributions
                ]
            ),
        ),
        notes=_broken_notes("DTensor", placements.broken),
    )


def _export_megatron(source: PlanSource) -> PlanExport:
    if source.candidate is None:
        raise ConfigError(
            "is only for plans of a study's model; Megatron-LM trains no other programs",
            key="--export",
            value="megatron",
            nearest="jax, shardy or torch",
        )
    setting, config = source.candidate
    try:
        found = megatron_parallelism(source.plan)
    except ConfigError as error:
        raise ConfigError(error.rule, key="--export", value="megatron", nearest=error.nearest) from None
    exported = find_exporter("megatron")(setting, config_of(found, config))
    roles = {name: role.in_words for name, role in found.roles.items()}
    return PlanExport(
        target="megatron",
        content={"format": "megatron", "roles": roles, "text": exported.text},
        text=exported.text,
        lines=(*(f"# {name}: {words}" for name, words in roles.items()), *exported.text.rstrip("\n").splitlines()),
        notes=(*_megatron_notes(found), *exported.notes),
    )


def config_of(found: MegatronParallelism, planned: ParallelConfig) -> ParallelConfig:
    """Return the candidate's configuration as planned: the plan may use an axis of the mesh for another degree."""
    sequences = planned.mbs * planned.dp
    assert sequences % found.dp == 0, f"a plan that cuts the batch into {found.dp} parts divides its {sequences}"
    return replace(
        planned,
        dp=found.dp,
        cp=found.cp,
        up=found.up,
        tp=found.tp,
        ep=found.ep,
        expert_tp=found.expert_tp,
        mbs=sequences // found.dp,
        sequence_parallel=found.sequence_parallel,
        zero_stage=found.zero_stage,
        dp_shard=0,
    )


def _megatron_notes(found: MegatronParallelism) -> tuple[str, ...]:
    notes = []
    if found.cp > 1:
        notes.append("cp: the plan gathers keys and values, as --cp-comm-type all_gather does; p2p sends as many bytes")
    if not found.is_in_rank_order:
        notes.append(
            "ranks: Megatron-LM counts tp ranks first and dp ranks last, unlike the plan's mesh, so its groups use "
            "other links"
        )
    return tuple(notes)


def _broken_notes(name: str, broken: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    if not broken:
        return ()
    tensor, op = broken[0]
    return (
        f"order: in {len(broken):,} places, first between {tensor} and {op}, no order of the axes on a dim keeps parts "
        f"where the plan has them, so {name} moves more data there than planned",
    )


def _mesh_in_words(mesh: dict[str, int]) -> str:
    return f"{', '.join(f'{name}={size}' for name, size in mesh.items())}: {math.prod(mesh.values())} devices"


def _spec_in_words(spec: Spec) -> str:
    dims = ["None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes) for axes in spec]
    return f"P({', '.join(dims)})"


PLAN_EXPORTERS: dict[str, Callable[[PlanSource], PlanExport]] = {
    "jax": _export_jax,
    "megatron": _export_megatron,
    "shardy": _export_shardy,
    "torch": _export_torch,
}
