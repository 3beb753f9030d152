"""The calls that run at the same time in a process: never too many, in order, and never stuck."""

import asyncio
import gc
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from langchain_quota.middleware._slots import Slot, Slots
from tests.calls import calls_made

CAP = 3
CHANCE = random.Random(19)  # noqa: S311 - no secret
CALLERS = 50
PATIENCE = 60.0
"""Seconds after which something is stuck."""


class Witness:
    """Counts who runs at the same time, and remembers the most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = self.most = self.ran = 0

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1
            self.ran += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.running -= 1


async def run(slots: Slots, witness: Witness, *, seconds: float = PATIENCE) -> bool:
    """One call; whether it ran."""
    slot = await slots.atake(("browser",), {"browser": CAP}, seconds)
    try:
        if slot.taken:
            with witness:
                await asyncio.sleep(CHANCE.uniform(0, 0.002))
        return slot.taken
    finally:
        slots.give_back(slot)


def run_in_thread(slots: Slots, witness: Witness) -> bool:
    """One sync call; whether it ran."""
    slot = slots.take(("browser",), {"browser": CAP}, PATIENCE)
    try:
        if slot.taken:
            with witness:
                time.sleep(CHANCE.uniform(0, 0.002))
        return slot.taken
    finally:
        slots.give_back(slot)


def test_threads_and_loops_share_a_cap() -> None:
    """Sync calls of 20 threads and async calls of 3 event loops: never more than 3, all run."""
    slots, witness = Slots(), Witness()

    async def loop() -> list[bool]:
        return await asyncio.gather(*(run(slots, witness) for _ in range(CALLERS)))

    with ThreadPoolExecutor(23) as threads:
        loops = [threads.submit(asyncio.run, loop()) for _ in range(3)]
        calls = [threads.submit(run_in_thread, slots, witness) for _ in range(CALLERS)]
        assert all(each.result(PATIENCE) for each in calls)
        assert all(all(each.result(PATIENCE)) for each in loops)
    assert (witness.most, witness.ran) == (CAP, 4 * CALLERS)
    assert slots.running("browser") == 0


@pytest.mark.parametrize("seed", range(5))
async def test_cancelled_calls_leave_no_slot_taken(seed: int) -> None:
    """Of 50 calls some are cancelled while they wait or run, some give up: the others all run.

    Some are cancelled in the very step in which they get their slot.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    slots, witness = Slots(), Witness()
    tasks = [
        asyncio.create_task(run(slots, witness, seconds=chance.choice([0, 0.005, PATIENCE])))
        for _ in range(CALLERS)
    ]
    for task in chance.sample(tasks, CALLERS // 2):
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(chance.choice([0, 0.001]))
        task.cancel()
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait(tasks)
    assert 0 < witness.most <= CAP
    assert slots.running("browser") == 0
    assert await run(slots, witness, seconds=0)


async def test_who_comes_first_is_served_first() -> None:
    """Calls that wait get their slot in the order in which they came."""
    slots = Slots()
    order: list[int] = []
    first = await slots.atake(("browser",), {"browser": 1}, 0)

    async def call(number: int) -> None:
        slot = await slots.atake(("browser",), {"browser": 1}, PATIENCE)
        order.append(number)
        slots.give_back(slot)

    tasks = [asyncio.create_task(call(number)) for number in range(10)]
    await asyncio.sleep(0)
    slots.give_back(first)
    await asyncio.gather(*tasks)
    assert order == [*range(10)]


async def test_a_call_takes_all_that_it_needs_or_nothing() -> None:
    """While a call waits for one count, it is not in the other: who needs only that runs."""
    slots = Slots()
    caps = {"browser": 1, "all": 2}
    first = await slots.atake(("browser", "all"), caps, 0)
    waiting = asyncio.create_task(slots.atake(("browser", "all"), caps, PATIENCE))
    await asyncio.sleep(0)
    other = await slots.atake(("all",), {"all": 2}, 0)
    assert other.taken
    slots.give_back(first)
    assert (await waiting).taken


async def test_a_lower_cap_is_not_overtaken() -> None:
    """A call that waits under a low cap keeps those behind it waiting, whatever their cap is."""
    slots = Slots()
    first = await slots.atake(("browser",), {"browser": 1}, 0)
    waiting = asyncio.create_task(slots.atake(("browser",), {"browser": 1}, PATIENCE))
    await asyncio.sleep(0)
    assert not (await slots.atake(("browser",), {"browser": 2}, 0)).taken
    slots.give_back(first)
    assert (await waiting).taken


async def test_counts_without_a_cap_are_only_counted() -> None:
    """A call that no enforced cap holds runs at once, and is told how many run."""
    slots = Slots()
    await slots.atake(("browser",), {}, 0)
    second = await slots.atake(("browser",), {}, 0)
    assert second.taken
    assert second.found == {"browser": 1}


def test_a_slot_goes_on_from_a_loop_that_is_closed() -> None:
    """Calls that wait in a loop that is gone keep nobody behind them from running, however many."""
    slots = Slots()
    first = slots.take(("browser",), {"browser": 1}, 0)
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was left
    waits = [slots.atake(("browser",), {"browser": 1}, PATIENCE) for _ in range(2000)]
    left = [loop.create_task(each) for each in waits]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    slots.give_back(first)
    assert slots.take(("browser",), {"browser": 1}, 0).taken
    assert not any(each.done() for each in left)


def test_a_call_left_behind_ends_in_the_midst_of_a_change() -> None:
    """Garbage may be collected while the lock is held: that does not stop the thread for ever."""
    slots = Slots()

    async def call() -> None:
        slot = await slots.atake(("browser",), {"browser": 2}, 0)
        try:
            await asyncio.Event().wait()
        finally:
            slots.give_back(slot)

    class Collecting(dict[str, int]):
        def items(self) -> Any:
            if slots._lock.locked():
                gc.collect()
            return super().items()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was left
    left = [loop.create_task(call())]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    left.clear()
    assert slots.running("browser") == 1
    taken: list[Slot] = []
    caps = Collecting(browser=2)
    thread = threading.Thread(
        target=lambda: taken.append(slots.take(("browser",), caps, 0)), daemon=True
    )
    thread.start()
    thread.join(PATIENCE)
    assert [each.taken for each in taken] == [True]
    assert slots.running("browser") == 1


def test_a_long_line_costs_no_more_than_a_short_one() -> None:
    """What a call does that comes, and one that ends, does not grow with those that wait."""

    def work(waiting: int) -> int:
        slots, caps = Slots(), {"browser": 1, "all": 2}
        first = slots.take(("browser", "all"), caps, 0)
        for _ in range(waiting):
            slots._ask(Slot(("browser", "all"), caps, int))

        def come_and_go() -> None:
            slots.take(("browser", "all"), caps, 0)
            slots.give_back(first)

        return calls_made(come_and_go)

    assert work(1000) == work(10)


def test_a_wait_may_be_longer_than_a_thread_can_wait() -> None:
    """A call with such a `wait` waits as one with a shorter one does."""
    slots = Slots()
    first = slots.take(("browser",), {"browser": 1}, 0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(slots.take, ("browser",), {"browser": 1}, 1e300)
        while not (slots._lines or waiting.done()):
            time.sleep(0.001)
        slots.give_back(first)
        assert waiting.result(PATIENCE).taken


def test_an_interrupted_thread_leaves_no_slot_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync call that is interrupted while it waits blocks no other call."""
    slots = Slots()
    first = slots.take(("browser",), {"browser": 1}, 0)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Event, "wait", interrupted)
        slots.take(("browser",), {"browser": 1}, PATIENCE)
    slots.give_back(first)
    assert slots.take(("browser",), {"browser": 1}, 0).taken


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_begins_anew() -> None:
    """What runs in the parent does not run in the child, and is not given back there."""
    slots = Slots()
    running = slots.take(("browser",), {"browser": 1}, 0)
    child = os.fork()
    if not child:
        own = slots.take(("browser",), {"browser": 1}, 0)
        slots.give_back(running)
        os._exit(0 if own.taken and slots.running("browser") == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert slots.running("browser") == 1
