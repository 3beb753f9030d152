"""Limits that ask a person: runs that are resumed elsewhere, with a real Redis that fails."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any, Literal

import pytest
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from langchain_quota import Quota, RedisStore, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores.grants import Grant
from tests.scene import ANN, Scene, asking, texts
from tests.server.redis import RedisServer
from tests.telemetry import Signals

GRANT = 3
LIMIT = ToolCallLimit(
    "search",
    quotas=[Quota(2, per="user_id", window=timedelta(days=1))],
    exit_behavior="ask",
    grant=GRANT,
)
APPROVE: dict[str, Any] = {"decisions": [{"type": "approve"}]}

Moment = Literal["grants", "granted", "judged"]
"""Before a process grants, after that, or when the calls have been checked after that."""


class Killed(BaseException):
    """The process is dead: nobody handles it."""


class DisturbedStore(RedisStore):
    """A store at which something comes between, at one moment."""

    at: Moment | None = None
    happens: Callable[[], Any]
    _has_granted = False

    async def agrant(self, *args: Any, **options: Any) -> Grant:
        await self._reach("grants")
        found = await super().agrant(*args, **options)
        self._has_granted = True
        await self._reach("granted")
        return found

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        result = await super().aacquire(request)
        if self._has_granted:
            await self._reach("judged")
        return result

    async def _reach(self, moment: Moment) -> None:
        if moment == self.at:
            self.at = None
            if (waits := self.happens()) is not None:
                await waits


class Shared:
    """A user's day in Redis, and processes that use it, with their threads in SQLite."""

    def __init__(self, signals: Signals, server: RedisServer, saver: AsyncSqliteSaver) -> None:
        self.signals, self.server, self.saver = signals, server, saver
        self.prefix, self.ran = server.prefix(), list[str]()
        self.look = RedisStore(server.url, prefix=self.prefix, timeout=30)

    def process(
        self, at: Moment | None = None, happens: Any = None, *, timeout: float = 30, **options: Any
    ) -> Scene:
        """An agent that knows nothing of what others have in their memory."""
        store = DisturbedStore(self.server.url, prefix=self.prefix, timeout=timeout)
        store.at, store.happens = at, happens
        options = {"context": ANN, "ran": self.ran, "checkpointer": self.saver, **options}
        script = asking("search", "search", "search")
        return Scene(self.signals, script, [LIMIT], store=store, **options)

    @property
    def used(self) -> int:
        return sum(each.used for each in self.look.usages())

    @property
    def granted(self) -> list[int]:
        return [each.amount for each in self.look.grants()]


@pytest.fixture
async def shared(
    signals: Signals, redis_server: RedisServer, sqlite_saver: AsyncSqliteSaver
) -> AsyncIterator[Shared]:
    """A count that no other test has, and a run that waits for an answer at it."""
    shared = Shared(signals, redis_server, sqlite_saver)
    result = await shared.process().play()
    (asked,) = result["__interrupt__"]
    assert asked.value["action_requests"][0]["args"] == {"tool:search": GRANT}
    yield shared
    redis_server.resume()


@pytest.mark.parametrize(
    ("at", "again"), [("granted", APPROVE), ("judged", APPROVE), ("judged", None)]
)
async def test_killed_after_the_answer(shared: Shared, at: Moment, again: Any) -> None:
    """A process that ends between grant and call has granted once, and loses no call."""

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed):
        await shared.process(at, kill).resume(APPROVE)
    assert shared.ran == []

    scene = shared.process()
    result = await (scene.go_on() if again is None else scene.resume(again))
    assert "__interrupt__" not in result
    assert texts(result) == ["search ran"] * 3
    assert (shared.granted, shared.used) == ([GRANT], len(shared.ran)) == ([GRANT], 3)


@pytest.mark.parametrize("at", ["grants", "judged"])
async def test_resumed_twice_at_once(shared: Shared, at: Moment) -> None:
    """A question that two processes are resumed with at once grants once, and is charged once."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await go.wait()

    first = asyncio.create_task(shared.process(at, wait).resume(APPROVE))
    await asyncio.wait_for(reached.wait(), 60)
    await shared.process().resume(APPROVE)
    go.set()
    await first

    # LangGraph may run the step in both processes.
    assert len(shared.ran) >= 3
    assert (shared.granted, shared.used) == ([GRANT], 3)


@pytest.mark.parametrize("at", [None, "grants", "granted"])
async def test_answered_while_the_store_is_down(shared: Shared, at: Moment | None) -> None:
    """An answer that comes while the store is down is kept: the run goes on without a new one.

    What the server hears of it after its client has given up is done once.
    """
    if at is None:
        shared.server.pause()
    scene = shared.process(at, shared.server.pause, timeout=0.2)
    with pytest.raises(QuotaStoreError, match="when the store answers; the answer is kept"):
        await scene.resume(APPROVE)
    assert shared.ran == []

    shared.server.resume()
    result = await shared.process().go_on()
    assert texts(result) == ["search ran"] * 3
    assert (shared.granted, shared.used) == ([GRANT], len(shared.ran)) == ([GRANT], 3)
