"""Model calls whose end is never reported: what is charged for them."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware.types import ModelRequest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGenerationChunk

from langchain_quota import CostLimit, MemoryStore, Quota, TokenLimit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Scene, cancel_at
from tests.stores import Clock, FickleStore, counts, quota
from tests.telemetry import Signals

TOKENS = "model.total_tokens:global:"
MONEY = "model.nanodollars:global:"
ASKED: Any = {"messages": [("user", "Hi!")]}


class Streamed(ScriptedChatModel):
    """Streams a word, and then nothing more."""

    begun: Any = None

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield ChatGenerationChunk(message=AIMessageChunk(content="Good "))
        if self.begun is not None:
            self.begun.set()
        await asyncio.Event().wait()


class Budget:
    """A model under budgets of tokens and money in a store whose clock a test sets."""

    def __init__(self, signals: Signals, model: Any) -> None:
        self.clock = Clock()
        self.store = MemoryStore(clock=self.clock)
        self.quota = quota(
            signals,
            TokenLimit(quotas=[Quota(10_000, per="global")], reserve=500),
            CostLimit(quotas=[Quota(1, per="global")], reserve="0.0000005"),
            store=FickleStore(self.store),
            clock=self.clock,
            prices=lambda used: Decimal(used.total_tokens) / 10**9,
        )
        self.agent = Scene(signals, model, [self.quota], checkpointer=None).agent

    def charged(self) -> dict[str, int]:
        """What is charged when all that was held is released."""
        self.clock.now += 3600
        return counts(self.store)


async def test_a_stream_that_is_left_is_charged_what_was_held(signals: Signals) -> None:
    """A stream that is left or cancelled in the middle is charged its reserve: nothing is told."""
    budget = Budget(signals, Streamed(script=[]))
    stream = budget.agent.astream(ASKED, stream_mode="messages")
    async for _ in stream:
        break
    assert counts(budget.store) == {TOKENS: 500, MONEY: 500}
    await stream.aclose()
    assert budget.charged() == {TOKENS: 500, MONEY: 500}

    model = Streamed(script=[], begun=asyncio.Event())
    budget = Budget(signals, model)
    await cancel_at(model.begun, budget.agent.ainvoke(ASKED, stream_mode="messages"))
    assert budget.charged() == {TOKENS: 500, MONEY: 500}


class RateLimitError(Exception):
    """What a provider answers that has not begun."""

    status_code = 429


@pytest.mark.parametrize(
    ("error", "held"), [(KeyboardInterrupt, 500), (TimeoutError, 500), (RateLimitError, 0)]
)
def test_an_interrupted_call_is_charged_what_was_held(
    signals: Signals, error: type[BaseException], held: int
) -> None:
    """After Ctrl-C, or a timeout, a call may have been served; not where the provider refused."""
    budget = Budget(signals, [error()])

    with pytest.raises(error):
        budget.agent.invoke(ASKED)

    assert budget.charged() == ({TOKENS: held, MONEY: held} if held else {})


@pytest.mark.filterwarnings("ignore:coroutine .*on_llm_error")
def test_a_call_whose_event_loop_is_gone_is_charged_with_the_next(signals: Signals) -> None:
    """Where nothing can be awaited any more, the next call of this process charges the reserve."""
    used: Any = {"input_tokens": 59, "output_tokens": 1, "total_tokens": 60}
    budget = Budget(signals, [AIMessage("Hello.", usage_metadata=used)])
    loop = asyncio.new_event_loop()
    begun = asyncio.Event()
    model = Streamed(script=[], begun=begun)
    request: Any = ModelRequest(model=model, messages=[HumanMessage("Hi!")], state={"messages": []})

    async def handler(given: Any) -> Any:
        async for _ in given.model.astream(given.messages):
            pass

    called: Any = budget.quota.awrap_model_call(request, handler)
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

    budget.agent.invoke(ASKED)

    assert budget.charged() == {TOKENS: 560, MONEY: 560}
