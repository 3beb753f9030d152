"""Quotas that are kept in a store: its clock, what it counts, how it fails."""

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from cProfile import Profile
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest

from langchain_quota import QuotaMiddleware
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits import Limit
from langchain_quota.runtime import queues
from langchain_quota.runtime.queues import Waiter
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.memory import MemoryStore
from tests.scene import PATIENCE, until
from tests.telemetry import Signals

DAY = timedelta(days=1)
NOON = 1_767_268_800.0
"""2026-01-01T12:00:00Z."""
TODAY = "86400:20454"
"""The window of that day, as it stands in keys."""
RESETS = "2026-01-02T00:00:00Z"
"""When that window ends."""


@dataclass
class Clock:
    """The time, as a test sets it."""

    now: float = NOON

    def __call__(self) -> float:
        return self.now


class Passing(Clock):
    """A clock that passes while calls wait for room or their start, once they may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.may = threading.Event()
        self.may.set()
        patch_pauses(patch, self.wait)

    async def wait(self, form: str, seconds: float) -> None:
        await until(self.may.is_set) if form else self.may.wait(PATIENCE)
        self.now += seconds


def patch_pauses(
    patch: pytest.MonkeyPatch, wait: Callable[[str, float], Awaitable[object]]
) -> None:
    """Have calls wait in another way, but for those that wait behind others or for a slot."""
    sleep = Waiter.sleep

    def is_kept(waiter: Waiter) -> bool:
        for each in queues._queues.values():
            standing = each._queues.get(waiter.queue, {})
            if waiter.number in standing:
                return min(standing) < waiter.number or each._taken[waiter.queue] > 0
        return False

    async def pause(waiter: Waiter, seconds: float) -> None:
        if seconds > queues.LOOKS_AGAIN and is_kept(waiter):
            await sleep(waiter, seconds)
        else:
            await wait("async" if isinstance(waiter._woken, asyncio.Event) else "", seconds)

    patch.setattr(Waiter, "sleep", pause)


def quota(
    signals: Signals,
    *limits: Limit,
    store: Any,
    clock: Callable[[], float] | None = None,
    **options: Any,
) -> QuotaMiddleware[Any, Any]:
    """A middleware that asks a store, at a time that does not pass by itself."""
    store.clock = clock or Clock()
    return QuotaMiddleware(limits, store=store, telemetry=signals.telemetry, **options)


def counts(store: Any) -> dict[str, int]:
    """What a store counts beside runs, by key; what was taken back to nothing is left out."""
    used = {each.key: each.used for each in store.usages() if each.used}
    return {key: count for key, count in used.items() if key.split(":")[1:2] != ["run"]}


def run_counts(store: Any, counter: str) -> list[int]:
    """What a store counts of each run, sorted; what was taken back to nothing is left out."""
    return sorted(each.used for each in store.usages(f"{counter}:run:*") if each.used)


def calls_made(function: Callable[[], object]) -> int:
    """How many calls a function makes in this thread, of Python's functions and of C's."""
    profile = Profile()
    gc.disable()  # when it runs depends on earlier tests, and libraries have callbacks for it
    try:
        profile.runcall(function)
    finally:
        gc.enable()
    return sum(each.callcount for each in profile.getstats())


class UnsureStore(MemoryStore):
    """A store of which one reply is lost, or all while it is down."""

    down, lost = False, 0
    """Whether it is down, and which of the replies that follow is lost."""

    happens: Any = Mock(side_effect=QuotaStoreError("no reply"))  # in place of such a reply

    async def _reply(self, reply: Any) -> Any:
        self.lost -= 1
        if self.down or self.lost == 0:
            await self.happens()
        return reply

    async def aacquire(self, request: Any) -> Any:
        return await self._reply(self.acquire(request))

    async def _run(self, *given: Any, **options: Any) -> Any:
        return await self._reply(await super()._run(*given, **options))


class FickleStore:
    """A store that fails while it is down; whether it has heard of what fails is up to the test."""

    def __init__(self, store: MemoryStore) -> None:
        self.kept = store
        self.clock = store.clock
        self.down = False
        self.hears = False
        self.asked: list[AcquireRequest] = []

    def usages(self, pattern: str = "*") -> list[QuotaUsage]:
        return self.kept.usages(pattern)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        self.asked.append(request)
        if self.down and self.hears:
            self.kept.acquire(request)
        self._fail()
        return self.kept.acquire(request)

    def peek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        self._fail()
        return self.kept.peek(keys)

    def reset(self, keys: Sequence[str]) -> None:
        self._fail()
        self.kept.reset(keys)

    async def apeek(self, keys: Sequence[str]) -> tuple[QuotaUsage | None, ...]:
        return self.peek(keys)

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        return self.acquire(request)

    async def areset(self, keys: Sequence[str]) -> None:
        self.reset(keys)

    def _fail(self) -> None:
        if self.down:
            raise QuotaStoreError("the store is down")


class DistantStore(FickleStore):
    """A store whose requests and answers are on their way for a while."""

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        await asyncio.sleep(0.002)
        result = self.acquire(request)
        await asyncio.sleep(0.002)
        return result


class SlowStore(FickleStore):
    """A store whose first async request does not come back."""

    def __init__(self, store: MemoryStore, *, heard: bool) -> None:
        super().__init__(store)
        self.heard = heard
        self.reached = asyncio.Event()

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        self.asked.append(request)
        if self.reached.is_set():
            return self.kept.acquire(request)
        if self.heard:
            self.kept.acquire(request)
        self.reached.set()
        await asyncio.Event().wait()
        raise AssertionError("never")
