"""Sends the corrections that wait for the store, when no next request takes them along."""

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable, Sized
from weakref import WeakKeyDictionary, WeakSet

_FIRST, _LONGEST = 1.0, 30.0
"""How long a sender waits before it tries for the first time, and at most, in seconds."""

_at_exit: "WeakSet[LateCorrections]" = WeakSet()


class LateCorrections:
    """Tries until nothing waits, and a last time when the event loop or the process ends.

    A running event loop has a task for it. Where there is none, or where the store has no async
    form, a thread does it.
    """

    def __init__(
        self, waiting: Sized, send: Callable[[], None], asend: Callable[[], Awaitable[None]]
    ) -> None:
        self._waiting, self._send, self._asend = waiting, send, asend
        self._tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            WeakKeyDictionary()
        )
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Send what waits, soon."""
        _at_exit.add(self)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._begin_thread()
            return
        task = self._tasks.get(loop)
        if task is None or task.done():
            self._tasks[loop] = loop.create_task(self._in_loop())

    def finish(self) -> None:
        """Try a last time, in a process that ends."""
        if self._waiting:
            try:
                self._send()
            except TypeError:
                return  # an async client: its event loop has ended, after a last try

    def _begin_thread(self) -> None:
        # A forked child has the object of a thread that does not run there.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._in_thread, name="langchain-quota-corrections", daemon=True
            )
            self._thread.start()

    def _in_thread(self) -> None:
        wait, until = _FIRST, threading.Event()
        while self._waiting:
            until.wait(wait)
            wait = min(2 * wait, _LONGEST)
            try:
                self._send()
            except TypeError:
                return  # an async client: the next async request takes the corrections along

    async def _in_loop(self) -> None:
        wait = _FIRST
        try:
            while self._waiting:
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST)
                await self._asend()
        except asyncio.CancelledError:
            await self._asend()
            raise
        except TypeError:
            self._begin_thread()


@atexit.register
def _finish() -> None:
    for each in list(_at_exit):
        each.finish()
