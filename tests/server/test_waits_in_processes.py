"""Calls that wait in several processes, which are killed: together they are never over."""

import asyncio
import random
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent

from langchain_quota import ModelCallLimit, Quota, QuotaMiddleware, RedisStore, TokenLimit
from langchain_quota.stores.redis_script import SCRIPTS, Script
from langchain_quota.testing import ScriptedChatModel
from tests.forked import ROOT, Program, start_python
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer
from tests.telemetry import paid

RATE, BURST = 40, 3
"""Calls in a second, and at once."""
SIZE = 1000
"""The tokens of a call, where tokens are limited."""
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

    def start() -> Program:
        log = output.fileno()
        arguments = redis_server.url, prefix, kind
        return start_python(PROGRAM, *arguments, stdout=log, stderr=log, cwd=ROOT)

    output = (tmp_path / "output").open("wb")
    programs = [start() for _ in range(4)]
    try:
        with redis_server.client() as client:
            for least in range(10, ADMITTED, 10):
                assert eventually(partial(admitted, client, prefix, least))
                killed = chance.randrange(4)
                programs[killed].kill()
                programs[killed].wait()
                programs[killed] = start()
            assert eventually(partial(admitted, client, prefix, ADMITTED))
            noted = [each.split() for each in client.lrange(f"{prefix}:admitted", 0, -1)]
            # A clock that goes back counts as one that stands still.
            begun, done = (accumulate(map(int, each), max) for each in zip(*noted, strict=True))
            times = [*zip(begun, done, strict=True)]
    finally:
        for each in programs:
            each.kill()
            each.wait()
        output.close()
    apart = 10**6 // RATE
    if kind != "fixed":
        for first, (begin, _) in enumerate(times):
            for more, (_, end) in enumerate(times[first:], 1):
                assert more <= BURST + (end - begin) / apart
    store = RedisStore(redis_server.url, prefix=prefix)
    windows = [each.used for each in store.usages("model:global:*")]
    assert kind != "fixed" or (sum(windows) >= ADMITTED and max(windows) <= RATE)
