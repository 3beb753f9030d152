"""Processes that share a provider's pace, and where the clients show what a provider says."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent

from langchain_quota import ModelPaceMiddleware, RedisStore
from tests.clients import Make, apis, chat
from tests.forked import Program, start_python
from tests.limited_provider import LimitedProvider
from tests.provider import running_provider
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, running_redis
from tests.telemetry import Signals

PROCESSES, CALLERS = 4, 25
REQUESTS, TOKENS, WINDOW = 120, 95, 5.0
"""Requests in a window, the tokens of each, and the window in seconds."""
GO = {"messages": [("user", "hi " * 100)]}
PROGRAM = """
import asyncio, sys
from tests.server.test_model_pace import live
asyncio.run(live(*sys.argv[1:]))
"""


async def live(url: str, redis_url: str) -> None:
    """Call the model from many tasks, until a kill; a refused call is repeated after a moment."""
    store = RedisStore(redis_url, timeout=5) if redis_url else None
    pace = [ModelPaceMiddleware(store=store, wait=60)] if store else []
    agent: Any = create_agent(chat(url), middleware=pace)

    async def call() -> None:
        while True:
            try:
                await agent.ainvoke(GO)
            except Exception:  # noqa: BLE001 - the provider counts what it refuses
                await asyncio.sleep(0.2)

    await asyncio.gather(*(call() for _ in range(CALLERS)))


def play(
    tokens: int, redis: RedisServer | None, windows: int
) -> tuple[LimitedProvider, Sequence[float]]:
    """Have processes call a provider; return it, and when its windows began after the first one."""
    kind = partial(LimitedProvider, requests=REQUESTS, tokens=tokens, window=WINDOW)
    programs: list[Program] = []
    with running_provider(kind) as provider, Path("/dev/null").open("wb") as output:

        def start() -> Program:
            given, log = (provider.url, redis.url if redis else ""), output.fileno()
            return start_python(PROGRAM, *given, stdout=log, stderr=log, imported=[__name__])

        try:
            programs += (start() for _ in range(PROCESSES))
            # What is in flight when the limit is first reached is not counted.
            assert eventually(lambda: len(provider.accepted) >= REQUESTS or provider.refusals)
            times: list[float] = []
            for window in range(windows + 1):
                time.sleep(WINDOW)
                times.append(time.monotonic())
                if window == 1:
                    programs[0].kill()
                    programs[0].wait()
                    programs[0] = start()
                if redis is not None and window == 2:
                    redis.stop()
                    redis.start()
            return provider, times
        finally:
            for program in programs:
                program.kill()
                program.wait()


@pytest.mark.rest
def test_processes_share_the_pace(tmp_path: Path) -> None:
    """Four processes of 25 callers hear at most one error 429 a window, and use the whole pace.

    Meanwhile one of them is killed and started again, and the store loses all its counts. Without
    the middleware there are hundreds.
    """
    free, _ = play(REQUESTS * TOKENS, None, 1)
    with running_redis(tmp_path) as redis:
        paced, times = play(REQUESTS * TOKENS, redis, 4)

    later = sum(at >= times[0] for at in paced.refusals)
    assert len(free.refusals) >= 200
    assert later <= len(times) - 1
    assert paced.use(times[0], times[-1]) >= 0.9
    assert max(free.over(), paced.over()) <= 1e-6


@pytest.mark.rest
@apis
@pytest.mark.parametrize("way", ["answer", "stream", "error"])
@pytest.mark.parametrize("form", ["sync", "async"])
async def test_clients_show_what_the_provider_says(
    api: Make, way: str, form: str, signals: Signals
) -> None:
    """After one answer, stream or error the next call waits, though the clocks disagree."""
    kind = partial(LimitedProvider, requests=1, tokens=10**6, window=60.0)
    with running_provider(kind) as provider:
        provider.ahead = 1e6
        if way == "error":
            provider.left["requests"] = 0
        pace = ModelPaceMiddleware(wait=0.2, telemetry=signals.telemetry)
        agent: Any = create_agent(api(provider.url, streaming=way == "stream"), middleware=[pace])
        for _ in range(2):
            try:
                _ = agent.invoke(GO) if form == "sync" else await agent.ainvoke(GO)
            except Exception as error:  # noqa: BLE001 - each client has its own
                assert getattr(error, "status_code", None) == 429  # noqa: PT017 - not each call fails

    waits = signals.samples("langchain_quota_wait_seconds_sum", decision="allowed")
    assert sum(waits.values()) >= 0.2
    refusals = signals.samples("langchain_quota_provider_refusals_total")
    assert sum(refusals.values()) == len(provider.refusals) == (2 if way == "error" else 1)
