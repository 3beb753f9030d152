"""One body for the sync and the async form of a method, and locks that outlive a fork."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from threading import RLock
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import ref

from langchain_quota.runtime import compat

P = ParamSpec("P")
T = TypeVar("T")

Mode = Literal["", "a"]
"""The variant of a function to call: "" for sync, "a" for async."""


async def call_variant(
    mode: Mode,
    function: Callable[P, T],
    async_function: Callable[P, Awaitable[T]],
    *args: P.args,
    **options: P.kwargs,
) -> T:
    """Call `function`, or await `async_function` in async mode."""
    if mode:
        return await async_function(*args, **options)
    return function(*args, **options)


def as_async(call: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """A sync function that can be awaited; to await it never waits."""

    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    return called


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives that waits for nothing: in the sync form."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        given: T = done.value
        return given
    coroutine.close()
    raise RuntimeError("the sync form of a method waits for an event loop: call the async form")


async def wait_for(mode: Mode, seconds: float) -> None:
    """Wait for some seconds, in the event loop or in this thread."""
    if mode:
        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251 - in the sync form


# A forked child has a copy of every lock, but only the thread that forked: a lock that another
# thread held is never released in the child. So a fork first waits until the other threads have
# finished their changes, and in the child every lock is free.

_PATIENCE = 1.0
"""How long a fork waits for a lock, in seconds."""

_locks: dict[ref[Any], None] = {}
"""All locks, in the order in which they were made."""


class _Held(threading.local):
    """The locks that a thread holds while it forks."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def fork_safe_lock(kind: Callable[[], Any] = RLock) -> Any:
    """A lock that is free in a forked child, where no change that it guards is half done."""
    # The code that holds it must not wait for anything. If it takes another lock, that one must be
    # the older of the two: a fork takes the newest lock first. The garbage collector may end an
    # abandoned call in the thread that holds the lock, and an end takes locks, too: so by default
    # a thread that has the lock gets it again.
    lock = kind()
    _locks[ref(lock, _forget)] = None
    return lock


# The default outlives the module's names when the interpreter ends.
def _forget(gone: ref[Any], locks: dict[ref[Any], None] = _locks) -> None:
    locks.pop(gone, None)


def _hold_all() -> None:
    for each in reversed(list(_locks)):
        lock = each()
        if lock is not None and lock.acquire(timeout=_PATIENCE):
            _held.locks.append(lock)


def _let_go() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _reset_locks_in_child() -> None:
    _held.locks.clear()
    for each in list(_locks):
        lock = each()
        if lock is not None:
            compat.reset_lock(lock)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(
        before=_hold_all, after_in_parent=_let_go, after_in_child=_reset_locks_in_child
    )
