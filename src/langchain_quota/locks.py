"""Locks that are free after a fork, with no half-done change to what they guard.

A forked child has a copy of every lock, but only the thread that forked: a lock that another
thread held is never released in the child. So a fork first waits until the other threads have
finished their changes, and in the child every lock is free.
"""

import os
import threading
from threading import Lock
from weakref import ref

_PATIENCE = 1.0
"""How long a fork waits for a lock, in seconds. It waits in vain if its own thread holds it."""

_locks: dict[ref[Lock], None] = {}
"""All locks, in the order in which they were made."""


class _Held(threading.local):
    """The locks that a thread holds while it forks."""

    def __init__(self) -> None:
        self.locks: list[Lock] = []


_held = _Held()


def fork_safe_lock() -> Lock:
    """A lock that is free in a forked child, where no change that it guards is half done."""
    # The code that holds it must not wait for anything. If it takes another lock, that one must be
    # the older of the two: a fork takes the newest lock first.
    lock = Lock()
    _locks[ref(lock, _forget)] = None
    return lock


# The default outlives the module's names when the interpreter ends.
def _forget(gone: ref[Lock], locks: dict[ref[Lock], None] = _locks) -> None:
    locks.pop(gone, None)


def _hold_all() -> None:
    for each in reversed(list(_locks)):
        lock = each()
        if lock is not None and lock.acquire(timeout=_PATIENCE):
            _held.locks.append(lock)


def _let_go() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _begin_anew() -> None:
    _held.locks.clear()
    for each in list(_locks):
        lock = each()
        if lock is not None:
            # As the standard library does with its own: a release would not mend a lock that a
            # thread was just waiting for. It is in no type stub.
            lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_hold_all, after_in_parent=_let_go, after_in_child=_begin_anew)
