"""The calls that run at the same time in a process: what only shows inside a change."""

import asyncio
import gc
import threading
from collections import OrderedDict
from typing import Any

from langchain_quota.middleware._semaphores import Semaphore, Slot

PATIENCE = 60.0
"""Seconds after which something is stuck."""


def test_a_call_left_behind_ends_in_the_midst_of_a_change() -> None:
    """Garbage may be collected while the lock is held: that does not stop the thread for ever."""
    semaphore = Semaphore()

    async def call() -> None:
        slot = await semaphore.atake(2, 0)
        try:
            await asyncio.Event().wait()
        finally:
            slot.give_back()

    class Collecting(OrderedDict[Slot, None]):
        def __setitem__(self, key: Any, value: None) -> None:
            assert semaphore._lock.locked()
            gc.collect()
            super().__setitem__(key, value)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was left
    left = [loop.create_task(call())]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    left.clear()
    assert semaphore.running == 1
    semaphore._line = Collecting()
    taken: list[Slot] = []
    thread = threading.Thread(target=lambda: taken.append(semaphore.take(2, 0)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert [each.taken for each in taken] == [True]
    assert semaphore.running == 1
