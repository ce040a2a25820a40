"""Signs of a lack of memory in a process on a CPU: words in an error, or a failing allocation.

Most allocations that fail raise an error that names memory. Others do not: a thread that finds no room for its stack
raises "Resource temporarily unavailable", oneDNN "could not create a primitive", and the C library ends the process
with a line of its own if it has no room for a thread's variables. Nothing here imports torch.
"""

from __future__ import annotations

import mmap

STACK_BYTES = 8 * 2**20
"""Stack of a thread in Linux [bytes]: an amount of memory that a running process asks for now and then."""

_SIGNS = ("allocate memory", "bad_alloc", "out of memory", "MemoryError")


def speaks_of_memory(text: str) -> bool:
    """Return whether an error, or the output of a dying process, names a lack of memory."""
    return any(sign in text for sign in _SIGNS)


def is_memory_used_up() -> bool:
    """Return whether this process cannot get as much more memory as a thread's stack takes."""
    try:
        with mmap.mmap(-1, STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
            return False
    except OSError:
        return True
