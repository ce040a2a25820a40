"""One device's share of a compiled step, which a single device runs by itself, in one thread, while nobody waits."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxlib import _jax, xla_client

from trials.jax_training.device_program import DeviceProgram

_HLO: Any = getattr(xla_client, "hlo", _jax)
"""Module of jaxlib that parses programs; older versions have one module for everything."""


def compile_with_program(lowered: Any) -> tuple[Any, DeviceProgram]:
    """Compile a lowered step, and return it with the program that XLA's partitioner has made of it.

    Raises:
        ValueError: The program has a collective whose time nobody can tell.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_large_constants": True}
        compiled = lowered.compile(compiler_options=options)
        (dump,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        return compiled, DeviceProgram.of(dump.read_text(encoding="utf-8"))


class DeviceShare:
    """Share of one device in a step, compiled for the first device of this process, with arrays of its own.

    Args:
        program: Program of the device.
        arguments: Arguments of the step in the order of its parameters, of which the share takes this process's first
            parts; it begins with copies of those that are replaced.
        replaced: Number of the result that replaces an argument in the next run, by the argument's number.
    """

    def __init__(self, program: DeviceProgram, arguments: Sequence[Any], replaced: Mapping[int, int]) -> None:
        device = jax.local_devices()[0]
        module = _HLO.hlo_module_from_text(program.alone)
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = 1, 1
        options.env_option_overrides = [("xla_cpu_multi_thread_eigen", "False")]
        self._loaded = device.client.compile_and_load(
            _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto()),
            xla_client.DeviceList((device,)),
            options,
        )
        self._replaced = replaced
        self._arguments = [
            _part_of(argument, device, is_copied=number in replaced) for number, argument in enumerate(arguments)
        ]

    def cpu_s(self) -> float:
        """Run the share once, and return the CPU time of this process meanwhile [s]."""
        began_s = time.process_time()
        results = self._loaded.execute_sharded(self._arguments).disassemble_into_single_device_arrays()
        found = [parts[0] for parts in results]
        for argument, result in self._replaced.items():
            self._arguments[argument] = found[result]
        jax.block_until_ready(found)
        return time.process_time() - began_s


def _part_of(argument: Any, device: Any, *, is_copied: bool) -> Array:
    """Return the first part of an argument that this process has, or a number on the device."""
    if not isinstance(argument, Array):
        number: Array = jax.device_put(argument, device)
        return number
    if jnp.issubdtype(argument.dtype, jax.dtypes.prng_key):
        argument = jax.random.key_data(argument)  # programs take the numbers of keys
    part: Array = argument.addressable_data(0)
    return jnp.array(part, copy=True) if is_copied else part
