"""Arrays of JAX without data: a shape, a type and a sharding, in place of the arrays that a program would hold."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax._src import core
from jax._src import dtypes as inner_dtypes
from jax._src.interpreters import mlir, pxla
from jax._src.numpy import array_methods, indexing
from jax.experimental.layout import Format

from tuner.rehearsal.both_rooms.places import place_in_program

INVENTED: Counter[str] = Counter()
"""Number of times that each place in the program asked for numbers of an array without data."""


@dataclass(slots=True)
class Living:
    """Arrays without data that the program holds.

    Attributes:
        arrays: The arrays, by their number in the order in which they were made.
        made: Number of arrays that were made.
    """

    arrays: weakref.WeakValueDictionary[int, ArrayWithoutData] = field(default_factory=weakref.WeakValueDictionary)
    made: int = 0

    def add(self, array: ArrayWithoutData) -> int:
        """Add a new array, and return its number."""
        self.made += 1
        self.arrays[self.made] = array
        return self.made

    def sizes(self, device: Any) -> dict[int, int]:
        """Return the bytes of each living array on a device, by its number."""
        return {number: array.bytes_on(device) for number, array in list(self.arrays.items()) if not array.is_deleted()}


LIVING = Living()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of an array without data on a device, with the fields of `jax.Shard`."""

    device: Any
    index: Any
    replica_id: int
    data: Any


class ArrayWithoutData(jax.Array):
    """Array that JAX's functions take and return like any other, and that no memory holds.

    Attributes:
        aval: JAX's description of shape and type.
        maker: Function that returned it, with its place; empty for one that no function of the program returned.
        number: Its number in the order of making.
    """

    def __init__(self, aval: Any, sharding: Any, *, committed: bool = True, maker: str = "") -> None:
        self.aval = core.update_aval_with_sharding(aval, sharding)  # type: ignore[misc] # JAX's own arrays set it too
        self._sharding, self._committed, self._deleted = sharding, committed, False
        self.maker = maker
        self.number = LIVING.add(self)

    # what JAX and programs ask of an array
    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: len(self.aval.shape))
    size = property(lambda self: int(np.prod(self.aval.shape, dtype=np.int64)))
    weak_type = property(lambda self: self.aval.weak_type)
    sharding = property(lambda self: self._sharding)
    committed = property(lambda self: self._committed)
    format = property(lambda self: Format(None, self._sharding))
    layout = property(lambda self: self.format)
    is_fully_replicated = property(lambda self: self._sharding.is_fully_replicated)
    is_fully_addressable = True
    device = property(lambda self: _the_only(self._sharding.device_set) or self._sharding)

    def devices(self) -> set[Any]:
        """Return the devices of the array."""
        found: set[Any] = self._sharding.device_set
        return found

    def bytes_on(self, device: Any) -> int:
        """Return its bytes on a device."""
        if device not in self._sharding.device_set:
            return 0
        return num_bytes(self.aval, self._sharding)

    def delete(self) -> None:
        """Mark the array as deleted, or given away."""
        self._deleted = True

    def is_deleted(self) -> bool:
        """Return whether it was deleted, or given away to a function."""
        return self._deleted

    def _check_if_deleted(self) -> None:
        if self._deleted:  # JAX's own words
            raise RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}.")

    def block_until_ready(self) -> ArrayWithoutData:
        """Return the array, which nobody computes."""
        self._check_if_deleted()
        return self

    def copy_to_host_async(self) -> None:
        """Do nothing: there are no data."""

    @property
    def _value(self) -> Any:
        """Return invented numbers, as a view of one number: no memory is taken."""
        self._check_if_deleted()
        INVENTED[place_in_program()] += 1
        if jnp.issubdtype(self.dtype, jax.dtypes.extended):
            raise TypeError(f"the data of {self.aval.str_short()} cannot be invented")
        # one for a number, and False for a truth value: nothing is infinite, nothing overflowed
        return np.broadcast_to(np.array(self.dtype != np.bool_, dtype=self.dtype), self.shape)

    def __array__(self, dtype: Any = None, context: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._value, dtype=dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return int(self.shape[0])

    def __bool__(self) -> bool:
        core.check_bool_conversion(self)
        return bool(self._value.reshape(()))

    def __float__(self) -> float:
        core.check_scalar_conversion(self)
        return float(self._value)

    def __int__(self) -> int:
        core.check_scalar_conversion(self)
        return int(self._value)

    def __index__(self) -> int:
        core.check_integer_conversion(self)
        return operator.index(int(self._value))

    def item(self, *args: int) -> Any:
        """Return an invented number."""
        return self._value.item(*args)

    def tolist(self) -> Any:
        """Return invented numbers."""
        return self._value.tolist()

    def __format__(self, specification: str) -> str:
        return format(self._value[()] if not self.ndim else str(self), specification)

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, dtype={self.dtype})"

    def __str__(self) -> str:
        return str(self._value) if not self.ndim else repr(self)

    def __getitem__(self, index: Any) -> Any:
        self._check_if_deleted()
        return indexing.rewriting_take(self, index)

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> Any:
        return np.asarray, (self._value,)

    def addressable_data(self, index: int) -> Any:
        """Return the part of a device."""
        return self.addressable_shards[index].data

    @property
    def addressable_shards(self) -> list[Shard]:
        """Return the parts of all devices; parts of one index have numbers of replicas."""
        self._check_if_deleted()
        seen: Counter[Any] = Counter()
        found = []
        aval = core.ShapedArray(self._sharding.shard_shape(self.shape), self.dtype)
        for device, index in self._sharding.devices_indices_map(self.shape).items():
            key = str(index)
            part = ArrayWithoutData(aval, jax.sharding.SingleDeviceSharding(device))
            found.append(Shard(device, index, seen[key], part))
            seen[key] += 1
        return found

    @property
    def global_shards(self) -> list[Shard]:
        """Return the parts of all devices."""
        return self.addressable_shards

    def __deepcopy__(self, _: Any) -> ArrayWithoutData:
        return ArrayWithoutData(self.aval, self._sharding, committed=self._committed)

    def __copy__(self) -> ArrayWithoutData:
        return self.__deepcopy__(None)


def num_bytes(aval: Any, sharding: Any) -> int:
    """Return the bytes of an array's part on each of its devices."""
    shape = sharding.shard_shape(aval.shape)
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        physical = core.physical_aval(core.ShapedArray(shape, aval.dtype))
        shape, dtype = physical.shape, physical.dtype
    else:
        dtype = aval.dtype
    bits = 4 if dtype.name in ("int4", "uint4", "float4_e2m1fn") else 8 * dtype.itemsize
    return -(-int(np.prod(shape, dtype=np.int64)) * bits // 8)


def is_real(value: Any) -> bool:
    """Return whether a value that a function takes has data."""
    return not isinstance(value, ArrayWithoutData)


def register() -> None:
    """Make the class known to JAX."""
    own = {name for name in vars(ArrayWithoutData) if name not in ("__doc__", "__module__")}
    array_methods._set_array_base_attributes(ArrayWithoutData, exclude=own)
    array_methods._set_array_attributes(ArrayWithoutData)
    core.pytype_aval_mappings[ArrayWithoutData] = lambda array: core.update_aval_with_sharding(
        array.aval, array.sharding
    )
    inner_dtypes.register_canonicalize_value_handler(ArrayWithoutData, None)
    pxla.shard_arg_handlers[ArrayWithoutData] = _shard
    # a constant of a function: equal numbers, that take no memory while it is compiled
    mlir.register_constant_handler(ArrayWithoutData, lambda array, _: mlir.ir_constant(array._value))


def _shard(arrays: Any, *_: Any) -> Any:
    raise TypeError(f"{arrays[0].aval.str_short()} has no data for a device")


def _the_only(devices: set[Any]) -> Any:
    return next(iter(devices)) if len(devices) == 1 else None
