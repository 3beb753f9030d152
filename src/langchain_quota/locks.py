"""Locks that a fork leaves neither held nor with half a change behind them.

A forked child has a copy of every lock, but only the thread that forked: what another thread held,
nobody in the child lets go of. So a fork first waits until the other threads have finished what
they change, and in the child every lock is free.
"""

import os
import threading
from threading import Lock
from weakref import ref

_PATIENCE = 1.0
"""How long, in seconds, a fork waits for a lock; in vain, if the thread that forks holds it."""

_locks: dict[ref[Lock], None] = {}
"""All locks, in the order in which they were made."""


class _Held(threading.local):
    """The locks that a thread holds while it forks."""

    def __init__(self) -> None:
        self.locks: list[Lock] = []


_held = _Held()


def fork_safe_lock() -> Lock:
    """A lock that is free in a forked child, with what it guards as between two changes.

    Whoever holds it does nothing that waits. A lock under which another one is taken is made after
    that one: a fork takes the newest first.
    """
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
