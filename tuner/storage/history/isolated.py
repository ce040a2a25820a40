"""Measurements of isolated operators by calibrations, in the table of operator times beside those of trials.

A row's study is "calibration of DEVICE" and its runtime ALONE, since no training step was around it. Its name is the
call's role. Trial and position are a hash of the call. So measuring it again replaces the row, also where two processes
calibrate at once, and every row is kept as soon as it is measured.
"""

from __future__ import annotations

import hashlib
import json
import math

from sqlalchemy import Connection, select

from costmodels.blocks.operator import OpKind, Phase
from costmodels.operators.isolated import IsolatedCall
from hardware.io.errors import quote_value
from tuner.search.earlier_runs import IsolatedSample
from tuner.storage.history.tables import SAMPLES
from tuner.storage.store import AbstractStore, Rows

ALONE = "(alone)"
"""Name in place of a runtime's, which no file can have that a study names."""

_C = SAMPLES.c


def keep_isolated(store: AbstractStore, sample: IsolatedSample) -> None:
    """Keep the time of one call in place of an earlier one; the tables must exist."""
    call = sample.call
    first, second = _place(call)
    key = {"study": f"calibration of {sample.device}", "trial": first, "position": second}
    row = {
        **key,
        "model": "",
        "device": sample.device,
        "runtime": ALONE,
        "precision": call.precision,
        "origin": "measured",
        "kind": str(call.kind),
        "phase": str(call.phase),
        "shape": json.dumps(call.shape),
        "time_s": sample.time_s,
        "count": sample.count,
        "name": call.role,
    }
    store.replace_rows(Rows(table=SAMPLES, key=key, rows=[row]))


def read_isolated(connection: Connection) -> tuple[IsolatedSample, ...]:
    """Return all times that calibrations have kept; the tables must exist."""
    kinds, phases = set(OpKind), set(Phase)
    wanted = select(_C.device, _C.precision, _C.kind, _C.phase, _C.shape, _C.time_s, _C["count"], _C.name)
    rows = connection.execute(wanted.where(_C.runtime == ALONE).order_by(_C.study, _C.trial, _C.position))
    found = []
    for device, precision, kind, phase, shape, time_s, count, role in rows:
        if kind in kinds and phase in phases:
            try:
                sizes = shape_of(shape)
            except (ArithmeticError, RecursionError, TypeError, ValueError):
                continue  # somebody's hand has written it
            call = IsolatedCall(kind=OpKind(kind), phase=Phase(phase), role=role, precision=precision, shape=sizes)
            found.append(IsolatedSample(device=device, call=call, time_s=time_s, count=count))
    return tuple(found)


def shape_of(text: str) -> tuple[float, ...]:
    """Return the sizes that a row holds as JSON.

    Raises:
        TypeError, ValueError: They are no finite numbers.
    """
    sizes = tuple(map(float, json.loads(text)))
    if not all(map(math.isfinite, sizes)):
        raise ValueError(f"{quote_value(text)} has sizes without end")
    return sizes


def _place(call: IsolatedCall) -> tuple[int, int]:
    """Return two numbers that identify the call; 62 bits, in which no two calls of a calibration will ever meet."""
    told = repr((str(call.kind), str(call.phase), call.role, call.precision, call.shape))
    digest = hashlib.blake2b(told.encode(), digest_size=8).digest()
    first, second = (int.from_bytes(half, "big") >> 1 for half in (digest[:4], digest[4:]))
    return first, second
