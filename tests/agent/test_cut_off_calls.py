"""Model calls whose end is never reported: what is charged for them, and what stays held."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware.types import ModelRequest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGenerationChunk

from langchain_quota import CostLimit, MemoryStore, Quota, QuotaMiddleware, TokenLimit
from langchain_quota.resolved import LEASE
from langchain_quota.testing import ScriptedChatModel
from tests.signals import Signals
from tests.stores import Clock, FickleStore, counts

TOKENS = "model.total_tokens:global:"
MONEY = "model.microdollars:global:"
ASKED: Any = {"messages": [("user", "Hi!")]}


class Streamed(ScriptedChatModel):
    """Streams a word, and then waits to be told to go on."""

    begun: Any = None
    go_on: Any = None

    def _stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="Good "))
        assert self.go_on.wait(60)
        used: Any = {"input_tokens": 39, "output_tokens": 1, "total_tokens": 40}
        yield ChatGenerationChunk(message=AIMessageChunk(content="day.", usage_metadata=used))

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="Good "))
        if self.begun is not None:
            self.begun.set()
        await asyncio.sleep(3600)


class Scene:
    """A model under budgets of tokens and money in a store whose clock a test sets."""

    def __init__(self, signals: Signals, model: Any, *, reserve: int | None = 500) -> None:
        self.clock = Clock()
        self.store = MemoryStore(clock=self.clock)
        money = None if reserve is None else f"0.{reserve:06}"
        self.quota: QuotaMiddleware[Any, Any] = QuotaMiddleware(
            [
                TokenLimit(quotas=[Quota(10_000, per="global")], reserve=reserve),
                CostLimit(quotas=[Quota(1, per="global")], reserve=money),
            ],
            store=FickleStore(self.store),
            prices=lambda used: Decimal(used.total_tokens) / 10**6,
            telemetry=signals.telemetry,
        )
        self.agent = create_agent(model, middleware=[self.quota])

    def charged(self) -> dict[str, int]:
        """What is charged when all leases are over."""
        self.clock.now += LEASE + 2
        return counts(self.store)


async def test_a_stream_that_is_left_is_charged_what_was_held(signals: Signals) -> None:
    """A stream that is left in the middle is charged its reserve: its use is never reported."""
    scene = Scene(signals, Streamed(script=[]))
    stream = scene.agent.astream(ASKED, stream_mode="messages")
    async for _ in stream:
        break
    assert counts(scene.store) == {TOKENS: 500, MONEY: 500}
    await stream.aclose()  # type: ignore[attr-defined]

    assert scene.charged() == {TOKENS: 500, MONEY: 500}


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_call_is_charged_what_was_held(
    signals: Signals, error: type[BaseException]
) -> None:
    """After Ctrl-C, or a timeout, a call may have been served: its reserve is charged."""
    scene = Scene(signals, ScriptedChatModel(script=[error()]))

    with pytest.raises(error):
        scene.agent.invoke(ASKED)

    assert scene.charged() == {TOKENS: 500, MONEY: 500}


@pytest.mark.filterwarnings("ignore:coroutine .*on_llm_error")
def test_a_call_whose_event_loop_is_gone_is_charged_with_the_next(signals: Signals) -> None:
    """Where nothing can be awaited any more, the next call of this process charges the reserve."""
    scene = Scene(signals, ScriptedChatModel(script=[_answer(60)]))
    loop = asyncio.new_event_loop()
    begun = asyncio.Event()
    model = Streamed(script=[], begun=begun)
    request: Any = ModelRequest(model=model, messages=[HumanMessage("Hi!")], state={"messages": []})

    async def handler(given: Any) -> Any:
        async for _ in given.model.astream(given.messages):
            pass

    called: Any = scene.quota.awrap_model_call(request, handler)
    running = loop.create_task(called)
    loop.run_until_complete(asyncio.wait_for(begun.wait(), 60))
    # Nobody runs the loop again, nor what waits in it.
    running._log_destroy_pending = False  # type: ignore[attr-defined]
    with suppress(RuntimeError):
        # Some versions of LangChain want to report the end of the model run, and need a loop.
        called.close()
    loop.close()
    del running, called
    gc.collect()

    scene.agent.invoke(ASKED)

    assert scene.charged() == {TOKENS: 560, MONEY: 560}


def _answer(tokens: int) -> AIMessage:
    used: Any = {"input_tokens": tokens - 1, "output_tokens": 1, "total_tokens": tokens}
    return AIMessage("Hello.", usage_metadata=used)
