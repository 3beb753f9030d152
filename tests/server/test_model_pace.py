"""Processes that share a provider's pace, and where the clients show what a provider says."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from pydantic import SecretStr

from langchain_quota import MemoryStore, ModelPaceMiddleware, RedisStore
from tests.clients import KEY, Make, apis, chat, gemini, messages
from tests.forked import processes
from tests.limited_provider import LimitedProvider
from tests.provider import Body, Provider, running_provider
from tests.scenario.test_model_pace import RATE, Played, paced, says, together
from tests.server.prometheus import eventually
from tests.server.redis import RedisServer, running_redis, scripts_with
from tests.telemetry import Signals

CALLERS, TOKENS = 25, 95
"""How many callers a process has, and the tokens of a call, on average."""
GO = {"messages": [("user", "hi " * 100)]}


async def live(url: str, redis_url: str, seconds: str) -> None:
    """Call the model from many tasks, until a kill; a refused call is repeated after a while."""
    store = RedisStore(redis_url, timeout=5) if redis_url else None
    pace = [ModelPaceMiddleware(store=store, wait=60)] if store else []
    agent: Any = create_agent(chat(url), middleware=pace)

    async def call() -> None:
        while True:
            try:
                size = random.randint(50, 150)  # noqa: S311 - no secret
                await agent.ainvoke({"messages": [("user", "hi " * size)]})
            except Exception:  # noqa: BLE001 - the provider counts what it refuses
                await asyncio.sleep(float(seconds) / 25)

    await asyncio.gather(*(call() for _ in range(CALLERS)))


def play(
    requests: int, left: float, seconds: float, times: int, redis: RedisServer | None = None
) -> tuple[LimitedProvider, Sequence[float]]:
    """Have processes call a provider several times for some seconds; return it, and the times.

    It allows so many requests a minute, and a share of them is left. What is in flight when its
    limit is first reached, and what comes in the first seconds, is before the first time. After the
    second one a process is killed, and after the third one the store is restarted.
    """
    kind = partial(LimitedProvider, requests=requests, tokens=requests * TOKENS, window=60.0)
    with running_provider(kind) as provider:
        provider.left = {unit: limit * left for unit, limit in provider.limits.items()}
        given = provider.url, redis.url if redis else "", seconds
        with processes(live, *given, log=Path("/dev/null")) as workers:
            assert eventually(lambda: len(provider.sent) >= requests * left * 0.9)
            ends: list[float] = []
            for number in range(times + 1):
                time.sleep(seconds)
                ends.append(time.monotonic())
                if number == 1:
                    workers.restart()
                if redis is not None and number == 2:
                    redis.stop()
                    redis.start()
            # Without a pace there are hundreds, even if the processes run slowly.
            assert redis is not None or eventually(lambda: len(provider.refusals) >= 200)
            return provider, ends


def test_processes_share_the_pace(tmp_path: Path) -> None:
    """Four processes of 25 callers hear at most one error 429 a minute, and use the whole pace.

    Meanwhile one of them is killed and started again, and the store loses all its counts. Without
    the middleware there are hundreds. `make bench ARGS="--only pace"` plays longer.
    """
    free, _ = play(1440, 0.08, 5.0, 1)
    with running_redis(tmp_path) as redis:
        paced, times = play(1440, 0.08, 5.0, 4, redis)

    assert len(free.refusals) >= 200
    assert sum(at >= times[0] for at in paced.refusals) <= 1
    assert paced.use(times[0], times[-1]) >= 0.9


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


class RefusingGemini(Provider):
    """It refuses all calls, and says for how long, in the body: its headers say nothing."""

    def answer(self, _: str, __: Body) -> tuple[int, list[str], Callable[[], object]]:
        """Refuse a call."""
        info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1.5s"}
        error = {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "no", "details": [info]}
        return 429, [json.dumps({"error": error})], bool


async def test_gemini_says_it_in_the_body(signals: Signals) -> None:
    """A call waits for as long as Gemini's error asks for."""
    with running_provider(RefusingGemini) as provider:
        pace = ModelPaceMiddleware(telemetry=signals.telemetry)
        agent: Any = create_agent(gemini(provider.url), middleware=[pace])
        for _ in range(2):
            with pytest.raises(Exception, match="429"):
                await agent.ainvoke(GO)
    assert sum(signals.samples("langchain_quota_wait_seconds_sum").values()) >= 1.5
    assert sum(signals.samples("langchain_quota_provider_refusals_total").values()) == 2


KEYS = [(chat, "openai_api_key"), (messages, "anthropic_api_key"), (gemini, "google_api_key")]


@pytest.mark.parametrize(("client", "key"), KEYS)
async def test_each_account_has_its_pace(client: Make, key: str, signals: Signals) -> None:
    """A pause holds for one key at one address, and names show neither of them."""
    store, waits = MemoryStore(), list[float]()
    with running_provider(RefusingGemini) as provider:
        pace: Any = ModelPaceMiddleware(store=store, wait=0.1, telemetry=signals.telemetry)
        first, other = client(provider.url), {key: SecretStr("secret")}
        models = first, first.model_copy(update=other), client(f"{provider.url}/secret")
        for model in models * 2:
            agent: Any = create_agent(model, middleware=[pace])
            with pytest.raises(Exception, match="429"):
                await agent.ainvoke(GO)
            waits.append(sum(signals.samples("langchain_quota_wait_seconds_sum").values()))
    assert 0 == waits[2] < waits[3] < waits[4] < waits[5]
    names = [usage.key for usage in store.usages()]
    assert len(names) == 3
    assert not any(text in "".join(names) for text in ("secret", KEY.get_secret_value()))


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_clocks_that_jump(
    kind: str, hours: int, signals: Signals, redis_server: RedisServer
) -> None:
    """If a clock jumps by an hour, or is the provider's own, no call comes early or never."""
    told = says({**RATE, "date": "Fri, 27 Nov 2099 04:00:00 GMT"})
    played, shift, now = Played(told, told), [0], time.time
    prefix, time_of = redis_server.prefix(), "redis.call('TIME')"
    jump = f"{time_of}[1] + (redis.call('GET', '{prefix}:jump') or 0)"
    jumping = {time_of: f"{{{jump}, {time_of}[2]}}"}
    with pytest.MonkeyPatch.context() as patch, scripts_with(jumping):
        patch.setattr(time, "time", lambda: now() + shift[-1])
        store: Any = MemoryStore(clock=time.time)
        if kind == "redis":
            store = RedisStore(redis_server.url, prefix=prefix, timeout=30)
        scenes = [paced(signals, played, store) for _ in range(2)]
        for scene in scenes:
            await scene.play()
        shift.append(hours * 3600)
        with redis_server.client() as client:
            client.set(f"{prefix}:jump", shift[-1])
        async with asyncio.timeout(30):
            await asyncio.gather(*(together(scene, 4) for scene in scenes))

    assert len(played.times) == 10
    # The store, which has lost its count, knows only of those calls that the first process made.
    assert played.keeps(-0.05, 0.05)
