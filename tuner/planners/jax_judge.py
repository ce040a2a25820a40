"""XLA's compiler as a judge of plans: it compiles each for a device of the catalog, which the machine needn't have.

The schedule is replayed (`costmodels/xla/schedule.py`) with kernels by the roofline of the device, and collectives by
the links of the cluster, as in the plan's own price.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from costmodels.sharding.device_mesh import DeviceMesh
from costmodels.sharding.exports.jax_apply import on_mesh
from costmodels.sharding.fusion import LAUNCH_S
from costmodels.xla.compiler import OPTIONS, has_gpu_compiler
from costmodels.xla.schedule import Kernel, Replayed, replayed, without_comments
from costmodels.xla.target import target_of
from hardware.device import Device
from hardware.io.errors import ConfigError
from tuner.planners.judged import KEY, find_judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Step to compile.

    Attributes:
        function: Function of the step.
        arguments: Its arguments, or their shapes.
        in_specs: Tree of PartitionSpecs for each argument that is an array.
        out_specs: Tree of PartitionSpecs for the returned value.
        donate_argnums: Arguments whose memory the outputs take over.
        static_argnums: Arguments that are no arrays.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    in_specs: tuple[Any, ...]
    out_specs: Any
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compiled step.

    Attributes:
        replayed: Times of its schedule.
        memory_bytes: Arguments, outputs that take no argument's place, and temporaries of a device [bytes].
        compile_s: Time that tracing and compiling took [s].
    """

    replayed: Replayed
    memory_bytes: float
    compile_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """XLA's compiler for the devices of a cluster.

    Attributes:
        device: Device that it compiles for.
        devices: Devices of a mesh, which exist only for the compiler.
    """

    device: Device
    devices: tuple[Any, ...]

    def compile(self, step: Step, mesh: DeviceMesh) -> Compiled:
        """Compile a step for a mesh of the device.

        Raises:
            jax.errors.JaxRuntimeError: XLA refuses it.
            ValueError: JAX refuses it, or its schedule cannot be read.
        """
        began_s = time.perf_counter()
        jax_mesh = Mesh(np.array(self.devices).reshape(mesh.sizes), mesh.names)
        jitted = jax.jit(
            step.function,
            in_shardings=on_mesh(jax_mesh, step.in_specs),
            out_shardings=on_mesh(jax_mesh, step.out_specs),
            donate_argnums=step.donate_argnums,
            static_argnums=step.static_argnums,
        )
        program = jitted.lower(*step.arguments).compile(compiler_options=dict(OPTIONS))
        compile_s = time.perf_counter() - began_s
        memory = program.memory_analysis()
        assert memory is not None, "XLA knows the memory of what it compiles for GPUs"
        return Compiled(
            replayed=replayed(
                without_comments(str(program.as_text())),
                dict(zip(mesh.names, mesh.sizes, strict=True)),
                kernel_s=self.kernel_s,
                collective_s=mesh.seconds,
            ),
            memory_bytes=float(
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
                - memory.alias_size_in_bytes
            ),
            compile_s=compile_s,
        )

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the time of a kernel by the roofline of the device, and of its launch [s]."""
        arithmetic_s = kernel.flop / self.device.peak_flop_per_s(kernel.precision) if kernel.flop else 0.0
        return max(kernel.num_bytes / self.device.memory_bandwidth_bytes_per_s, arithmetic_s) + LAUNCH_S


def judge_of(name: str, mesh: DeviceMesh) -> Judge:
    """Return the judge for a device of the catalog, which must be that of the mesh's cluster.

    Raises:
        ConfigError: XLA's compiler for it is not installed or does not know it, or the cluster has other devices.
    """
    device = find_judge(name)
    others = sorted({one.name for one in mesh.cluster.devices} - {device.name})
    if others:
        raise ConfigError(
            f"must be the device of the cluster {mesh.cluster.name}, which has {', '.join(others)}",
            key=KEY,
            value=name,
            nearest=f"a cluster of {device.name}",
        )
    description = target_of(device)
    if description is None:
        raise ConfigError(f"is no device that XLA's compiler is told of: {device.name}", key=KEY, value=name)
    if not has_gpu_compiler():
        version = jax.__version__
        raise ConfigError(
            "needs XLA's compiler for GPUs, which is not installed here",
            key=KEY,
            value=name,
            nearest=f"pip install jax-cuda12-pjrt=={version} jax-cuda12-plugin=={version}; it needs no GPU",
        )
    # hosts of the usual size if these are full
    per_host = min(mesh.num_devices, device.devices_per_host)
    hosts, rest = divmod(mesh.num_devices, per_host)
    topology = f"1x1x{mesh.num_devices}" if rest else f"1x{hosts}x{per_host}"
    try:
        found = topologies.get_topology_desc("", platform="cuda", target_config=description, topology=topology)
    except NotImplementedError:  # JAX says so of a platform that it has not loaded
        raise ConfigError(
            "needs XLA's compiler for GPUs, which JAX has not loaded",
            key=KEY,
            value=name,
            nearest="without a GPU, JAX loads it only if the environment says JAX_PLATFORMS=cpu",
        ) from None
    return Judge(device=device, devices=tuple(found.devices))
