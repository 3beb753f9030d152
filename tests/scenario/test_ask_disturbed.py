"""Limits that ask a person: what comes between the answer and the calls, whichever process goes on.

A process is killed, two are given the answer at once, or the store's reply to the grant is lost.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import MemoryStore, Quota, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.errors import QuotaStoreError
from tests.scene import ANN, Scene, asking, texts
from tests.stores import DAY
from tests.telemetry import Signals

GRANT = 3
QUOTAS = [Quota(2, per="user_id", window=DAY)]
LIMIT = ToolCallLimit("search", quotas=QUOTAS, exit_behavior="ask", grant=GRANT)
APPROVE: dict[str, Any] = {"decisions": [{"type": "approve", "by": "bo", "message": "4711"}]}

Moment = Literal["grants", "granted", "checked"]
"""Before a process grants, after that, or when the calls have been checked after that."""


class Killed(BaseException):
    """The process is dead: nobody handles it."""


class DisturbedStore(MemoryStore):
    """A store at which something comes between, at one moment."""

    at: Moment | None = None
    happens: Callable[[], Any]
    has_granted = False

    async def agrant(self, *args: Any, **options: Any) -> Any:
        await self._reach("grants")
        found = await super().agrant(*args, **options)
        self.has_granted = True
        await self._reach("granted")
        return found

    async def aacquire(self, request: AcquireRequest) -> AcquireResult:
        result = await super().aacquire(request)
        if self.has_granted:
            await self._reach("checked")
        return result

    async def _reach(self, moment: Moment) -> None:
        if moment == self.at:
            self.at = None
            if (waits := self.happens()) is not None:
                await waits


class Shared:
    """A user's day, whose run waits for an answer, and processes that go on with it."""

    def __init__(self, signals: Signals) -> None:
        self.signals, self.store, self.saver = signals, DisturbedStore(), InMemorySaver()
        self.ran: list[str] = []

    def process(self, at: Moment | None = None, happens: Any = None) -> Scene:
        """An agent that knows nothing of what others have in their memory."""
        self.store.at, self.store.happens = at, happens
        options: Any = {"context": ANN, "ran": self.ran, "checkpointer": self.saver}
        script = asking("search", "search", "search")
        return Scene(self.signals, script, [LIMIT], store=self.store, **options)

    async def check_end(self, again: Any = None) -> None:
        """The run goes on in another process, to its end, and all of it is counted once."""
        assert self.ran == []
        scene = self.process()
        result = await (scene.go_on() if again is None else scene.resume(again))
        assert texts(result) == ["search ran"] * 3
        assert len(self.ran) == 3
        assert self.counted() == ([GRANT], 3)

    def counted(self) -> tuple[list[int], int]:
        """What is granted, and what is used."""
        granted = [each.amount for each in self.store.grants()]
        assert {(each.by, each.reason) for each in self.store.grants()} <= {("bo", "4711")}
        return granted, sum(each.used for each in self.store.usages())


@pytest.fixture
async def shared(signals: Signals) -> Shared:
    """A run that waits for an answer."""
    shared = Shared(signals)
    result = await shared.process().play()
    (asked,) = result["__interrupt__"]
    assert asked.value["action_requests"][0]["args"] == {"tool:search": GRANT}
    return shared


@pytest.mark.parametrize(
    ("at", "again"), [("granted", APPROVE), ("checked", APPROVE), ("checked", None)]
)
async def test_killed_after_the_answer(shared: Shared, at: Moment, again: Any) -> None:
    """A process that ends between grant and call has granted once, and loses no call."""

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed):
        await shared.process(at, kill).resume(APPROVE)
    await shared.check_end(again)


@pytest.mark.parametrize("at", ["grants", "granted"])
async def test_answered_while_the_store_is_down(shared: Shared, at: Moment) -> None:
    """An answer is kept when the store has not answered, heard of the grant or not."""

    def fail() -> None:
        raise QuotaStoreError("the store is down")

    with pytest.raises(QuotaStoreError, match="when the store answers; the answer is kept"):
        await shared.process(at, fail).resume(APPROVE)
    await shared.check_end()


@pytest.mark.parametrize("at", ["grants", "checked"])
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
    assert shared.counted() == ([GRANT], 3)
