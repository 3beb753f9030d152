"""Sends the corrections that wait for a store, when no next request takes them along."""

import asyncio
import atexit
import threading
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

_FIRST, _LONGEST = 1.0, 30.0
"""How long a sender waits before it tries for the first time, and at most, in seconds."""


class Corrections(Protocol):
    """Corrections that wait, and who sends them."""

    def waits(self) -> bool:
        """Whether a correction waits."""
        ...

    def send_waiting(self) -> None:
        """Send all of them."""
        ...

    async def asend_waiting(self) -> None:
        """Send all of them."""
        ...


_at_exit: WeakSet[Corrections] = WeakSet()
_tasks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Corrections, asyncio.Task[None]]] = (
    WeakKeyDictionary()
)
_threads: WeakKeyDictionary[Corrections, threading.Thread] = WeakKeyDictionary()


def send_later(corrections: Corrections) -> None:
    """Try until nothing waits, and a last time when the event loop or the process ends.

    A running event loop has a task for it. Where there is none, or where the store has no async
    form, a thread does it.
    """
    _at_exit.add(corrections)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        _begin_thread(corrections)
        return
    tasks = _tasks.setdefault(loop, {})
    if corrections not in tasks:
        task = tasks[corrections] = loop.create_task(_in_loop(corrections))
        task.add_done_callback(lambda _: tasks.pop(corrections, None))


def _begin_thread(corrections: Corrections) -> None:
    running = _threads.get(corrections)
    # A forked child has the object of a thread that does not run there.
    if running is None or not running.is_alive():
        _threads[corrections] = thread = threading.Thread(
            target=_in_thread,
            args=(corrections,),
            name="langchain-quota-corrections",
            daemon=True,
        )
        thread.start()


def _in_thread(corrections: Corrections) -> None:
    wait, until = _FIRST, threading.Event()
    while corrections.waits():
        until.wait(wait)
        wait = min(2 * wait, _LONGEST)
        try:
            corrections.send_waiting()
        except TypeError:
            return  # an async client: the next async request takes the corrections along


async def _in_loop(corrections: Corrections) -> None:
    wait = _FIRST
    try:
        while corrections.waits():
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST)
            await corrections.asend_waiting()
    except asyncio.CancelledError:
        await corrections.asend_waiting()
        raise
    except TypeError:
        _begin_thread(corrections)  # a sync client


@atexit.register
def _finish() -> None:
    for each in list(_at_exit):
        if each.waits():
            try:
                each.send_waiting()
            except TypeError:
                continue  # an async client: its event loop has ended, after a last try
