"""Program of a process of a trial: it compiles the step for all devices, runs it, and sends what it measures."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from hardware.device import GIB
from trials.jax_training.device_program import DeviceProgram
from trials.jax_training.model.device_share import DeviceShare, compile_with_program
from trials.jax_training.model.graph_run import lower_graph_step
from trials.jax_training.own_step.run import lower_own_step
from trials.jax_training.steps import LoweredStep, RunningStep
from trials.own_step import OwnStep
from trials.ranks.messages import Place
from trials.ranks.out_of_memory import speaks_of_memory
from trials.training.messages import Failed, Finished, Ready, StepTaken, describe_error
from trials.training.work import CatalogStep, PlannedWork

PORT_WAIT_S = 10.0
"""Time that other processes of the trial may take to close the port that was reserved for rank 0 [s]."""


def run_rank(place: Place, work: PlannedWork) -> None:
    """Compile, run and measure the step of `work`; any failure is sent as a message."""
    peak_bytes = None
    try:
        began_s = time.perf_counter()
        if work.clock == "virtual":  # a program out of a cache comes without the partitioner's, which the clock reads
            jax.config.update("jax_enable_compilation_cache", False)
        connect(place, num_devices=work.plan.mesh.num_devices)
        connected_s = time.perf_counter()
        lowered = _lower(work)
        program: DeviceProgram | None = None
        if work.clock == "virtual" and work.plan.mesh.num_devices > 1:
            compiled, program = compile_with_program(lowered.program)
        else:
            compiled = lowered.program.compile()
        peak_bytes = device_bytes(compiled)
        if peak_bytes > work.memory_bytes:
            raise MemoryError(
                f"out of memory: the compiled step needs {peak_bytes / GIB:.3g} GiB on each device by XLA's memory "
                f"analysis, and a device has {work.memory_bytes / GIB:.3g} GiB"
            )
        compiled_s = time.perf_counter()
        step = lowered.begin(compiled)
        # the devices of all processes have the same share
        share = None if program is None or place.rank > 0 else DeviceShare(program, step.arguments, step.replaced)
        built_s = time.perf_counter()
        runner = _Runner(step, share)
        for _ in range(work.warmup_steps):
            runner.step()
            runner.share_s()
        times = {
            "group_s": connected_s - began_s,
            "compile_s": compiled_s - connected_s,
            "build_s": built_s - compiled_s,
            "warmup_s": time.perf_counter() - built_s,
        }
        collectives_s = 0.0 if program is None else program.collectives_s(work.plan.mesh.cluster)
        if work.clock == "virtual":
            times["collectives_s"] = collectives_s
        place.tell(Ready(conditions=times))
        _measure_steps(place, work, runner, collectives_s)
        place.tell(Finished(peak_bytes=peak_bytes, conditions={}))
        if place.world_size > 1:
            jax.distributed.shutdown()
    except Exception as error:  # noqa: BLE001 # the rank's boundary: a failure is a result
        lacks_memory = (
            isinstance(error, MemoryError)
            or speaks_of_memory(str(error))
            or "RESOURCE_EXHAUSTED" in describe_error(error)
        )
        place.tell(Failed.of(error, is_out_of_memory=lacks_memory, peak_bytes=peak_bytes))


def connect(place: Place, *, num_devices: int) -> None:
    """Give this process its equal share of all devices, and connect it to the others by gloo.

    The cores of the machine stand for devices: XLA runs each virtual device of the CPU in threads of its own.
    """
    share = num_devices // place.world_size
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={share}".strip()
    jax.config.update("jax_platforms", "cpu")
    if place.world_size > 1:
        if place.listening is not None:
            # JAX's coordinator opens the port itself, once the processes that inherited it have closed it too
            socket.socket(fileno=place.listening).close()
            _wait_for_port(place.host, place.port)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{place.host}:{place.port}", place.world_size, place.rank)


def _wait_for_port(host: str, port: int) -> None:
    """Wait until a port can be opened, for PORT_WAIT_S at most."""
    deadline_s = time.monotonic() + PORT_WAIT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            socket.create_server((host, port)).close()
            return
        time.sleep(0.01)


def device_bytes(compiled: Any) -> int:
    """Return the memory that a compiled step needs on each device: arguments, results and temporaries [bytes]."""
    memory = compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _lower(work: PlannedWork) -> LoweredStep:
    """Lower the step of a trial for the devices of its plan's mesh."""
    match work.step:
        case CatalogStep(top_k=top_k):
            return lower_graph_step(work.plan, top_k=top_k, seed=work.seed)
        case OwnStep() as own:
            return lower_own_step(own, work.plan, seed=work.seed)


class _Runner:
    """Step that runs again and again, and perhaps the share of one device."""

    def __init__(self, step: RunningStep, share: DeviceShare | None) -> None:
        self._step, self._share = step, share

    def step(self) -> float | None:
        """Run one step to its end, and return the loss before it; None without one."""
        return self._step.run()

    def share_s(self) -> float:
        """Run the share of one device, and return its CPU time [s]; 0 without one."""
        return 0.0 if self._share is None else self._share.cpu_s()


def _measure_steps(place: Place, work: PlannedWork, runner: _Runner, collectives_s: float) -> None:
    """Run measured steps until they are precise enough, and send each of them.

    The virtual time of a step is the CPU time of the share of one device, alone, and the time of its collectives.
    """
    seconds: list[float] = []
    for number in range(work.max_steps):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        loss = runner.step()
        measured = [time.perf_counter() - began_s, time.process_time() - began_cpu_s]
        measured.append(runner.share_s())
        # all processes get the same numbers, so that they all stop after the same step
        walls, cpus, shares = np.asarray(process_allgather(np.array(measured))).reshape(-1, 3).T
        # a device without others runs the whole step by itself
        alone_s = shares.max() if work.plan.mesh.num_devices > 1 else cpus.sum()
        times = {"wall": float(walls.max()), "cpu": float(cpus.sum()), "virtual": float(alone_s) + collectives_s}
        detail = times["virtual"] if work.clock == "virtual" else None
        place.tell(StepTaken(number=number, wall_s=times["wall"], cpu_s=times["cpu"], loss=loss, detail=detail))
        seconds.append(times[work.clock])
        if work.is_precise(seconds):
            return
