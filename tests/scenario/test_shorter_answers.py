"""A model call that does not fit its budget asks for a shorter answer, if the user wants that."""

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
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
from tests.stores import counts
from tests.telemetry import Signals
from tests.tokens import GLOBAL, During, answer

LONGEST = 16_000
"""The longest answer of the model, which is more than its budget."""


class Asked(ScriptedChatModel):
    """A model that notes the longest answer for which it is asked."""

    asked: list[Any] = Field(default_factory=list)
    max_tokens: int | None = None
    thinking: Any = None

    def _generate(self, messages: Any, *given: Any, **settings: Any) -> Any:
        self.asked.append(settings.get("max_tokens"))
        return super()._generate(messages, *given, **settings)


def model(*script: AIMessage, **options: Any) -> Asked:
    options.setdefault("profile", {"max_output_tokens": LONGEST})
    return Asked(script=[*script, "never"], **options)


@each_kind
async def test_the_last_calls_of_a_budget(kind: Kind, signals: Signals) -> None:
    """At 0 of 10,000 a call asks for what is left, and is blocked when that is below the floor."""
    limit = TokenLimit(run_limit=10_000, reserve=max_usage, min_output_tokens=500)
    asks = model(answer(2_000, "search"), answer(4_000, "search"))
    scene = Scene(signals, asks, [limit], kind=kind)
    reason = stop_reason(await scene.play())
    first, second = asks.asked
    assert 8_000 < first < 10_000
    assert 5_000 < second < 6_000
    assert reason is not None
    assert (reason["scope"], reason["used"]) == ("run", 6_000)
    scene.check_requests()


async def test_it_holds_what_is_left(signals: Signals) -> None:
    """The shorter answer is as long as it can be: with it, the quota is held to the last token."""
    store, held = MemoryStore(), list[Any]()
    limit = TokenLimit(quotas=[Quota(10_000, per="global")], reserve=max_usage, min_output_tokens=1)
    asks = model(answer(2_000))
    during = During(lambda: held.append(counts(store)[GLOBAL]))
    await Scene(signals, asks, [limit, during], store=store).play()
    assert (held, counts(store)[GLOBAL]) == ([10_000], 2_000)
    fits = model(answer(2_000), profile={"max_output_tokens": 10})
    await Scene(signals, fits, [limit], store=store).play()
    assert fits.asked == [None]


async def test_the_floor(signals: Signals) -> None:
    """An answer that may be as long as the floor is asked for; a token less is blocked."""
    limit = TokenLimit(run_limit=10_000, reserve=max_usage, min_output_tokens=1)
    asks = model(answer(2_000))
    await Scene(signals, asks, [limit]).play()
    (longest,) = asks.asked
    for floor, asked in ((longest, [longest]), (longest + 1, [])):
        asks = model(answer(2_000))
        await Scene(signals, asks, [replace(limit, min_output_tokens=floor)]).play()
        assert asks.asked == asked


async def test_dollars(signals: Signals) -> None:
    """Of a budget in dollars, the price says how long the answer may be."""
    limit = CostLimit(run_limit="0.05", reserve=max_usage, min_output_tokens=100)
    asks = model(answer(2_000))
    given: Any = {"prices": lambda usage: Decimal(usage.output_tokens * 10) / 10**6}
    assert stop_reason(await Scene(signals, asks, [limit], **given).play()) is None
    assert asks.asked == [5_000]


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, {"min_output_tokens": None}),
        ({}, {"run_limit": 20_000, "reserve": lambda _: 21_000}),
        ({}, {"reserve": lambda _: ModelUsage(input_tokens=10_001, output_tokens=LONGEST)}),
        ({"thinking": {"type": "enabled", "budget_tokens": 4_000}}, {}),
        ({"response_format": Weather}, {}),
    ],
    ids=["off", "a number", "input", "thinking", "structured"],
)
async def test_where_no_answer_is_shortened(given: Any, limits: Any, signals: Signals) -> None:
    """It is off by default, and nothing is cut from thought or from structure."""
    options = {"run_limit": 10_000, "reserve": max_usage, "min_output_tokens": 500, **limits}
    made = {key: value for key, value in given.items() if key == "response_format"}
    asks = model(answer(2_000), **{key: value for key, value in given.items() if key not in made})
    reason = stop_reason(await Scene(signals, asks, [TokenLimit(**options)], **made).play())
    assert (asks.asked, reason and reason["scope"]) == ([], "run")


async def test_all_that_refuse_must_agree(signals: Signals) -> None:
    """Another limit that refuses the call without such a floor blocks it."""
    limits = [
        TokenLimit(run_limit=10_000, reserve=max_usage, min_output_tokens=500),
        TokenLimit(thread_limit=9_000, reserve=max_usage, name="other"),
    ]
    asks = model(answer(2_000))
    assert stop_reason(await Scene(signals, asks, limits).play()) is not None
    assert asks.asked == []
    both = [limits[0], replace(limits[1], min_output_tokens=800)]
    assert stop_reason(await Scene(signals, asks, both).play()) is None
    (asked,) = asks.asked
    assert 7_000 < asked < 9_000


SETTINGS = {
    "langchain_openai.ChatOpenAI": "max_completion_tokens",
    "langchain_anthropic.ChatAnthropic": "max_tokens",
    "langchain_google_genai.ChatGoogleGenerativeAI": "max_output_tokens",
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_each_providers_setting(name: str, signals: Signals) -> None:
    """The call has the setting that wins over the model's own, by its provider's class."""
    package, _, kind = name.partition(".")
    made: BaseChatModel = getattr(pytest.importorskip(package), kind)(
        model="some-model", api_key="none", max_tokens=LONGEST
    )
    seen: list[Any] = []

    class Seen(During):
        async def awrap_model_call(self, request: Any, handler: Any) -> Any:
            seen.append(request.model_settings)
            return AIMessage("done", usage_metadata=answer(10).usage_metadata)

    limit = TokenLimit(run_limit=10_000, reserve=max_usage, min_output_tokens=500)
    scene = Scene(signals, made, [limit, Seen(str)])
    await scene.play()
    (settings,) = seen
    assert list(settings) == [SETTINGS[name]]
