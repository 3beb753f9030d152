"""Budgets through the real clients of providers, and in a real Redis."""

import asyncio
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from opentelemetry.trace import NoOpTracerProvider
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from langchain_quota import (
    MemoryStore,
    Quota,
    QuotaMiddleware,
    QuotaWarning,
    Telemetry,
    TokenLimit,
    usage,
)
from langchain_quota.resolved import LEASE
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import ScriptedChatModel
from tests.servers.priced import Answer, PricedProvider, running_priced_provider
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer, time_from
from tests.signals import Signals

KEY = SecretStr("none")
ASKED: Any = {"messages": [("user", "Hello!")]}
GLOBAL = "model.total_tokens:global:"


@pytest.fixture(scope="module")
def server() -> Iterator[PricedProvider]:
    with running_priced_provider() as provider:
        yield provider


def chat(url: str, **options: Any) -> Any:
    openai = pytest.importorskip("langchain_openai")
    return openai.ChatOpenAI(
        model="gpt-4o", base_url=f"{url}/v1", api_key=KEY, stream_usage=True, **options
    )


def responses(url: str, **options: Any) -> Any:
    return chat(url, use_responses_api=True, **options)


def messages(url: str, **options: Any) -> Any:
    anthropic = pytest.importorskip("langchain_anthropic")
    return anthropic.ChatAnthropic(
        model="claude-opus-4-6", max_tokens=100, base_url=url, api_key=KEY, **options
    )


CHAT = {
    "prompt_tokens": 1001,
    "completion_tokens": 50,
    "total_tokens": 1051,
    "prompt_tokens_details": {"cached_tokens": 400},
}
RESPONSE = {
    "input_tokens": 1001,
    "output_tokens": 50,
    "total_tokens": 1051,
    "input_tokens_details": {"cached_tokens": 400},
    "output_tokens_details": {"reasoning_tokens": 20},
}
MESSAGE = {
    "input_tokens": 101,
    "output_tokens": 50,
    "cache_read_input_tokens": 400,
    "cache_creation_input_tokens": 500,
}


async def test_a_model_that_reports_nothing_is_warned_of_once(
    server: PricedProvider, signals: Signals
) -> None:
    """ChatOpenAI with a `base_url` streams no usage: one warning says what to do, and it helps."""
    limit = TokenLimit(thread_limit=10_000)

    def agent_of(*, stream_usage: bool | None) -> Any:
        quota: QuotaMiddleware[Any, Any] = QuotaMiddleware([limit], telemetry=signals.telemetry)
        openai = pytest.importorskip("langchain_openai")
        model = openai.ChatOpenAI(
            model="gpt-4o", base_url=f"{server.url}/v1", api_key=KEY, stream_usage=stream_usage
        )
        return create_agent(model, middleware=[quota], checkpointer=InMemorySaver())

    async def tokens(agent: Any, *threads: str) -> list[int]:
        found = []
        for thread in threads:
            config: Any = {"configurable": {"thread_id": thread}}
            assert [each async for each in agent.astream(ASKED, config, stream_mode="messages")]
            found.append(usage(await agent.aget_state(config)).spent["model.total_tokens"])
        return found

    def runs(usage: str) -> float | None:
        return signals.value(
            "langchain_quota_model_runs_total",
            agent="unnamed",
            model="gpt-4o-2024-08-06",
            usage=usage,
        )

    server.play(*[Answer(usage=CHAT)] * 3)
    with pytest.warns(QuotaWarning, match="'gpt-4o.*stream_usage=True") as warned:
        estimates = await tokens(agent_of(stream_usage=None), "1", "2")
    assert len(warned) == 1
    assert all(0 < each < 100 for each in estimates)
    assert await tokens(agent_of(stream_usage=True), "1") == [1051]
    assert (runs("estimated"), runs("reported")) == (2, 1)


def answer(tokens: int) -> AIMessage:
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    return AIMessage("Hello.", usage_metadata=used)


@pytest.mark.parametrize(("reserve", "most"), [(300, 10_000), (None, 10_000 + 25 * 300)])
async def test_runs_at_once_share_a_budget(
    redis_server: RedisServer, signals: Signals, reserve: int | None, most: int
) -> None:
    """A true reserve is never exceeded in Redis; without one, by no more than calls in flight."""
    store = RedisStore(redis_server.url, prefix=redis_server.prefix(), timeout=30)
    limit = TokenLimit(quotas=[Quota(10_000, per="global")], reserve=reserve)
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [limit], store=store, telemetry=signals.telemetry
    )
    sizes = iter(range(200, 300))
    model = ScriptedChatModel(script=lambda _: answer(next(sizes)))
    agent = create_agent(model, middleware=[quota])
    charged = []

    async def runs() -> None:
        for _ in range(4):
            result = await agent.ainvoke(ASKED)
            newest = result["messages"][-1]
            if newest.usage_metadata is not None:
                charged.append(newest.usage_metadata["total_tokens"])

    await asyncio.gather(*(runs() for _ in range(25)))

    (used,) = await store.apeek([GLOBAL])
    await store.aclose()
    assert used is not None
    assert 10_000 - 300 < used.used <= most
    assert used.used == sum(charged)


@pytest.mark.parametrize("api", [chat, responses, messages])
@pytest.mark.parametrize("inside", [False, True])
def test_a_timeout_and_its_retry_are_charged(
    server: PricedProvider, signals: Signals, api: Callable[..., Any], *, inside: bool
) -> None:
    """A call that timed out is charged its reserve, and its retry what the provider reports."""
    reports: dict[Any, Any] = {chat: CHAT, responses: RESPONSE, messages: MESSAGE}
    reported = reports[api]
    server.play(Answer(stops_after=0), Answer(usage=reported))
    store = MemoryStore()
    limit = TokenLimit(quotas=[Quota(10_000, per="global")], reserve=3000)
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [limit], store=store, telemetry=signals.telemetry
    )
    retry = ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False)
    model = api(server.url, timeout=2, max_retries=0)
    agent = create_agent(model, middleware=[quota, retry] if inside else [retry, quota])

    agent.invoke(ASKED)

    assert [each.used for each in store.usages()] == [3000 + 1051]


def test_a_retry_of_the_client_itself_is_not_seen(server: PricedProvider, signals: Signals) -> None:
    """What a provider's client makes of one run is hidden: only its last answer is charged."""
    server.play(Answer(stops_after=0), Answer(usage=CHAT))
    store = MemoryStore()
    limit = TokenLimit(quotas=[Quota(10_000, per="global")], reserve=3000)
    quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
        [limit], store=store, telemetry=signals.telemetry
    )

    model = chat(server.url, timeout=2, max_retries=1)
    create_agent(model, middleware=[quota]).invoke(ASKED)

    assert len(server.requests) == 2
    assert [each.used for each in store.usages()] == [1051]


LIMIT, BOUND, PROCESSES, AT_ONCE = 60_000, 300, 4, 25


def spender(url: str, prefix: str, diary: str, hangs_after: int | None = None) -> None:
    """A process whose agents call models of random cost until their budget refuses them.

    What an answer costs is written down before the agent gets it. The time is a key in Redis.

    Args:
        url: Where Redis is.
        prefix: The prefix of its keys.
        diary: Where it is written down.
        hangs_after: After how many answers no call comes back; `None` for never.
    """
    written = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    chance = random.Random()  # noqa: S311 - no secret
    answered = count(1)

    class Model(ScriptedChatModel):
        async def _agenerate(self, *args: Any, **kwargs: Any) -> Any:
            if hangs_after is not None and next(answered) > hangs_after:
                os.write(written, b"hangs\n")
                await asyncio.Event().wait()
            return await super()._agenerate(*args, **kwargs)

    def play(_: object) -> AIMessage:
        tokens = chance.randint(2, BOUND)
        os.write(written, f"{tokens}\n".encode())
        return answer(tokens)

    async def work() -> None:
        store = RedisStore(url, prefix=prefix, timeout=60)
        limit = TokenLimit(quotas=[Quota(LIMIT, per="global")], reserve=BOUND)
        telemetry = Telemetry(registry=CollectorRegistry(), tracer_provider=NoOpTracerProvider())
        quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
            [limit], store=store, telemetry=telemetry
        )
        agent = create_agent(Model(script=play, keep_calls=0), middleware=[quota])

        async def runs() -> None:
            while (await agent.ainvoke(ASKED))["messages"][-1].usage_metadata is not None:
                pass

        await asyncio.gather(*(runs() for _ in range(AT_ONCE)))

    with time_from(f"{prefix}now"):
        asyncio.run(work())


class Spending:
    """Processes that share a budget in Redis, and what they have written down.

    Args:
        server: Where the count is kept.
        diary: Where they write.
    """

    def __init__(self, server: RedisServer, diary: Path) -> None:
        self._server = server
        self._diary = diary
        self._prefix = server.prefix()
        self._client = server.client()
        self._context = multiprocessing.get_context("forkserver")
        diary.touch()
        self.let_pass(1_800_000_000)

    def begin(self, stack: ExitStack, hangs_after: int | None = None) -> Any:
        given = (self._server.url, self._prefix, str(self._diary), hangs_after)
        process = self._context.Process(target=spender, args=given, daemon=True)
        process.start()
        stack.callback(process.kill)
        return process

    @property
    def lines(self) -> list[str]:
        return self._diary.read_text().split("\n")[:-1]

    @property
    def spent(self) -> int:
        return sum(int(each) for each in self.lines if each != "hangs")

    def used(self) -> int:
        with time_from(f"{self._prefix}now"):
            store = RedisStore(self._server.url, prefix=self._prefix, timeout=60)
            (kept,) = store.peek([GLOBAL])
            store.close()
        assert kept is not None
        return kept.used

    def let_pass(self, seconds: int) -> None:
        self._client.incrby(f"{self._prefix}now", seconds)


def ended(process: Any) -> None:
    """Wait until a process has ended by itself."""
    process.join(300)
    assert process.exitcode == 0


def test_processes_share_a_budget(redis_server: RedisServer, tmp_path: Path) -> None:
    """Of 4 processes with 25 runs at once one is killed: nothing is overspent, nothing is lost."""
    spending = Spending(redis_server, tmp_path / "diary")
    with ExitStack() as stack:
        processes = [spending.begin(stack) for _ in range(PROCESSES)]
        eventually(lambda: len(spending.lines) > 50)
        processes[0].kill()
        for process in processes[1:]:
            ended(process)

    spent, used = spending.spent, spending.used()
    assert LIMIT - BOUND < used <= LIMIT
    # The killed process holds what its calls could use, until their leases end.
    assert spent <= used
    assert used - spent <= AT_ONCE * BOUND
    spending.let_pass(LEASE + 2)
    # It may have died between an answer and its charge.
    assert spent - AT_ONCE * BOUND <= spending.used() <= spent


def test_a_budget_is_right_to_the_token_when_leases_have_ended(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """What a killed process held comes back when its leases end, and is used to the last token."""
    spending = Spending(redis_server, tmp_path / "diary")
    with ExitStack() as stack:
        killed = spending.begin(stack, hangs_after=20)
        others = [spending.begin(stack) for _ in range(PROCESSES - 1)]
        eventually(lambda: spending.lines.count("hangs") == AT_ONCE)
        killed.kill()
        for process in others:
            ended(process)
        in_flight = AT_ONCE * BOUND
        assert spending.used() == spending.spent + in_flight
        assert LIMIT - BOUND < spending.used() <= LIMIT

        spending.let_pass(LEASE + 2)
        assert spending.used() == spending.spent
        ended(spending.begin(stack))

    assert spending.used() == spending.spent
    assert LIMIT - BOUND < spending.spent <= LIMIT
