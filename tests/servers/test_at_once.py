"""Caps on calls at once across processes: a lease in Redis for each call that runs."""

import asyncio
import fcntl
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from langchain_quota import QuotaMiddleware, RedisStore, Telemetry, ToolCallLimit
from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.middleware import _leases as leases
from langchain_quota.middleware._leases import SLOT_LEASE
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, both_forms
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer, time_from
from tests.signals import Signals

CAP = 3
PROCESSES = 4
CALLERS = 12
"""How many calls a process makes at once."""
ENOUGH = 150
"""How many calls have run when the test has seen enough."""
KEY = "browser:at_once:"
PATIENCE = 120


@pytest.fixture
def context() -> ForkServerContext:
    """What starts processes."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def agent_of(store: RedisStore, calls: int, tool: Any, **options: Any) -> Any:
    """An agent whose model makes calls at once, in a run of its own."""
    limit = ToolCallLimit(
        "browser", **{"at_once": CAP, "wait": PATIENCE, **options.pop("limit", {})}
    )
    options.setdefault("telemetry", Telemetry(registry=CollectorRegistry()))
    quota = QuotaMiddleware([limit], store=store, **options)
    model = ScriptedChatModel(script=[["browser"] * calls, "done"])
    return create_agent(model, [tool], middleware=[quota])


ASKED = {"messages": [("user", "hi")]}


async def _see() -> str:
    return "seen"


seen = StructuredTool.from_function(coroutine=_see, name="browser", description="See.")


def worker(url: str, prefix: str, diary: str, calls: int) -> None:
    """A process whose agents' tools take one of as many locks as calls may run at once.

    The kernel frees the lock of a process that dies. A tool that finds none says so in the diary.
    """
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def browser() -> str:
        with ExitStack() as stack:
            for number in range(CAP):
                lock = stack.enter_context(Path(f"{diary}.{number}").open("w"))  # noqa: ASYNC230
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
            else:
                os.write(written, b"over\n")
            await asyncio.sleep(random.uniform(0, 0.02))  # noqa: S311 - no secret
            os.write(written, b"ran\n")
        return "seen"

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        while True:
            running = asyncio.ensure_future(agent_of(store, calls, tool).ainvoke(ASKED))
            if random.random() < 0.3:  # noqa: S311 - no secret
                await asyncio.sleep(random.uniform(0, 0.2))  # noqa: S311 - no secret
                running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(work())


def test_processes_share_a_cap(
    redis_server: RedisServer, context: ForkServerContext, tmp_path: Path
) -> None:
    """In 4 processes, of which some are killed, and runs are cancelled: never more than 3 at once.

    What the killed ones held is free when the lease is over, and not before.
    """
    diary, prefix = tmp_path / "diary", redis_server.prefix()
    diary.touch()
    with ExitStack() as stack:

        def start(calls: int = CALLERS) -> Any:
            process = context.Process(
                target=worker, args=(redis_server.url, prefix, str(diary), calls), daemon=True
            )
            process.start()
            stack.callback(process.join, PATIENCE)
            stack.callback(process.kill)
            return process

        def ran() -> int:
            return diary.read_text().count("ran")

        # It never holds all places: else no call would run for a minute after its end.
        killed = start(CAP - 1)
        for _ in range(PROCESSES - 1):
            start()
        eventually(lambda: ran() > ENOUGH // 2, seconds=PATIENCE)
        killed.kill()
        start()
        eventually(lambda: ran() > ENOUGH, seconds=PATIENCE)
    assert "over" not in diary.read_text()
    with (
        closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as store,
        redis_server.client() as client,
    ):
        # All have been killed: some in a call.
        (left,) = store.peek([KEY])
        assert left is not None
        assert 0 <= left.used <= CAP
        with time_from("now"):
            client.set("now", int(time.time()) + SLOT_LEASE + 1)
            (left,) = store.peek([KEY])
            assert left is not None
            assert left.used == 0


def holder(url: str, prefix: str) -> None:
    """A process whose calls never end."""

    async def browser() -> None:
        await asyncio.Event().wait()

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    asyncio.run(agent_of(RedisStore(url, prefix=prefix, timeout=60), CAP, tool).ainvoke(ASKED))


async def test_a_killed_workers_slot_is_free_after_its_lease(
    redis_server: RedisServer, context: ForkServerContext
) -> None:
    """A call that waits for a place which nobody renews any more runs when the lease is over."""
    prefix = redis_server.prefix()
    begun = int(time.time())
    killed = context.Process(target=holder, args=(redis_server.url, prefix), daemon=True)
    killed.start()
    with time_from(f"{prefix}:now"), redis_server.client() as client:
        client.set(f"{prefix}:now", begun)
        async with open_store(redis_server, prefix) as store:
            await used_is(store, CAP)
            killed.kill()
            killed.join(PATIENCE)
            running = asyncio.create_task(agent_of(store, 1, seen).ainvoke(ASKED))
            client.set(f"{prefix}:now", begun + SLOT_LEASE - 1)
            await asyncio.sleep(0.3)
            assert not running.done()
            client.set(f"{prefix}:now", int(time.time()) + SLOT_LEASE + 1)
            result = await asyncio.wait_for(running, PATIENCE)
            assert result["messages"][2].content == "seen"


@asynccontextmanager
async def open_store(server: RedisServer, prefix: str) -> AsyncIterator[RedisStore]:
    """A store that is closed in the end, in both forms."""
    store = RedisStore(server.url, prefix=prefix, timeout=60)
    try:
        yield store
    finally:
        await store.aclose()
        store.close()


async def used_is(store: RedisStore, expected: int) -> None:
    """Wait until as many places are taken."""
    async with asyncio.timeout(PATIENCE):
        while await taken(store) != expected:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def taken(store: RedisStore) -> int:
    """How many places are taken."""
    (use,) = await store.apeek([KEY])
    return 0 if use is None else use.used


@both_forms
async def test_a_call_that_runs_long_keeps_its_place(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """The lease is renewed while the call runs, and nothing is held when it has ended."""
    monkeypatch.setattr(leases, "SLOT_LEASE", 1)
    prefix = redis_server.prefix()
    found: list[int] = []
    async with open_store(redis_server, prefix) as store:

        def look() -> str:
            (use,) = store.peek([KEY])
            found.append(0 if use is None else use.used)
            return "seen"

        def browser() -> str:
            for _ in range(6):
                time.sleep(0.5)
                look()
            return "seen"

        async def abrowser() -> str:
            for _ in range(6):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(look)
            return "seen"

        tool = StructuredTool.from_function(browser, abrowser, name="browser", description="See.")
        agent = agent_of(store, 1, tool)
        if form == "sync":
            await asyncio.to_thread(agent.invoke, ASKED)
        else:
            await agent.ainvoke(ASKED)
        assert found == [1] * 6
        (left,) = store.peek([KEY])
        assert left is not None
        assert left.used == 0


async def test_cancelled_calls_give_their_places_back(redis_server: RedisServer) -> None:
    """Runs are cancelled while their calls wait, ask the store or run: nothing is held then."""
    chance = random.Random(19)  # noqa: S311 - no secret

    async def browser() -> str:
        await asyncio.sleep(0.005)
        return "seen"

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    async with open_store(redis_server, redis_server.prefix()) as store:
        runs = [asyncio.create_task(agent_of(store, 4, tool).ainvoke(ASKED)) for _ in range(12)]
        for run in chance.sample(runs, 8):
            await asyncio.sleep(chance.uniform(0, 0.05))
            run.cancel()
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*runs, return_exceptions=True)
        assert any(isinstance(each, dict) for each in results)
        assert any(isinstance(each, asyncio.CancelledError) for each in results)
        (left,) = await store.apeek([KEY])
        assert left is not None
        assert left.used == 0


async def test_a_cancelled_run_does_not_end_its_sync_tool(redis_server: RedisServer) -> None:
    """Of 20 runs that are cancelled while tools run in threads, 2 of these run, in two processes.

    Two stores are as two processes have them. Each place is free when its thread has ended.
    """
    lock, full, may_end = threading.Lock(), threading.Event(), threading.Event()
    running = most = ran = 0

    def browser() -> str:
        nonlocal running, most, ran
        with lock:
            running, ran = running + 1, ran + 1
            most = max(most, running)
            if running == 2:
                full.set()
        assert may_end.wait(PATIENCE)
        with lock:
            running -= 1
        return "seen"

    tool = StructuredTool.from_function(browser, name="browser", description="See.")
    prefix = redis_server.prefix()
    limit = {"at_once": 2}
    async with open_store(redis_server, prefix) as one, open_store(redis_server, prefix) as other:
        runs = [
            asyncio.create_task(agent_of(store, 1, tool, limit=limit).ainvoke(ASKED))
            for store in (one, other) * 10
        ]
        await asyncio.to_thread(full.wait, PATIENCE)
        for each in runs:
            each.cancel()
        await asyncio.wait(runs)
        assert await taken(one) == 2
        late = [
            asyncio.create_task(agent_of(store, 2, tool, limit=limit).ainvoke(ASKED))
            for store in (one, other)
        ]
        # They ask for places, and do not get any.
        refused = await agent_of(one, 1, seen, limit={"at_once": 2, "wait": 0}).ainvoke(ASKED)
        assert "other calls were running" in refused["messages"][2].content
        assert running == 2
        may_end.set()
        for result in await asyncio.gather(*late):
            assert [each.content for each in result["messages"][2:4]] == ["seen"] * 2
        await used_is(one, 0)
    assert (most, ran) == (2, 6)


@pytest.mark.filterwarnings(
    # Others, too, cannot end what they do in a loop that is closed, and Python says so.
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning",
    "ignore:coroutine .* was never awaited:RuntimeWarning",
    "ignore:unclosed:ResourceWarning",
)
@pytest.mark.parametrize("closed", ["as asyncio.run does", "at once"])
def test_an_event_loop_that_ends_before_the_thread_of_its_tool(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """The lease is renewed until the thread has ended, and then the place is given back."""
    monkeypatch.setattr(leases, "SLOT_LEASE", 1)
    begun, may_end = threading.Event(), threading.Event()

    def browser() -> str:
        begun.set()
        assert may_end.wait(PATIENCE)
        return "seen"

    tool = StructuredTool.from_function(browser, name="browser", description="See.")
    prefix = redis_server.prefix()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # it says that a task was left
    used = RedisStore(redis_server.url, prefix=prefix, timeout=60)
    run = loop.create_task(agent_of(used, 1, tool).ainvoke(ASKED))
    loop.run_until_complete(asyncio.to_thread(begun.wait, PATIENCE))
    if closed == "as asyncio.run does":
        left = asyncio.all_tasks(loop)
        for each in left:
            each.cancel()
        loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(used.aclose())
    loop.close()
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as store:

        def taken() -> int:
            (use,) = store.peek([KEY])
            return 0 if use is None else use.used

        for _ in range(6):
            assert taken() == 1
            time.sleep(0.5)
        may_end.set()
        eventually(lambda: taken() == 0)
    used.close()
    del run
    gc.collect()


async def test_a_place_that_nobody_heard_of_is_given_back(redis_server: RedisServer) -> None:
    """A run is cancelled when the store has given its call a place and not yet said so."""
    asked = asyncio.Event()

    class Late(RedisStore):
        async def aacquire(self, request: AcquireRequest) -> AcquireResult:
            result = await super().aacquire(request)
            if request.hits:
                asked.set()
                await asyncio.Event().wait()
            return result

    async def browser() -> str:
        return "seen"

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    store = Late(redis_server.url, prefix=redis_server.prefix(), timeout=60)
    running = asyncio.create_task(agent_of(store, 1, tool).ainvoke(ASKED))
    await asked.wait()
    (held,) = await store.apeek([KEY])
    assert held is not None
    assert held.used == 1
    running.cancel()
    await asyncio.wait([running])
    (held,) = await store.apeek([KEY])
    assert held is not None
    assert held.used == 0


@pytest.mark.parametrize("outage", ["deny", "allow"])
async def test_while_the_store_is_away(signals: Signals, outage: Any) -> None:
    """Calls are refused; or they run, held to the cap in this process, whoever makes them."""
    running = most = 0

    async def browser() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return "seen"

    tool = StructuredTool.from_function(coroutine=browser, name="browser", description="See.")
    store = RedisStore("redis://127.0.0.1:1/0", timeout=1)
    options: Any = {"on_store_error": outage, "telemetry": signals.telemetry}
    agents = [agent_of(store, 4, tool, **options) for _ in range(2)]
    results = await asyncio.gather(*(each.ainvoke(ASKED) for each in agents))
    messages = [each for result in results for each in result["messages"]]
    said = [each.content for each in messages if each.type == "tool"]
    if outage == "allow":
        assert said == ["seen"] * 8
        assert most == CAP
    else:
        assert most == 0
        assert all("could not be checked" in each for each in said)
    fallbacks = {"agent": "unnamed", "action": outage}
    assert signals.value("langchain_quota_store_fallbacks_total", **fallbacks) == 8
