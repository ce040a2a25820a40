"""Calls of compiled functions: they are lowered and compiled as ever, and return arrays without data.

JAX runs whatever a program computes, one operator or a whole step, by one function of its own,
`_pjit_call_impl_python`. Here it computes only small things of JAX itself whose arguments have data, such as keys of
random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax._src import array, config, core, debugging, dispatch, pjit
from jax._src.interpreters import mlir, pxla
from jax._src.named_sharding import UNSPECIFIED
from jax.experimental.layout import Format

from tuner.rehearsal.both_rooms.places import is_beneath, shown_file
from tuner.rehearsal.jax_room.arrays import ArrayWithoutData, is_real
from tuner.rehearsal.jax_room.steps import Call, Steps, Summary
from tuner.rehearsal.jax_room.target import Target

SMALL = 1 << 20
"""Largest number of bytes that are computed with data."""
_WRAPPERS, _FIRST = ("shard_map", "scan"), 8
_PMAP = "jax/_src/pmap.py:"
"""Where JAX wraps functions of the program for `pmap`."""
_UNSPECIFIED = type(UNSPECIFIED)


def replace_calls(target: Target, steps: Steps) -> None:
    """Let JAX compile for a target what the program calls, tell it to the record of steps, and run next to nothing."""
    _Calls(target, steps).install()


class _Calls:
    def __init__(self, target: Target, steps: Steps) -> None:
        self._target, self._steps = target, steps
        self._call: Callable[..., Any] = pjit._pjit_call_impl_python
        self._put: Callable[..., Any] = dispatch._device_put_impl
        self._compile: Callable[..., Any] = pxla.MeshComputation.compile
        self._run: Any = pxla.MeshExecutable.unsafe_call
        self._compiled: dict[Any, Any] = {}

    def install(self) -> None:
        for module, name, own in (
            (pjit, "_pjit_call_impl_python", self.call),
            (dispatch, "_device_put_impl", self.device_put),
            (array, "make_array_from_callback", self.make_from_callback),
            (jax, "make_array_from_callback", self.make_from_callback),
            (array, "make_array_from_single_device_arrays", self.make_from_parts),
            (jax, "make_array_from_single_device_arrays", self.make_from_parts),
        ):
            setattr(module, name, own)
        for primitive in (debugging.debug_callback_p, debugging.debug_print_p):
            for platform in ("cpu", "cuda"):  # JAX has a rule for each
                mlir.register_lowering(primitive, _print_nothing, platform=platform)
        options, compiled = self._target.options, self._compile

        def compile_with_options(computation: Any, *args: Any, **kwargs: Any) -> Any:
            if options and computation._device_list is not None and computation._device_list[0].platform != "cpu":
                names = {name for name, _ in computation._compiler_options_kvs}
                computation._compiler_options_kvs += tuple(pair for pair in options if pair[0] not in names)
            return compiled(computation, *args, **kwargs)

        setattr(pxla.MeshComputation, "compile", compile_with_options)  # noqa: B010 - mypy knows a method there
        run, calls = self._run, self

        def unsafe_call(executable: Any) -> Any:
            if calls._is_on_host(executable):
                return run.fget(executable)
            return lambda *args: calls._returned_by(executable, args)

        setattr(pxla.MeshExecutable, "unsafe_call", property(unsafe_call))  # noqa: B010 - as above

    # compiled functions
    def call(self, *args: Any, **params: Any) -> Any:
        """Compile a function for the target; return arrays without data, or with data what is small."""
        jaxpr, name = params["jaxpr"], params["name"]
        for one in args:
            if isinstance(one, ArrayWithoutData):
                one._check_if_deleted()
        if self._has_data(args, params):
            with jax.default_device(self._target.host):
                return self._call(*args, **params)
        place = place_of(jaxpr)
        maker = f"{name} ({place})" if place else ""
        lower: dict[str, Any] = {
            "lowering_platforms": None,
            "lowering_parameters": mlir.LoweringParameters(),
            "pgle_profiler": None,
        }
        with jax.default_device(config.default_device.value or self._target.devices[0]):
            computation = pjit._resolve_and_lower(tuple(map(pjit.convert_to_metaty, args)), **params, **lower)
            compiled = computation.compile()
        unloaded = compiled._unloaded_executable
        outputs = [
            ArrayWithoutData(aval, sharding, committed=unloaded.committed, maker=maker)
            for aval, sharding in zip(jaxpr.out_avals, unloaded.output_shardings, strict=True)
        ]
        donated = params["donated_invars"]
        if maker:
            kept = [position - len(computation.const_args) for position in unloaded.kept_var_idx]
            used = frozenset(position for position in kept if position >= 0)
            self._steps.record(
                Call(
                    maker=maker,
                    jaxpr=jaxpr,
                    arguments=self._summaries(args, used),
                    results=self._summaries(outputs, frozenset()),
                    compiled=compiled,
                )
            )
        for one, is_given in zip(args, donated, strict=True):
            if is_given and isinstance(one, ArrayWithoutData):
                one.delete()
        return outputs, None, None, []

    def _has_data(self, args: Sequence[Any], params: dict[str, Any]) -> bool:
        """Return whether a call is computed: one of JAX's own, small, on no particular device."""
        jaxpr, mesh = params["jaxpr"], params["ctx_mesh"]
        if place_of(jaxpr) or (mesh is not None and not mesh.empty):
            return False
        if not all(map(is_real, args)):
            return False
        chosen = (*params["in_shardings"], *params["out_shardings"])
        if not all(isinstance(one, _UNSPECIFIED) for one in chosen):
            return False
        return sum(map(_aval_bytes, (*jaxpr.in_avals, *jaxpr.out_avals))) <= SMALL

    def _is_on_host(self, executable: Any) -> bool:
        """Return whether an executable is one that `call` lets JAX run: small, and on the host's device."""
        found = executable._unloaded_executable
        if found is None or list(found.device_list) != [self._target.host]:
            return False
        return sum(map(_aval_bytes, (*executable.in_avals, *executable.out_avals))) <= SMALL

    def _returned_by(self, executable: Any, args: Sequence[Any]) -> list[ArrayWithoutData]:
        """Return the results of a function that the program compiled ahead of time, and record its call."""
        unloaded = executable._unloaded_executable
        information = executable._all_args_info
        maker = f"{unloaded.name} ({_place(information.debug_info) if information else ''})"
        outputs = [
            ArrayWithoutData(aval, sharding, committed=unloaded.committed, maker=maker)
            for aval, sharding in zip(unloaded.output_avals, unloaded.output_shardings, strict=True)
        ]
        used = frozenset(unloaded.kept_var_idx)
        self._steps.record(
            Call(
                maker=maker,
                jaxpr=None,
                arguments=self._summaries(args, used),
                results=self._summaries(outputs, frozenset()),
                compiled=executable,
            )
        )
        return outputs

    def _summaries(self, values: Sequence[Any], used: frozenset[int]) -> tuple[Summary, ...]:
        device = self._target.devices[0]
        return tuple(
            Summary(
                number=one.number if isinstance(one, ArrayWithoutData) else 0,
                num_bytes=one.bytes_on(device) if isinstance(one, ArrayWithoutData) else _aval_bytes(core.typeof(one)),
                size=math.prod(one.sharding.shard_shape(one.shape)) if isinstance(one, ArrayWithoutData) else 0,
                maker=one.maker if isinstance(one, ArrayWithoutData) else "",
                is_float=jnp.issubdtype(core.typeof(one).dtype, np.floating),
                is_used=position in used,
            )
            for position, one in enumerate(values)
        )

    # arrays from data
    def device_put(self, x: Any, *, device: Any, src: Any, copy: Any, aval: Any) -> Any:
        """Return an array without data on a device or with a sharding; small ones without a place keep their data."""
        if isinstance(device, Format):
            device = device.sharding
        aval = core.shaped_abstractify(x) if aval is None else aval
        is_host = device is None or (device == self._target.host and self._target.is_gpu)
        if is_real(x) and is_host and (_aval_bytes(aval) <= SMALL or device is not None):
            with jax.default_device(self._target.host):
                return self._put(x, device=device, src=src, copy=copy, aval=aval)
        if isinstance(x, ArrayWithoutData):
            x._check_if_deleted()
        maker = x.maker if isinstance(x, ArrayWithoutData) else ""
        sharding: Any
        if device is None:
            if isinstance(x, ArrayWithoutData):
                return x
            sharding, committed = jax.sharding.SingleDeviceSharding(self._target.devices[0]), False
        elif isinstance(device, jax.sharding.Sharding):
            sharding, committed = device, True
        elif isinstance(device, core.MemorySpace):
            kind = {"Host": "pinned_host", "Device": "device"}.get(device.name, "device")
            place = (
                x.sharding if isinstance(x, jax.Array) else jax.sharding.SingleDeviceSharding(self._target.devices[0])
            )
            sharding, committed = place.with_memory_kind(kind), True
        else:
            sharding, committed = jax.sharding.SingleDeviceSharding(device), True
        sharding.shard_shape(aval.shape)  # refuses what does not divide
        found = ArrayWithoutData(aval, sharding, committed=committed, maker=maker)
        if copy == dispatch.ArrayCopySemantics.DONATE_INPUT and isinstance(x, ArrayWithoutData):
            x.delete()
        return found

    def make_from_callback(self, shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
        """Return an array without data; only the first part is asked for, for its type."""
        sharding = getattr(sharding, "sharding", sharding)
        indices = sharding.addressable_devices_indices_map(tuple(shape))
        if dtype is None:
            with jax.default_device(self._target.host):
                first = data_callback(next(iter(indices.values())))
            dtype = first.dtype if hasattr(first, "dtype") else np.asarray(first).dtype
        dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
        return ArrayWithoutData(core.ShapedArray(tuple(shape), dtype), sharding)

    def make_from_parts(self, shape: Any, sharding: Any, arrays: Any, *, dtype: Any = None) -> Any:
        """Return an array without data of the type of its parts."""
        expected = sharding.shard_shape(tuple(shape))
        for one in arrays:
            if tuple(one.shape) != tuple(expected):
                raise ValueError(f"a part of shape {one.shape} is no shard of {expected} of an array of shape {shape}")
        aval = core.ShapedArray(tuple(shape), arrays[0].dtype if dtype is None else dtype)
        return ArrayWithoutData(aval, sharding)


def _print_nothing(context: Any, *_: Any, effect: Any = None, **__: Any) -> list[Any]:
    """Compile nothing for what prints in a function; an ordered print hands its token on."""
    if effect is not None and effect in context.tokens_in.effects():
        context.set_tokens_out(context.tokens_in)
    return []


def place_of(jaxpr: Any) -> str:
    """Return the file and line of the program's function that a jaxpr was traced from; nothing for one of JAX.

    JAX wraps functions of the program for `pmap`, and calls of `shard_map` and `scan` outside of functions.
    """
    wrapped = [one.params["jaxpr"] for one in jaxpr.jaxpr.eqns[:_FIRST] if one.primitive.name in _WRAPPERS]
    inner = [getattr(one, "jaxpr", one) for one in wrapped]
    return next(filter(None, (_place(one.debug_info) for one in (jaxpr.jaxpr, *inner))), "")


def _place(information: Any) -> str:
    words = (information.func_src_info or "").split(" at ", 1) if information is not None else []
    if len(words) < 2 or (is_beneath(words[1]) and _PMAP not in words[1]):
        return ""
    return shown_file(words[1])


def _aval_bytes(aval: Any) -> int:
    if not hasattr(aval, "shape"):
        return 0
    size = getattr(aval.dtype, "itemsize", 8)
    return int(math.prod(aval.shape) * size)
