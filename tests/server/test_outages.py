"""Servers that stop, hang, lose replies, or are too late: what is told, and what is counted."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
import redis.asyncio
from blockbuster import blockbuster_ctx

from langchain_quota import ModelCallLimit, PostgresStore, Quota, TokenLimit, ToolCallLimit
from langchain_quota.errors import EventLoopBlockedError, QuotaStoreError
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.stores.redis import RedisStore
from tests.forked import ROOT, calling, run_python
from tests.scene import ANN, Form, Scene, asking, both_forms, texts, tool_limiter
from tests.server.prometheus import eventually
from tests.server.proxy import Proxy, late, lost, piecemeal, proxy, replaced, reset
from tests.server.redis import RedisServer
from tests.server.stores import calls, used
from tests.stores import counts
from tests.telemetry import Signals, telling

SHORT = 0.3
"""The timeout of a store that is to run into it, in seconds."""
LONG = 30.0
"""The timeout of a store that is not to."""
DEADLINE = 120
"""Seconds after which something hangs."""
SEARCHES, THREAD = "search:user_id:ann", "search:thread:thread-1"
SHARED = "search:global:"
PER_USER = ToolCallLimit("search", quotas=[Quota(10**9, per="user_id")], thread_limit=10**9)

Open = Callable[..., RedisStore]


@pytest.fixture
def way(redis_server: RedisServer) -> Iterator[Proxy]:
    """A way to Redis on which things go wrong."""
    with proxy(redis_server.port) as way:
        yield way


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens stores, and closes them in the end."""
    stores: list[RedisStore] = []

    def make(url: str, prefix: str, timeout: float = LONG) -> RedisStore:
        stores.append(RedisStore(url, prefix=prefix, timeout=timeout))
        return stores[-1]

    yield make
    for store in stores:
        await store.aclose()


async def blocked(seconds: float) -> None:
    """Block the event loop, behind what it has begun."""
    await asyncio.sleep(0)
    time.sleep(seconds)  # noqa: ASYNC251 - the fault


class TestEventLoop:
    """A reply that waits while something blocks the event loop."""

    @pytest.mark.parametrize("connected", [True, False])
    async def test_reply_that_is_there(self, way: Proxy, opened: Open, *, connected: bool) -> None:
        """A question is answered, however long the event loop was blocked meanwhile."""
        store = opened(way.url, f"there.{connected}", SHORT)
        if connected:
            await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(6)))
        asked = [asyncio.create_task(store.aacquire(calls("search", 1))) for _ in range(6)]
        await blocked(3 * SHORT)
        assert [each.admitted for each in await asyncio.gather(*asked)] == [(True,)] * 6

    async def test_requests_that_wait_together(self, way: Proxy, opened: Open) -> None:
        """However many requests wait at the same time, each of them has all of its time."""
        store = opened(way.url, "together", 10 * SHORT)
        await store.aacquire(calls("search", 1))
        way.fail(late(2 * SHORT))
        asked = [store.aacquire(calls("search", 1)) for _ in range(30)]
        assert [each.admitted for each in await asyncio.gather(*asked)] == [(True,)] * 30

    @pytest.mark.parametrize("own", [True, False], ids=["own client", "URL"])
    async def test_no_reply(self, way: Proxy, opened: Open, *, own: bool) -> None:
        """If no reply comes even then, the error names the event loop; else it does not."""
        async with redis.asyncio.Redis.from_url(way.url, socket_timeout=SHORT) as client:
            store = RedisStore(client, timeout=1.5 * SHORT) if own else opened(way.url, "no", SHORT)
            await store.aacquire(calls("search", 1))
            way.blackhole()
            asked = asyncio.create_task(store.aacquire(calls("search", 1)))
            await blocked(4 * SHORT)
            said = r"event loop was blocked for 1\.\d s"
            with pytest.raises(EventLoopBlockedError, match=said) as failed:
                await asked
            assert failed.value.timed_out
            silent: type[QuotaStoreError] = EventLoopBlockedError
            while silent is EventLoopBlockedError:  # the machine may be busy
                with pytest.raises(QuotaStoreError) as unanswered:
                    await store.aacquire(calls("search", 1))
                silent = unanswered.type
            assert silent is QuotaStoreError


class TestAgents:
    """Agents go on, or are refused, and in the end what ran is counted."""

    @both_forms
    async def test_every_fault(
        self, form: Form, way: Proxy, redis_server: RedisServer, opened: Open, signals: Signals
    ) -> None:
        """Whatever happens to replies, in the end every call that ran is counted once."""
        prefix = redis_server.prefix()
        store, patient = opened(way.url, prefix, SHORT), opened(redis_server.url, prefix)
        given: Any = {"on_store_error": "allow", "form": form, "context": ANN}
        scene = Scene(signals, asking("search"), [PER_USER], store=store, **given)
        faults = [lost, reset, late(2 * SHORT), replaced(b":1\r\n"), piecemeal, late(0.01)]
        for fault in faults:
            await scene.play()
            way.fail(fault)
            for _ in range(3):
                await scene.play()
            way.heal()
        way.blackhole()
        await scene.play()
        way.heal()
        assert scene.ran == ["search"] * 25
        async with asyncio.timeout(DEADLINE):
            # A few corrections go with each request.
            while counts(patient) != dict.fromkeys((SEARCHES, THREAD), len(scene.ran)):
                await scene.play()
        # Nothing is left that a further request would bring.
        await scene.play()
        assert counts(patient) == dict.fromkeys((SEARCHES, THREAD), len(scene.ran))

    @pytest.mark.parametrize("outage", ["stopped", "paused"])
    @pytest.mark.parametrize("kind", ["redis", "postgres"])
    async def test_under_load(
        self, kind: str, outage: str, request: pytest.FixtureRequest, signals: Signals
    ) -> None:
        """Eight agents run while a server stops or hangs, twice: in the end it counts what ran."""
        server: Any = request.getfixturevalue("durable" if kind == "redis" else "postgres_server")
        url = server.url if kind == "redis" else request.getfixturevalue("postgres_url")
        make, prefix = (RedisStore if kind == "redis" else PostgresStore), server.prefix()
        store = make(url, prefix=prefix, timeout=0.5)
        patient = make(url, prefix=prefix, timeout=LONG)
        over, stops = asyncio.Event(), outage == "stopped"
        options: Any = {"on_store_error": "allow", "checkpointer": None, "context": ANN}
        script: Any = lambda _: "done" if over.is_set() else ["search", "search"]  # noqa: E731
        scene = Scene(signals, script, [PER_USER], store=store, **options)

        async def run(thread: str) -> None:
            config = {"configurable": {"thread_id": thread}, "recursion_limit": 9**9}
            await scene.agent.ainvoke({"messages": [("user", "hi")]}, config, context=ANN)

        async def more(outcome: str) -> None:
            """Wait for requests of one outcome."""

            def found() -> float:
                name = "langchain_quota_store_seconds_count"
                return sum(signals.samples(name, operation="acquire", outcome=outcome).values())

            before = found()
            while found() < before + 5:  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.01)

        async with asyncio.timeout(DEADLINE):
            running = [asyncio.create_task(run(f"thread-{number % 4}")) for number in range(8)]
            for _ in range(2):
                await more("ok")
                await asyncio.to_thread(server.stop if stops else server.pause)
                await more("error" if stops else "timeout")
                await asyncio.to_thread(server.start if stops else server.resume)
            await more("ok")
            over.set()
            await asyncio.gather(*running)
            # What is still to be corrected is corrected by itself, or with the next requests.
            while counts(patient).get(SEARCHES) != len(scene.ran):
                await run("thread-0")
            assert sum(counts(patient).values()) == 2 * len(scene.ran)
        for each in (store, patient):
            await each.aclose()

    @pytest.mark.parametrize("on_store_error", ["block", "allow"])
    async def test_the_event_loop_is_not_blocked(
        self, on_store_error: Any, durable: RedisServer, opened: Open, signals: Signals
    ) -> None:
        """Nothing that agents ask of a store blocks the event loop, nor does a Redis that is away.

        They reserve, settle, are refused, tell what is left, and are reset.
        """
        store = opened(durable.url, durable.prefix(), 1)
        drop_in = tool_limiter(signals, "search", run_limit=1, limit_name="drop-in")
        limits: list[Any] = [
            *(drop_in, PER_USER, ToolCallLimit("calc", quotas=[Quota(1, per="user_id")])),
            TokenLimit(quotas=[Quota(999, per="user_id")], reserve=9),
        ]
        given: Any = {"tell_model": True, "hide_exhausted": True, "context": ANN, "store": store}
        script = asking("search", "search", "calc", "calc")
        scene = Scene(signals, script, limits, on_store_error=on_store_error, **given)
        for change in (None, durable.pause, durable.resume, durable.stop, durable.start):
            if change is not None:
                change()
            if change != durable.resume:
                with blockbuster_ctx():
                    await scene.play()
        with blockbuster_ctx():
            await scene.reset()
            await store.aclose()
        searches = scene.ran.count("search")
        assert searches == (2 if on_store_error == "block" else 4)
        # A call that blocks would be counted here.
        errors = "langchain_quota_errors_total"
        assert not signals.samples(errors, error_type="BlockingError")
        assert counts(opened(durable.url, str(store.prefix)))[SEARCHES] == searches


def losing(url: str, prefix: str, pid: int, form: Form) -> Scene:
    """An agent that asks for two searches; the server stops answering before they are checked."""

    def script(messages: list[Any]) -> Any:
        if messages[-1].type != "human":
            return "done"
        os.kill(pid, signal.SIGSTOP)
        return ["search"] * 2

    quotas = [Quota(10, per="global")]
    # The request for the model's call connects the store before the server stops.
    limits: list[Any] = [ToolCallLimit("search", quotas=quotas), ModelCallLimit(quotas=quotas)]
    store = RedisStore(url, prefix=prefix, timeout=SHORT)
    return Scene(telling(), script, limits, store=store, form=form)


async def lose(url: str, prefix: str, pid: str) -> None:
    """Lose a reply, and end; the server goes on meanwhile."""
    # In a thread, where no event loop takes it back when it ends.
    await asyncio.to_thread(run_sync, losing(url, prefix, int(pid), "sync").play())
    os.kill(int(pid), signal.SIGCONT)


JOB = f"import multiprocessing\ndef job(): {calling(lose)}\n"
IN_A_CHILD = f"{JOB}multiprocessing.get_context('fork').Process(target=job).start()"


class TestLostReplies:
    """A request charged calls that did not run, since its reply was lost: it is undone."""

    @pytest.mark.parametrize("ends", [True, False])
    def test_nothing_is_asked_any_more(self, durable: RedisServer, *, ends: bool) -> None:
        """The charge is taken back though no run needs the store, before the event loop ends."""
        with closing(RedisStore(durable.url, prefix="x", timeout=LONG)) as other:

            def charged(count: int) -> bool:
                return used(other, SHARED) == [count]

            async def run() -> None:
                result = await losing(durable.url, "x", durable.pid, "async").play()
                assert all("could not be checked" in each for each in texts(result))
                durable.resume()
                await asyncio.to_thread(eventually, lambda: charged(2 if ends else 0))

            asyncio.run(run())
            assert charged(0)

    @pytest.mark.parametrize("program", [calling(lose), IN_A_CHILD], ids=["here", "in a child"])
    def test_a_process_that_ends(self, durable: RedisServer, program: str) -> None:
        """A process whose last reply was lost takes the charge back before it ends."""
        done = run_python(program, durable.url, "x", str(durable.pid), cwd=ROOT)
        assert done.returncode == 0, done.stderr
        with closing(RedisStore(durable.url, prefix="x", timeout=LONG)) as other:
            assert used(other, SHARED) in ([0], [None])
