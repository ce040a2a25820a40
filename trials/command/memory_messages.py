"""Messages in logs by which allocators, runtimes and schedulers say that memory is used up.

A log may mention memory although none is lacking: in advice, in arguments, in warnings that the program survives. So a
line counts only if it is one of these messages, or if it is the last error of the log and speaks of memory.
"""

from __future__ import annotations

import re

from trials.ranks.out_of_memory import speaks_of_memory

_MESSAGES = re.compile(
    "|".join(
        (
            # torch's caching allocators: c10/cuda/CUDACachingAllocator.cpp, torch_npu's NPUCachingAllocator.cpp
            r"\b(?:CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate",
            # CUDA and ROCm themselves, and what calls them: c10/cuda/CUDAException.cpp, cuBLAS, NCCL
            r"\b(?:CUDA|HIP|NPU) error: out of memory",
            r"cuda runtime error \(2\) ?: out of memory",
            r"(?:CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory|hipErrorOutOfMemory|cudaErrorMemoryAllocation)",
            r"(?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED",
            r"(?:Cuda|HIP) failure (?:2 )?'out of memory'",
            # memory of the host: c10/core/impl/alloc_cpu.cpp, errno 12, Python, NumPy, C++, glibc
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"\[Errno 12\] Cannot allocate memory",
            r"^(?:\[[^\]]*\]:? *)*(?:[\w.]+\.)?_?(?:Array)?MemoryError(?:: |$)",
            r"(?:terminate called after throwing an instance of|what\(\):) *'?std::bad_alloc",
            r"cannot allocate memory for thread-local data",
            # XLA
            r"RESOURCE_EXHAUSTED: ",
            # Linux's OOM killer, in the kernel's words and in Slurm's
            r"Out of memory: Killed process \d+",
            r"oom[-_]kill event",
            r"task [\d,-]+: Out Of Memory",
        )
    )
)


def says_memory_is_used_up(line: str) -> bool:
    """Return whether a line of a log is a message that memory is used up."""
    return _MESSAGES.search(line.strip()) is not None


def lack_of_memory(log: str, last_error: str) -> str:
    """Return the line of a failed program's log that says it lacked memory; empty if there is none.

    `last_error` is the last line that names an error, or empty.
    """
    found = next((line.strip() for line in log.splitlines() if says_memory_is_used_up(line)), "")
    return found or (last_error if speaks_of_memory(last_error) else "")
