"""How a lack of memory shows in a process on a CPU: in words, or in that nothing more is to be had.

Most allocations that fail raise an error that says so. Others do not: a thread that finds no room for its stack raises
"Resource temporarily unavailable", oneDNN "could not create a primitive", and the C library ends the process with a
line of its own where it has no room for a thread's variables. Nothing here imports torch.
"""

from __future__ import annotations

import mmap

STACK_BYTES = 8 * 2**20
"""Of a thread, as Linux gives it: what a process that goes on asks for now and then."""

_SIGNS = ("allocate memory", "bad_alloc", "out of memory", "MemoryError")


def speaks_of_memory(text: str) -> bool:
    """Whether an error, or what a dying process printed, names a lack of memory."""
    return any(sign in text for sign in _SIGNS)


def is_memory_used_up() -> bool:
    """Whether this process cannot have as much more memory as a thread's stack takes."""
    try:
        with mmap.mmap(-1, STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            return False
    except OSError:
        return True
