"""Calls that wait in several processes, which are killed: together they are never over."""

import asyncio
import random
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from redis.asyncio import Redis

from langchain_quota import (
    ModelCallLimit,
    ModelPaceMiddleware,
    Quota,
    QuotaMiddleware,
    RedisStore,
    TokenLimit,
)
from langchain_quota.stores.redis_script import SCRIPTS, Script
from langchain_quota.testing import ScriptedChatModel
from tests.forked import processes
from tests.scenario.test_model_pace import Refused
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer
from tests.telemetry import paid

RATE, BURST = 40, 3
"""Calls in a second, and at once."""
SIZE = 1000
"""The tokens of a call, where tokens are limited."""
ASKING = ("eval", "evalsha")
"""How stores ask a server."""
ADMITTED = 120
"""Calls until the test ends: several seconds of them."""
PROGRAM = """
import asyncio, sys
from tests.server.test_waits_in_processes import live
asyncio.run(live(*sys.argv[1:]))
"""


async def live(url: str, prefix: str, kind: str) -> None:
    """Make model calls, as fast as is allowed, until a kill."""
    # The server itself notes between which times it admits a call: it may be paused in between.
    script, times = SCRIPTS["acquire"].text, "digits(begun) .. ' ' .. digits(micros())"
    first, last = "local declared, again", "return 'acquired 0 ' .. result .. new"
    note = f"if #record > 0 then redis.call('RPUSH', '{prefix}:admitted', {times}) end\n"
    assert first in script
    assert last in script
    script = script.replace(first, f"local begun = micros()\n{first}")
    SCRIPTS["acquire"] = Script.of(script.replace(last, note + last))
    size = SIZE if kind == "tokens" else 1
    smooth: Any = {"smooth": True, "burst": BURST * size} if kind != "fixed" else {}
    quotas = [Quota(RATE * size, per="global", window="1s", **smooth)]
    limit: Any = ModelCallLimit(quotas=quotas, wait=60)
    if kind == "tokens":
        limit = TokenLimit(quotas=quotas, wait=60, reserve=SIZE)
    store = RedisStore(url, prefix=prefix, timeout=60)
    held = QuotaMiddleware([limit], store=store)
    model = ScriptedChatModel(script=lambda _: paid(SIZE), keep_calls=0)
    agent: Any = create_agent(model, middleware=[held])

    async def run() -> None:
        while True:
            await agent.ainvoke({"messages": [("user", "hi")]})

    await asyncio.gather(*(run() for _ in range(4)))


def admitted(client: Any, prefix: str, least: int) -> bool:
    """Whether the server has admitted so many."""
    return int(client.llen(f"{prefix}:admitted")) >= least


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["calls", "tokens", "fixed"])
def test_killed_processes_are_never_over(
    redis_server: RedisServer, kind: str, tmp_path: Path
) -> None:
    """By the server's clock no time has more than the rate and the burst, whoever is killed."""
    prefix = redis_server.prefix()
    chance = random.Random(7)  # noqa: S311 - no secret
    arguments = redis_server.url, prefix, kind
    running = processes(PROGRAM, *arguments, log=tmp_path / "log")
    with redis_server.client() as client, running as restart:
        for least in range(10, ADMITTED, 10):
            assert eventually(partial(admitted, client, prefix, least))
            restart(chance.randrange(4))
        assert eventually(partial(admitted, client, prefix, ADMITTED))
        noted = [each.split() for each in client.lrange(f"{prefix}:admitted", 0, -1)]
        # A clock that goes back counts as one that stands still.
        begun, done = (accumulate(map(int, each), max) for each in zip(*noted, strict=True))
        times = [*zip(begun, done, strict=True)]
    apart = 10**6 // RATE
    if kind != "fixed":
        for first, (begin, _) in enumerate(times):
            for more, (_, end) in enumerate(times[first:], 1):
                assert more <= BURST + (end - begin) / apart
    store = RedisStore(redis_server.url, prefix=prefix)
    windows = [each.used for each in store.usages("model:global:*")]
    assert kind != "fixed" or (sum(windows) >= ADMITTED and max(windows) <= RATE)


async def crowd(url: str, prefix: str, kind: str) -> None:
    """Let many calls wait for the same, until a kill, and note those that end."""
    store, hour = RedisStore(url, prefix=prefix, timeout=60), "1h"
    limiter = store.rate_limiter("crowd", requests=1, tokens=10**6, window=hour)
    tokens = Quota(1, per="global", window=hour, smooth=True)
    held = QuotaMiddleware([TokenLimit(quotas=[tokens], reserve=1, wait="2h")], store=store)
    pace = ModelPaceMiddleware(store=store, wait=900)
    given: Any = {"rate_limiter": limiter, "callbacks": [limiter]} if kind == "limiter" else {}
    refused = Refused(retry_after="300") if kind == "pace" else None
    model = ScriptedChatModel(script=lambda _: refused or paid(1), keep_calls=0, **given)
    items: Any = {"limit": [held], "pace": [pace], "limiter": []}[kind]
    agent: Any = create_agent(model, middleware=items)
    server = Redis.from_url(url)

    async def run() -> None:
        with suppress(Refused):
            await agent.ainvoke({"messages": [("user", "hi")]})
        await server.incr(f"{prefix}:ended")

    first = asyncio.create_task(run())
    await asyncio.wait([first], timeout=1)
    await asyncio.gather(first, *(run() for _ in range(249)))


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["limit", "limiter", "pace"])
def test_a_thousand_waiters_ask_little(
    redis_server: RedisServer, kind: str, tmp_path: Path
) -> None:
    """In four processes with 250 each they make at most 5 requests a second."""
    prefix, program = redis_server.prefix(), PROGRAM.replace("live", "crowd")
    arguments = redis_server.url, prefix, kind

    def asked() -> int:
        stats: Any = client.info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ASKING)

    with redis_server.client() as client, processes(program, *arguments, log=tmp_path / "log"):
        assert eventually(lambda: client.exists(f"{prefix}:ended"))
        time.sleep(5)
        begin, before, ended = time.monotonic(), asked(), client.get(f"{prefix}:ended")
        time.sleep(6)
        assert asked() - before <= 5 * (time.monotonic() - begin)
        assert kind == "pace" or asked() > before
        assert client.get(f"{prefix}:ended") == ended
