"""Types and constants of StableHLO as those of JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jaxlib.mlir import ir

DTYPES: Mapping[str, Any] = {
    "i1": np.bool_,
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "bf16": jnp.bfloat16,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "f8E4M3FNUZ": jnp.float8_e4m3fnuz,
    "f8E5M2FNUZ": jnp.float8_e5m2fnuz,
    "f8E4M3B11FNUZ": jnp.float8_e4m3b11fnuz,
    "i4": jnp.int4,
    "ui4": jnp.uint4,
}
"""Element types by StableHLO's names."""
WIDE = frozenset({"i64", "ui64", "f64", "complex<f64>"})
"""Types that JAX has only with `jax_enable_x64`."""


def aval_of(kind: ir.Type) -> jax.ShapeDtypeStruct:
    """Return the shape and type of a tensor.

    Raises:
        TypeError: It is no tensor of known shape and element type; the message says what it is.
    """
    if not isinstance(kind, ir.RankedTensorType):
        raise TypeError(f"a value of type {kind}")
    if not kind.has_static_shape:
        raise TypeError(f"the shape {kind}, which is not static")
    if str(kind.element_type) not in DTYPES:
        raise TypeError(f"the element type {kind.element_type}")
    return jax.ShapeDtypeStruct(tuple(kind.shape), DTYPES[str(kind.element_type)])


def constant_of(op: ir.Operation, aval: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
    """Return the array of a constant.

    Raises:
        TypeError: It is written in another form than as elements.
    """
    try:
        value = op.attributes["value"]
    except TypeError:  # the bindings know no complex numbers; text of an operator takes long
        return _parse_elements(str(op), aval)
    try:
        return np.asarray(np.array(value), aval.dtype).reshape(aval.shape)
    except (TypeError, ValueError):  # they have no elements of small floats
        return _parse_elements(str(value), aval)


def _parse_elements(text: str, aval: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
    """Parse the `dense<...>` of a constant: elements in brackets, one for all of them, or all bytes in hexadecimal."""
    found = re.search(r"dense<(.*)> : tensor<", text, re.DOTALL)
    if found is None:
        raise TypeError("a constant that is not written out")
    body, dtype = found[1], np.dtype(aval.dtype)
    if body.startswith('"0x'):
        elements = np.frombuffer(bytes.fromhex(body.strip('"')[2:]), dtype)
    elif dtype.kind == "c":
        pairs = re.findall(r"\(([^,]*),([^)]*)\)", body)
        half = np.dtype(f"float{dtype.itemsize * 4}")
        elements = np.array([complex(_parse_float(one, half), _parse_float(two, half)) for one, two in pairs], dtype)
    else:
        words = re.findall(r"[^\s,\[\]]+", body)
        elements = np.array([_parse_float(word, dtype) for word in words], dtype)
    return np.full(aval.shape, elements[0], dtype) if elements.size == 1 else elements.reshape(aval.shape)


def _parse_float(word: str, dtype: np.dtype[Any]) -> float:
    """Parse a number; the bits of NaN and of infinities are written in hexadecimal."""
    word = word.strip()
    if not word.startswith("0x"):
        return float(word)
    return float(np.array(int(word, 16), np.dtype(f"uint{dtype.itemsize * 8}")).view(dtype))
