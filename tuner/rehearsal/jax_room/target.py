"""Devices that the program sees: those of XLA's compiler for GPUs, which needs none, or virtual ones of the CPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src import distributed, xla_bridge

from costmodels.xla.compiler import OPTIONS
from tuner.rehearsal.both_rooms.places import place_in_program
from tuner.rehearsal.jax_room.arrays import INVENTED, LIVING

MOST_CPUS = 2048
"""Devices of a process in XLA's client for CPUs; the next ones would be those of another process
(openxla/xla, `xla/pjrt/cpu/cpu_topology.h`)."""
_OWN_SETTINGS = ("jax_num_cpu_devices", "jax_platforms", "jax_platform_name", "jax_enable_compilation_cache")


@dataclass(slots=True)
class Target:
    """Devices for which the program is compiled.

    Attributes:
        world: Number of devices.
        description: XLA's description of a GPU; None to compile for CPUs.
        memory_bytes: Memory of a device [bytes].
    """

    world: int
    description: str | None
    memory_bytes: int
    _devices: list[Any] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        """Return whether XLA compiles for GPUs."""
        return self.description is not None

    @property
    def devices(self) -> list[Any]:
        """Return the devices, made when they are asked for: flags that the program sets before count."""
        if not self._devices:
            if self.description is None:
                self._devices = xla_bridge.get_backend("cpu").devices()
            else:
                xla_bridge.get_backend("cpu")  # JAX registers its plugins with it
                topology = xla_bridge.make_pjrt_topology(
                    "cuda", "", target_config=self.description, topology=f"1x1x{self.world}"
                )
                self._devices = topology._make_compile_only_devices()
                _answer_of_memory(self)
        return self._devices

    @property
    def host(self) -> Any:
        """Return the device that computes small things with data."""
        return xla_bridge.get_backend("cpu").devices()[0]

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """Return options of the compiler."""
        return tuple(OPTIONS.items()) if self.is_gpu else ()


def show(target: Target) -> None:
    """Let JAX tell the program of the target's devices, as if one process had all of them.

    Raises:
        ValueError: they are more CPUs than XLA can have.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what it holds was compiled for devices that run
    if not target.is_gpu:
        if target.world > MOST_CPUS:
            raise ValueError(
                f"XLA compiles for {MOST_CPUS} CPUs at most, and the world has {target.world} devices: install "
                "jax-cuda12-pjrt and jax-cuda12-plugin of the version of JAX, whose compiler needs no GPU"
            )
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(one for one in flags if "host_platform_device_count" not in one)
        jax.config.update("jax_num_cpu_devices", target.world)
        xla_bridge.get_backend("cpu")
    platforms = (None, "gpu", "cuda") if target.is_gpu else (None, "cpu")
    _keep_settings()

    def answer(name: str, replace: Callable[..., Any]) -> None:
        ask = getattr(xla_bridge, name)

        @functools.wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend", args[-1] if args and isinstance(args[-1], str) else None)
            return replace() if backend in platforms else ask(*args, **kwargs)

        setattr(xla_bridge, name, asked)
        if getattr(jax, name, None) is not None:
            setattr(jax, name, asked)

    answer("devices", lambda: list(target.devices))
    answer("local_devices", lambda: list(target.devices))
    answer("device_count", lambda: target.world)
    answer("local_device_count", lambda: target.world)
    answer("default_backend", lambda: "gpu" if target.is_gpu else "cpu")
    answer("process_count", lambda: 1)
    answer("process_index", lambda: 0)
    _connect_nothing()


def _answer_of_memory(target: Target) -> None:
    """Let devices answer how much of their memory is in use: what the arrays without data would take."""

    def memory_stats(device: Any) -> dict[str, int]:
        INVENTED[place_in_program()] += 1
        used = sum(LIVING.sizes(device).values())
        return {"bytes_in_use": used, "peak_bytes_in_use": used, "bytes_limit": target.memory_bytes}

    setattr(type(target.devices[0]), "memory_stats", memory_stats)  # noqa: B010 - mypy knows a method there


def _keep_settings() -> None:
    """Let the program's settings of devices have no effect."""
    update = jax.config.update

    def kept(name: str, value: Any) -> None:
        if name not in _OWN_SETTINGS:
            update(name, value)  # type: ignore[no-untyped-call]

    setattr(jax.config, "update", kept)  # noqa: B010 - mypy knows a method there


def _connect_nothing() -> None:
    """Let `jax.distributed` believe that it is connected, once the program asks it to."""
    asked: list[bool] = []

    def initialize(*_: Any, **__: Any) -> None:
        asked.append(True)

    for module in (jax.distributed, distributed):
        for name, stand_in in (
            ("initialize", initialize),
            ("shutdown", lambda: None),
            ("is_initialized", lambda: bool(asked)),
        ):
            setattr(module, name, stand_in)
