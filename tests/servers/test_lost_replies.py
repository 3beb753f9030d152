"""A reply of Redis that is lost: its request charged calls that did not run, and is undone."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from prometheus_client import CollectorRegistry

from langchain_quota import (
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    RedisStore,
    Telemetry,
    ToolCallLimit,
)
from langchain_quota.testing import ScriptedChatModel
from tests.forked import run_python
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.servers.stores import used

KEY = "email:global:"
ASKED: Any = {"messages": [("user", "hi")]}
PAUSED = 0.3
"""How long the store waits for a server that does not answer, in seconds."""


@pytest.fixture
def prefix(redis_server: RedisServer) -> Iterator[str]:
    """A prefix of the test's own; the server goes on after the test."""
    yield redis_server.prefix()
    redis_server.resume()


@pytest.fixture
def charged(redis_server: RedisServer, prefix: str) -> Iterator[Callable[[], int | None]]:
    """What is charged, as another process sees it."""
    with closing(RedisStore(redis_server.url, prefix=prefix, timeout=60)) as other:
        yield lambda: used(other, KEY)[0]


def agent_of(url: str, prefix: str, pid: int) -> Any:
    """An agent that asks for two mails; the server stops answering before they are judged."""

    def script(messages: list[Any]) -> Any:
        if messages[-1].type != "human":
            return "done"
        os.kill(pid, signal.SIGSTOP)
        return ["email"] * 2

    email = StructuredTool.from_function(lambda: "sent", name="email", description="Send.")
    quota: Any = QuotaMiddleware(
        [
            ToolCallLimit("email", quotas=[Quota(10, per="global")]),
            # Its request connects the store before the server stops.
            ModelCallLimit(quotas=[Quota(10, per="global")]),
        ],
        store=RedisStore(url, prefix=prefix, timeout=PAUSED),
        telemetry=Telemetry(registry=CollectorRegistry()),
    )
    return create_agent(ScriptedChatModel(script=script), [email], middleware=[quota])


def answers(result: Any) -> list[str]:
    """What the model is told about its calls."""
    return [each.content for each in result["messages"] if each.type == "tool"]


async def test_a_process_that_asks_nothing_more(
    redis_server: RedisServer, prefix: str, charged: Callable[[], int | None]
) -> None:
    """The charge of a lost reply is taken back although no further run needs the store."""
    agent = agent_of(redis_server.url, prefix, redis_server.pid)
    result = await agent.ainvoke(ASKED)
    redis_server.resume()
    assert all("could not be checked" in each for each in answers(result))
    await asyncio.to_thread(eventually, lambda: charged() == 0, seconds=20)


def test_an_event_loop_that_ends(
    redis_server: RedisServer, prefix: str, charged: Callable[[], int | None]
) -> None:
    """What a lost reply has charged is taken back before the event loop ends."""
    agent = agent_of(redis_server.url, prefix, redis_server.pid)

    async def run() -> None:
        result = await agent.ainvoke(ASKED)
        redis_server.resume()
        assert answers(result)
        await asyncio.to_thread(eventually, lambda: charged() == 2, seconds=20)

    asyncio.run(run())
    assert charged() == 0


PROGRAM = """
import os, signal, sys
from tests.servers.test_lost_replies import ASKED, agent_of
url, prefix, pid = sys.argv[1:]
agent_of(url, prefix, int(pid)).invoke(ASKED)
os.kill(int(pid), signal.SIGCONT)
"""


def test_a_process_that_ends(
    redis_server: RedisServer, prefix: str, charged: Callable[[], int | None]
) -> None:
    """A process whose last reply was lost takes the charge back before it ends."""
    done = run_python(PROGRAM, redis_server.url, prefix, str(redis_server.pid))
    assert done.returncode == 0, done.stderr
    assert not charged()
