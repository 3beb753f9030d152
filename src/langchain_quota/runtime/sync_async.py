"""One body for the sync and the async variant of a method, and locks that survive a fork."""

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
    """Wrap a sync function so that it can be awaited; it never suspends."""

    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    return called


def run_sync(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError(
        "this sync method needs an event loop: use its async variant, such as `ainvoke`"
    )


async def wait_for(mode: Mode, seconds: float) -> None:
    """Wait for some seconds, in the event loop or in this thread."""
    if mode:
        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251 - in sync mode


# A forked child has a copy of every lock, but only one thread: a lock that another thread held is
# never released in the child. So a fork first waits until the other threads have finished their
# changes, and in the child every lock is free.

_PATIENCE = 1.0
"""How long a fork waits for a lock, in seconds."""

_locks: dict[ref[Any], None] = {}
"""All locks, in the order of their creation."""


_held = threading.local()
"""Its `locks` are those that a thread holds while it forks."""


def fork_safe_lock(kind: Callable[[], Any] = RLock) -> Any:
    """Return a lock that is free in a forked child, with no change that it guards half done."""
    # The code that holds the lock must not wait for anything. If it acquires another lock, that one
    # must be the older of the two, because a fork acquires the newest lock first. The garbage
    # collector may end an abandoned call in the thread that holds the lock, and this acquires
    # locks, too. So by default a thread can acquire the lock again.
    lock = kind()
    _locks[ref(lock, _forget)] = None
    return lock


# The default outlives the module's names when the interpreter ends.
def _forget(gone: ref[Any], locks: dict[ref[Any], None] = _locks) -> None:
    locks.pop(gone, None)


def _acquire_all() -> None:
    _held.locks = []
    for reference in reversed(list(_locks)):
        lock = reference()
        if lock is not None and lock.acquire(timeout=_PATIENCE):
            _held.locks.append(lock)


def _release_all() -> None:
    while _held.locks:
        _held.locks.pop().release()


def _reset_locks_in_child() -> None:
    _held.locks.clear()
    for reference in list(_locks):
        lock = reference()
        if lock is not None:
            compat.reset_lock(lock)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(
        before=_acquire_all, after_in_parent=_release_all, after_in_child=_reset_locks_in_child
    )
