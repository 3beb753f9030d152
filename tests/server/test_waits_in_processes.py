"""Calls that wait in several processes, which are killed: together they are never over."""

import asyncio
import random
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent

from langchain_quota import ModelCallLimit, Quota, QuotaMiddleware, RedisStore
from langchain_quota.stores.redis_script import SCRIPTS, Script
from langchain_quota.testing import ScriptedChatModel
from tests.forked import ROOT, Program, start_python
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer

RATE, BURST = 40, 3
"""Calls in a second, and at once."""
ADMITTED = 120
"""Calls until the test ends: several seconds of them."""
PROGRAM = """
import asyncio, sys
from tests.server.test_waits_in_processes import live
asyncio.run(live(*sys.argv[1:]))
"""


async def live(url: str, prefix: str, smooth: str) -> None:
    """Make model calls, as fast as is allowed, until a kill."""
    # The server itself notes when it admits a call.
    script, said = SCRIPTS["acquire"].text, "return 'acquired 0 ' .. result .. new"
    note = f"if #record > 0 then redis.call('RPUSH', '{prefix}:admitted', digits(micros())) end\n"
    assert said in script
    SCRIPTS["acquire"] = Script.of(script.replace(said, note + said))
    kinds: Any = {"smooth": True, "burst": BURST} if smooth else {}
    quota = Quota(RATE, per="global", window="1s", **kinds)
    store = RedisStore(url, prefix=prefix, timeout=60)
    held = QuotaMiddleware([ModelCallLimit(quotas=[quota], wait=60)], store=store)
    model = ScriptedChatModel(script=lambda _: "done", keep_calls=0)
    agent: Any = create_agent(model, middleware=[held])

    async def run() -> None:
        while True:
            await agent.ainvoke({"messages": [("user", "hi")]})

    await asyncio.gather(*(run() for _ in range(4)))


def admitted(client: Any, prefix: str, least: int) -> bool:
    """Whether the server has admitted so many."""
    return int(client.llen(f"{prefix}:admitted")) >= least


@pytest.mark.rest
@pytest.mark.parametrize("smooth", ["yes", ""], ids=["smooth", "fixed"])
def test_killed_processes_are_never_over(
    redis_server: RedisServer, smooth: str, tmp_path: Path
) -> None:
    """By the server's clock no time has more than the rate and the burst, whoever is killed."""
    prefix = redis_server.prefix()
    chance = random.Random(7)  # noqa: S311 - no secret

    def start() -> Program:
        log = output.fileno()
        arguments = redis_server.url, prefix, smooth
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
            noted = map(int, client.lrange(f"{prefix}:admitted", 0, -1))
            # A clock that goes back counts as one that stands still.
            times = [*accumulate(noted, max)]
    finally:
        for each in programs:
            each.kill()
            each.wait()
        output.close()
    apart = 10**6 // RATE
    if smooth:
        for first, begin in enumerate(times):
            for more, end in enumerate(times[first:], 1):
                assert more <= BURST + (end - begin) / apart
    store = RedisStore(redis_server.url, prefix=prefix)
    windows = [each.used for each in store.usages("model:global:*")]
    assert smooth or (sum(windows) >= ADMITTED and max(windows) <= RATE)
