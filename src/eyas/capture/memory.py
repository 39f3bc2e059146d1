"""Resident memory that stays where it is: what is freed goes back to the system, whichever thread frees it."""

from __future__ import annotations

import ctypes

import pyarrow as pa

_M_ARENA_MAX = -8
"""glibc's name of the parameter, see mallopt(3)."""
_libc = ctypes.CDLL(None)


def share_arena() -> None:
    """Let all threads allocate from one arena, where the C library has arenas (glibc).

    States are allocated in one thread and freed in another: with an arena for each thread, what is freed is not used
    again by the thread that allocates.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Return freed pages to the system; milliseconds, for moments between two pieces of work."""
    pa.default_memory_pool().release_unused()
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
