"""Sync and async variants of a method, values of event loops and keys, and fork-safe locks."""

import os
import threading
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable
from threading import RLock
from typing import Any, Generic, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

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


_thread = threading.local()
"""Its `sync_in` is the event loop, or `None`, in which the thread runs a coroutine in sync mode."""


def run_sync(coroutine: Coroutine[object, None, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    before = getattr(_thread, "sync_in", _thread)
    _thread.sync_in = _running_loop()
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        _thread.sync_in = before
    coroutine.close()
    raise RuntimeError(
        "this sync method needs an event loop: use its async variant, such as `ainvoke`"
    )


def _running_loop() -> AbstractEventLoop | None:
    try:
        return get_running_loop()
    except RuntimeError:
        return None


def current_mode() -> Mode:
    """Return the mode of the running code: sync in `run_sync`, but not in an event loop in that."""
    return "" if getattr(_thread, "sync_in", _thread) is _running_loop() else "a"


def pop_closed_loops(values: WeakKeyDictionary[AbstractEventLoop, T]) -> list[T]:
    """Remove and return the values of closed event loops: values hold their loops."""
    loops = [loop for reference in values.keyrefs() if (loop := reference()) is not None]
    return [values.pop(loop) for loop in loops if loop.is_closed() and loop in values]


class PerLoop(Generic[T]):
    """One value for each event loop, closed when the loop ends.

    A loop that is closed without `shutdown_asyncgens` closes no value: `abandon` gets it later.
    """

    def __init__(
        self,
        make: Callable[[], T],
        close: Callable[[T], Awaitable[None]],
        abandon: Callable[[T], object] = id,
    ) -> None:
        self._make = make
        self._close = close
        self._abandon = abandon
        self._made: WeakKeyDictionary[AbstractEventLoop, tuple[T, AsyncGenerator[T]]] = (
            WeakKeyDictionary()
        )

    async def get(self) -> T:
        """Return the value of the running loop; make it if there is none."""
        loop = get_running_loop()
        if loop not in self._made:
            for value, _ in pop_closed_loops(self._made):
                self._abandon(value)
            making = self._kept(loop)
            self._made[loop] = await anext(making), making
        return self._made[loop][0]

    async def close(self) -> None:
        """Close the value of the running loop, if there is one."""
        value = self._made.get(get_running_loop())
        if value is not None:
            await value[1].aclose()

    async def _kept(self, loop: AbstractEventLoop) -> AsyncGenerator[T]:
        # A loop ends all generators before it ends.
        value = self._make()
        try:
            yield value
        finally:
            self._made.pop(loop, None)
            await self._close(value)


def newest_dicts(most: int) -> Callable[[Hashable], dict[str, Any]]:
    """Return a function that returns one dict for each key, and forgets the oldest of many."""
    dicts: dict[Hashable, dict[str, Any]] = {}

    def of(key: Hashable) -> dict[str, Any]:
        # In one step, so that threads which ask at the same moment share the dict.
        value = dicts.setdefault(key, {})
        while len(dicts) > most:
            dicts.pop(next(iter(dicts)), None)
        return value

    return of


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
