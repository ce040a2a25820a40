"""Program of a rank of a trial: it trains steps, measures them, and sends the results."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trials.own_step import OwnStep
from trials.ranks.memory_limit import limit_data
from trials.ranks.messages import Place
from trials.ranks.out_of_memory import speaks_of_memory
from trials.torch_training.framework import Profiled
from trials.torch_training.model.experts import keep_all, keep_up_to
from trials.torch_training.own_step.run import OwnTraining, trace_own_step
from trials.torch_training.planned.step import PlannedStep
from trials.torch_training.process_group import process_group
from trials.torch_training.profiling.recording import BACKEND, Recorder, register_recorded_backend
from trials.torch_training.profiling.step_profiler import profile_steps
from trials.torch_training.trainer_work import TrainerWork
from trials.torch_training.training import Trainer
from trials.training.messages import Begun, Failed, Finished, Ready, StepTaken
from trials.training.work import CatalogStep, PlannedWork

AnyTrainer = Trainer | PlannedStep | OwnTraining
AnyWork = TrainerWork | PlannedWork


def run_rank(place: Place, work: AnyWork) -> None:
    """Train and measure the step of `work`; any failure is sent as a message."""
    memory = _Memory(work)
    if work.device == "cpu":
        place.tell(Begun(resident_bytes=memory.start_bytes))
    try:
        began_s = time.perf_counter()
        recorder = register_recorded_backend() if work.records else None
        with process_group(place, work.device, backend=BACKEND if recorder else None) as device:
            grouped_s = time.perf_counter()
            trainer = _build_trainer(work, device, memory)
            built_s = time.perf_counter()
            for number in range(work.warmup_steps):
                if number == work.warmup_steps - 1:
                    memory.begin()
                trainer.step()
            gc.collect()
            gc.freeze()  # all objects so far stay, and collections inside of steps need not look at them
            times = {
                "group_s": grouped_s - began_s,
                "build_s": built_s - grouped_s,
                "warmup_s": time.perf_counter() - built_s,
            }
            place.tell(Ready(conditions=times))
            _measure_steps(place, work, trainer, recorder if work.clock == "virtual" else None, device)
            began_s = time.perf_counter()
            peak_bytes = memory.peak_bytes()
            detail = _profile_step(trainer, recorder, device) if work.profiles else None
            times = {"profile_s": time.perf_counter() - began_s}
            place.tell(Finished(peak_bytes=peak_bytes, conditions=times, detail=detail))
    except Exception as error:  # noqa: BLE001 # the rank's boundary: a failure is a result
        failed = Failed.of(
            error,
            is_out_of_memory=_is_out_of_memory(error),
            peak_bytes=memory.peak_bytes(),
            on_cpu=work.device == "cpu",
        )
        place.tell(failed)


def _build_trainer(work: AnyWork, device: torch.device, memory: _Memory) -> AnyTrainer:
    """Build this rank's part of the model."""
    if isinstance(work, TrainerWork):
        keep = keep_all if work.capacity_factor is None else keep_up_to(work.capacity_factor)
        return Trainer(work.job, work.runtime, work.config, device, seed=work.seed, keep=keep)
    match work.step:
        case CatalogStep(top_k=top_k):
            return PlannedStep(work.plan, seed=work.seed, top_k=top_k)
        case OwnStep() as own:
            return _begin_own_step(own, work, memory)


def _begin_own_step(own: OwnStep, work: PlannedWork, memory: _Memory) -> OwnTraining:
    """Build a user's module, whose imports and trace are no memory of training."""
    traced = trace_own_step(own, work.plan, seed=work.seed)
    memory.leave_out_all_but(traced.tensor_bytes)
    training = traced.begin()
    # until here, each rank may have had the module whole
    limit_data(max(int(work.memory_bytes) - memory.held_bytes(), 0))
    return training


def _take_step(trainer: AnyTrainer) -> float:
    """Train one step, and return the mean loss over the tokens of the batch, or a user's loss."""
    return trainer.step().loss if isinstance(trainer, Trainer) else trainer.step()


def _measure_steps(
    place: Place, work: AnyWork, trainer: AnyTrainer, recorder: Recorder | None, device: torch.device
) -> None:
    """Train measured steps until they are precise enough, and send each of them."""
    seconds: list[float] = []
    for number in range(work.max_steps):
        if recorder:
            recorder.start()
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        loss = _take_step(trainer)
        if device.type == "cuda":  # its kernels run on after the call has returned
            torch.cuda.synchronize(device)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        recording = recorder.stop() if recorder else None
        # all ranks get the same numbers, so that they all stop after the same step
        walls, cpus = _gather([wall_s, cpu_s], device)
        place.tell(StepTaken(number=number, wall_s=max(walls), cpu_s=sum(cpus), loss=loss, detail=recording))
        seconds.append(max(walls) if work.clock == "wall" else sum(cpus))
        if work.is_precise(seconds):
            return


def _profile_step(trainer: AnyTrainer, recorder: Recorder | None, device: torch.device) -> Profiled:
    """Train one more step; return its operators, and its recording if there is a recorder.

    A planned step is recorded only: its operators are those of its graph, whatever their kernels.
    """
    if recorder:
        recorder.start()
    if isinstance(trainer, Trainer):
        profile = profile_steps(trainer.start_step, device)
    else:
        assert recorder is not None, "planned steps run on CPUs, whose groups record"
        profile = None
        trainer.step()
    return Profiled(profile=profile, recording=recorder.stop() if recorder else None)


def _gather(values: list[float], device: torch.device) -> list[list[float]]:
    """Gather some numbers of every rank; return a list over the ranks for each number."""
    own = torch.tensor(values, dtype=torch.float64, device=device)
    found = torch.empty(dist.get_world_size() * len(values), dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(found, own)
    # ranks lie behind each other, so that column i holds the number i of all ranks
    by_rank: list[list[float]] = found.view(-1, len(values)).T.tolist()
    return by_rank


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or speaks_of_memory(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Memory:
    """Peak memory of training: the allocator's on a GPU, the growth of the resident set on a CPU.

    `begin` forgets the peak of building and of the first warm-up steps: weights are made whole before they are cut.
    """

    def __init__(self, work: AnyWork) -> None:
        self._is_cuda = work.device == "cuda"
        self._trims = False
        self.start_bytes = 0
        if not self._is_cuda:
            self.start_bytes = _resident_bytes("VmRSS")
            self.begin()

    def begin(self) -> None:
        """Forget the peak so far, and with it freed memory of a user's building."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        if self._trims:
            gc.collect()
            with contextlib.suppress(AttributeError, OSError):  # glibc's own, and no other C library's
                ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def leave_out_all_but(self, num_bytes: int) -> None:
        """Begin with what the process holds on a CPU now, but for these tensors, and without freed memory."""
        self._trims = True
        self.begin()
        self.start_bytes = max(_resident_bytes("VmRSS") - num_bytes, 0)

    def held_bytes(self) -> int:
        """Return the memory of training that a process on a CPU has now [bytes]."""
        return max(_resident_bytes("VmRSS") - self.start_bytes, 0)

    def peak_bytes(self) -> int:
        if self._is_cuda:
            return int(torch.cuda.max_memory_reserved())
        return max(_resident_bytes("VmHWM") - self.start_bytes, 0)


def _resident_bytes(key: str) -> int:
    """Return a number of /proc/self/status [bytes]; 0 where there is no such file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
