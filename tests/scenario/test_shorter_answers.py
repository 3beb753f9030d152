"""A model call that does not fit its budget asks for a shorter answer, if the user wants that."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from langchain.agents.middleware import wrap_model_call
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from pydantic import Field

from langchain_quota import (
    CostLimit,
    MemoryStore,
    ModelUsage,
    Quota,
    TokenLimit,
    max_usage,
    stop_reason,
)
from langchain_quota.testing import ScriptedChatModel
from tests.scene import Kind, Scene, Weather, each_kind
from tests.stores import DAY, Clock, counts, patch_pauses
from tests.telemetry import Signals
from tests.tokens import GLOBAL, During, answer

LONGEST = 16_000
"""The longest answer of the model, which is more than its budget."""
LIMIT = TokenLimit(run_limit=10_000, reserve=max_usage, min_output_tokens=500)


class Asked(ScriptedChatModel):
    """A model that notes the longest answer for which it is asked."""

    asked: list[Any] = Field(default_factory=list)
    max_tokens: int | None = None
    thinking: Any = None
    profile: Any = Field(default_factory=lambda: {"max_output_tokens": LONGEST})

    def _generate(self, messages: Any, *given: Any, **settings: Any) -> Any:
        self.asked.append(settings.get("max_tokens"))
        return super()._generate(messages, *given, **settings)


async def played(
    signals: Signals, *items: Any, script: Any = None, model: Any = None, **options: Any
) -> tuple[list[Any], Any]:
    """For how long answers a run has asked, and why it stopped."""
    asks = Asked(script=[*(script or [answer(2_000)]), "never"], **(model or {}))
    scene = Scene(signals, asks, items, **options)
    reason = stop_reason(await scene.play())
    scene.check_requests()
    return asks.asked, reason


@each_kind
async def test_the_last_calls_of_a_budget(kind: Kind, signals: Signals) -> None:
    """At 0 of 10,000 a call asks for what is left, and is blocked when that is below the floor."""
    script = [answer(2_000, "search"), answer(4_000, "search")]
    (first, second), reason = await played(signals, LIMIT, script=script, kind=kind)
    assert (8_000 < first < 10_000, 5_000 < second < 6_000) == (True, True)
    assert (reason["scope"], reason["used"]) == ("run", 6_000)


async def test_it_holds_what_is_left(signals: Signals) -> None:
    """The shorter answer is as long as it can be: with it, the quota is held to the last token."""
    store, held = MemoryStore(), list[Any]()
    limit = TokenLimit(quotas=[Quota(10_000, per="global")], reserve=max_usage, min_output_tokens=1)
    during = During(lambda: held.append(counts(store)[GLOBAL]))
    await played(signals, limit, during, store=store)
    assert (held, counts(store)[GLOBAL]) == ([10_000], 2_000)
    fits = {"profile": {"max_output_tokens": 10}}
    assert (await played(signals, limit, model=fits, store=store))[0] == [None]


async def test_it_waits_no_longer(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a call that waits on, it asks for a shorter answer when its own wait is over."""
    pauses, quota = list[float](), Quota(10_000, per="global", window="1h", smooth=True)
    limit = TokenLimit(quotas=[quota], reserve=max_usage, min_output_tokens=1, wait=DAY)
    options: Any = {"store": MemoryStore(clock=Clock()), "model": {"max_tokens": 8_000}}

    async def pause(_: str, seconds: float) -> None:
        pauses.append(seconds % 1)  # the first call looks again each second
        await asyncio.sleep(seconds)

    await played(signals, limit, **options)
    patch_pauses(monkeypatch, pause)
    first = asyncio.create_task(played(signals, limit, **options))
    await asyncio.sleep(0.3)
    (asked,), _ = await played(signals, replace(limit, wait=0.2), **options)
    assert (5_000 < asked < 8_000, sum(pauses) < 0.3, first.cancel()) == (True, True, True)


async def test_the_floor(signals: Signals) -> None:
    """An answer as long as the floor is asked for; a token less is blocked. Dollars have prices."""
    (longest,), _ = await played(signals, replace(LIMIT, min_output_tokens=1))
    for floor, asked in ((longest, [longest]), (longest + 1, [])):
        assert (await played(signals, replace(LIMIT, min_output_tokens=floor)))[0] == asked
    limit = CostLimit(run_limit="0.05", reserve=max_usage, min_output_tokens=100)
    prices: Any = lambda usage: Decimal(usage.output_tokens * 10) / 10**6  # noqa: E731
    assert await played(signals, limit, prices=prices) == ([5_000], None)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, {"min_output_tokens": None}),
        ({}, {"run_limit": 20_000, "reserve": lambda _: 21_000}),
        ({}, {"reserve": lambda _: ModelUsage(input_tokens=10_001, output_tokens=LONGEST)}),
        ({"model": {"thinking": {"type": "enabled", "budget_tokens": 4_000}}}, {}),
        ({"response_format": Weather}, {}),
    ],
)
async def test_where_no_answer_is_shortened(given: Any, limits: Any, signals: Signals) -> None:
    """It is off by default, and nothing is cut from thought or from structure."""
    asked, reason = await played(signals, replace(LIMIT, **limits), **given)
    assert (asked, reason and reason["scope"]) == ([], "run")


async def test_all_that_refuse_must_agree(signals: Signals) -> None:
    """Another limit that refuses the call without such a floor blocks it."""
    other = TokenLimit(thread_limit=9_000, reserve=max_usage, name="other")
    asked, reason = await played(signals, LIMIT, other)
    assert (asked, reason is None) == ([], False)
    (asked,), reason = await played(signals, LIMIT, replace(other, min_output_tokens=800))
    assert (7_000 < asked < 9_000, reason) == (True, None)


SETTINGS = {
    "langchain_openai.ChatOpenAI": "max_completion_tokens",
    "langchain_anthropic.ChatAnthropic": "max_tokens",
    "langchain_google_genai.ChatGoogleGenerativeAI": "max_output_tokens",
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_each_providers_setting(name: str, signals: Signals) -> None:
    """The call has the setting that wins over the model's own, by its provider's class."""
    (package, kind), seen = name.split("."), list[Any]()
    model: Any = {"model": "some-model", "api_key": "none", "max_tokens": LONGEST}
    made: BaseChatModel = getattr(pytest.importorskip(package), kind)(**model)

    @wrap_model_call
    async def answering(request: Any, handler: Any) -> Any:
        seen.append(request.model_settings)
        return AIMessage("done", usage_metadata=answer(10).usage_metadata)

    await Scene(signals, made, [LIMIT, answering]).play()
    (settings,) = seen
    assert list(settings) == [SETTINGS[name]]
