"""Calls that reserve tokens of a smooth quota and end in any order; waiting calls see each end."""

import asyncio
import time
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.outputs import ChatResult

from langchain_quota import MemoryStore, Quota, TokenLimit
from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.limits import Limit
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Form, Scene, both_forms
from tests.stores import Clock, counts
from tests.telemetry import Signals
from tests.tokens import answer

HOUR: dict[str, Any] = {"per": "global", "window": "1h", "smooth": True}
ASKED: Any = {"messages": [("user", "Hi!")]}


class Slow(ScriptedChatModel):
    """Answers after a while."""

    async def _agenerate(self, *args: Any, **options: Any) -> ChatResult:
        await asyncio.sleep(0.05)
        return super()._generate(*args, **options)

    def _generate(self, *args: Any, **options: Any) -> ChatResult:
        time.sleep(0.05)
        return super()._generate(*args, **options)


class Asked(MemoryStore):
    """Counts the requests."""

    asked = 0

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        self.asked += 1
        return super().acquire(request)


async def test_no_reserve_of_a_rate_limiter_is_lost() -> None:
    """The prompts of one `agenerate` end in their order, though they began in another one."""
    store = MemoryStore(clock=Clock())
    limiter = store.rate_limiter("openai", tokens=10_000, window="1h", reserve=2_000)
    given: dict[str, Any] = {"rate_limiter": limiter, "callbacks": [limiter]}
    await ScriptedChatModel(script=lambda _: answer(10), **given).agenerate(
        [[HumanMessage("Hi!")]] * 4
    )
    assert [usage.used for usage in store.usages()] == [40]


@pytest.mark.parametrize("limited_by", ["a limit", "a rate limiter"])
@both_forms
async def test_waiting_calls_see_what_others_give_back(
    signals: Signals, form: Form, limited_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends wakes the next one: nobody waits for the rate, or asks again and again."""
    for module in ("features.waiting", "agents.rate_limiter"):
        monkeypatch.setattr(f"langchain_quota.{module}.LOOKS_AGAIN", 60.0)
    store, options = Asked(), dict[str, Any](script=lambda _: answer(10))
    limits: list[Limit] = [TokenLimit(quotas=[Quota(1_000, **HOUR)], reserve=900, wait="1h")]
    if limited_by == "a rate limiter":
        limiter = store.rate_limiter("openai", tokens=1_000, window="1h", reserve=900)
        options |= {"rate_limiter": limiter, "callbacks": [limiter]}
        limits = []
    agent = Scene(signals, Slow(**options), limits, store=store, checkpointer=None).agent

    def run(_: int) -> Any:
        return agent.ainvoke(ASKED) if form == "async" else asyncio.to_thread(agent.invoke, ASKED)

    async with asyncio.timeout(50):
        await asyncio.gather(*map(run, range(5)))
    assert sum(counts(store).values()) <= 50
    assert store.asked <= 30
