"""Make one block of what several runs recorded: amounts that hold for any micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from costmodels.traced.amounts import ONE, Amount, constant, fitted, per_token
from costmodels.traced.model import (
    Part,
    ProductKind,
    TracedAttention,
    TracedBlock,
    TracedParameter,
    TracedPass,
    TracedProduct,
)
from costmodels.traced.with_torch.recording import AttentionRun, Place, ProductRun
from costmodels.traced.with_torch.rows import part_of
from costmodels.traced.with_torch.runs import Runs

Shapes = Sequence[tuple[int, int]]
_FEW = 8
"""Runs of one place that are told apart; more of them are a loop."""


def fitted_block(
    path: str,
    module: nn.Module,
    parameters: tuple[TracedParameter, ...],
    key: object,
    runs: Runs,
    *,
    tied: tuple[TracedParameter, ...] = (),
) -> TracedBlock:
    """Return the block at `path` with what the runs, one for each shape, recorded of it under `key`.

    `tied` are parameters that another block lists and this one multiplies with, as a tied head does.
    """
    bounds: list[str] = []
    if key in runs.troubles and (parameters or tied):
        bounds.append(f"{path} is known by its parameters only, since it was not run: {runs.troubles[key]}")
    products, attentions, passes = [], [], []
    everywhere = {
        place for tally in runs.tallies for place in (*tally.products, *tally.attentions) if place.block == key
    }
    bounds += [
        f"{path}: {function} is traced in torch, without the fused kernel that trainings use"
        for function in sorted({place.fallback for place in everywhere} - {""})
    ]
    for place in _places(key, [tally.products for tally in runs.tallies]):
        found = [tally.products.get(place, []) for tally in runs.tallies]
        products += _products(module, place, runs.shapes, found, bounds)
    for place in _places(key, [tally.attentions for tally in runs.tallies]):
        many = [tally.attentions.get(place, []) for tally in runs.tallies]
        attentions += _attentions(module, place, runs.shapes, many, bounds)
    for one in dict.fromkeys(one for tally in runs.tallies for one in tally.passes if one[0] == key):
        totals = [tally.passes.get(one, [0, 0, 0]) for tally in runs.tallies]
        count, read, written = (fitted(runs.shapes, [total[part] for total in totals]) for part in range(3))
        if count is None or read is None or written is None:
            bounds.append(f"passes of {_name(path, one[1])} ({one[2]}) grow with the length by no polynomial")
            continue
        part = part_of(module, one[1])
        passes.append(
            TracedPass(module=one[1], part=part, kind=one[2], count=count, read_bytes=read, written_bytes=written)
        )
    if not everywhere and (parameters or tied) and runs.shapes:
        products += _each_weight_once(module, (*parameters, *tied), runs.experts_per_token, bounds, path)
    else:
        used = {name for tally in runs.tallies for name in tally.used.get(key, ())}
        idle = [one.name for one in parameters if one.name not in used]
        if idle and everywhere:
            rest = f" and {len(idle) - 2} more" if len(idle) > 2 else ""
            bounds.append(f"{path}: {', '.join(idle[:2])}{rest} take no part in a pass over tokens")
    return TracedBlock(
        name=path,
        class_name=type(module).__name__,
        parameters=parameters,
        products=tuple(products),
        attentions=tuple(attentions),
        passes=tuple(passes),
        bounds=tuple(bounds),
    )


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _each_weight_once(
    module: nn.Module, parameters: Sequence[TracedParameter], experts_per_token: int, bounds: list[str], path: str
) -> list[TracedProduct]:
    """Return a product of each matrix with the block's own b * s tokens, for what a pass over tokens leaves out."""
    found = []
    for one in parameters:
        if len(one.shape) < 2 or isinstance(_owner(module, one.name), nn.Embedding):
            continue
        groups = one.shape[0] if one.is_expert and len(one.shape) == 3 else 1
        width = one.shape[1 if groups > 1 else 0]
        rows = min(experts_per_token, groups) or groups
        sums = one.size // groups // width
        found.append(
            TracedProduct(
                module=one.name.rpartition(".")[0],
                part=one.part,
                kind="experts" if groups > 1 else "matrix",
                weight=one.name,
                groups=groups,
                count=ONE,
                shape=(ONE, per_token(rows), constant(sums), constant(width)),
                flops=per_token(2 * rows * sums * width),
            )
        )
    if found:
        bounds.append(f"{path} did not run: each of its matrices counts once for each of its own tokens")
    return found


def _name(path: str, module: str) -> str:
    return f"{path}.{module}" if module else path


def _places(
    key: object, tables: Sequence[dict[Place, list[ProductRun]]] | Sequence[dict[Place, list[AttentionRun]]]
) -> list[Place]:
    return list(dict.fromkeys(place for table in tables for place in table if place.block == key))


def _products(
    module: nn.Module, place: Place, shapes: Shapes, runs: Sequence[Sequence[ProductRun]], bounds: list[str]
) -> list[TracedProduct]:
    counts = [len(run) for run in runs]
    part = part_of(module, place.module)
    if len(set(counts)) == 1 and counts[0] <= _FEW:
        columns = [[run[index] for run in runs] for index in range(counts[0])]
        fits = [_shape(shapes, column) for column in columns]
        if all(fit is not None for fit in fits):
            found = [
                _product(place, part, shapes, [[one] for one in column], fit, bounds)
                for column, fit in zip(columns, fits, strict=True)
            ]
            return [one for one in found if one is not None]
    alike = all(len({one.shape for one in run}) <= 1 for run in runs) and all(counts)
    shape = _shape(shapes, [run[0] for run in runs]) if alike else None
    one = _product(place, part, shapes, runs, shape, bounds)
    return [] if one is None else [one]


def _product(
    place: Place,
    part: Part,
    shapes: Shapes,
    runs: Sequence[Sequence[ProductRun]],
    shape: tuple[Amount, Amount, Amount, Amount] | None,
    bounds: list[str],
) -> TracedProduct | None:
    first = next(one for run in runs for one in run)
    count = fitted(shapes, [len(run) for run in runs])
    flops = fitted(shapes, [sum(_flops(one) for one in run) for run in runs])
    if count is None or flops is None:
        bounds.append(
            f"products of {place.module or 'the block'} at {place.line} grow with the length by no polynomial"
        )
        return None
    kind: ProductKind = "activations" if first.kind == "matrix" and not first.weight else first.kind
    return TracedProduct(
        module=place.module,
        part=part,
        kind=kind,
        weight=first.weight,
        fallback=place.fallback,
        groups=first.groups,
        count=count,
        shape=shape,
        flops=flops,
    )


def _flops(run: ProductRun) -> int:
    batch, m, k, n = run.shape
    return 2 * batch * m * k * n


def _shape(shapes: Shapes, column: Sequence[ProductRun]) -> tuple[Amount, Amount, Amount, Amount] | None:
    batch, m, k, n = (fitted(shapes, [run.shape[dim] for run in column]) for dim in range(4))
    return None if batch is None or m is None or k is None or n is None else (batch, m, k, n)


def _attentions(
    module: nn.Module, place: Place, shapes: Shapes, runs: Sequence[Sequence[AttentionRun]], bounds: list[str]
) -> list[TracedAttention]:
    found = []
    if any(not one.is_mask_known for many in runs for one in many):
        bounds.append(
            f"attention of {place.module or 'the block'} has a mask that depends on values: every pair is counted"
        )
    for kind in dict.fromkeys(_kind(one) for many in runs for one in many):
        mine = [[one for one in many if _kind(one) == kind] for many in runs]
        count = fitted(shapes, [len(many) for many in mine])
        flops = fitted(shapes, [sum(_rectangle(one) for one in many) for many in mine])
        tops = [[max((_sizes(one)[dim] for one in many), default=0) for many in mine] for dim in range(3)]
        batch, queries, keys = (fitted(shapes, top) for top in tops)
        if count is None or flops is None or batch is None or queries is None or keys is None:
            bounds.append(f"attention of {place.module or 'the block'} grows with the length by no polynomial")
            continue
        first = mine[0][0]
        found.append(
            TracedAttention(
                module=place.module,
                part=part_of(module, place.module),
                count=count,
                batch=batch,
                queries=queries,
                keys=keys,
                num_heads=first.num_heads,
                num_kv_heads=first.num_kv_heads,
                head_dim=first.head_dim,
                value_head_dim=first.value_head_dim,
                reach=first.reach,
                has_sinks=first.has_sinks,
                rectangle_flops=flops,
            )
        )
    return found


def _kind(run: AttentionRun) -> AttentionRun:
    """Return the run without the sizes that grow with a micro-batch."""
    return replace(run, batch=0, queries=0, keys=0)


def _sizes(run: AttentionRun) -> tuple[int, int, int]:
    return run.batch, run.queries, run.keys


def _rectangle(run: AttentionRun) -> int:
    return 2 * run.batch * run.num_heads * run.queries * run.keys * (run.head_dim + run.value_head_dim)
