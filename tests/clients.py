"""The real clients of the providers that the tests play, and what those report to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from pydantic import SecretStr

from langchain_quota.features.budgets.prices import listed_price
from tests.provider import Answer

openai = pytest.importorskip("langchain_openai")
anthropic = pytest.importorskip("langchain_anthropic")
pytest.importorskip("genai_prices")

Make = Callable[..., BaseChatModel]
KEY = SecretStr("none")
PRICES = partial(listed_price, at=datetime(2026, 11, 22, tzinfo=UTC))
"""The list's prices at one date."""


def chat(url: str, **options: Any) -> Any:
    options = {"model": "gpt-4o", "stream_usage": True, "max_retries": 0, **options}
    return openai.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, **options)


def responses(url: str, **options: Any) -> Any:
    return chat(url, use_responses_api=True, **options)


def messages(url: str, **options: Any) -> Any:
    options = {"model": "claude-opus-4-6", "max_tokens": 100, "max_retries": 0, **options}
    return anthropic.ChatAnthropic(base_url=url, api_key=KEY, **options)


def gemini(url: str, **_: Any) -> Any:
    """A client that does not stream."""
    google = pytest.importorskip("langchain_google_genai")
    options = {"model": "gemini", "max_retries": 0, "base_url": url}
    return google.ChatGoogleGenerativeAI(api_key=KEY, **options)


apis = pytest.mark.parametrize("api", [chat, responses, messages])
ANSWERING = {
    "gpt-4o": "gpt-4o-2024-08-06",
    "gpt-5": "gpt-5-2025-08-07",
    "claude-opus-4-6": "claude-opus-4-6",
}
"""The model that says it has answered, by the one that was asked."""


def of_openai(
    prompt: str, answer: str, given: int, made: int, *, cached: int = 0, reasoning: int = 0
) -> dict[str, Any]:
    return {
        f"{prompt}_tokens": given,
        f"{answer}_tokens": made,
        "total_tokens": given + made,
        f"{prompt}_tokens_details": {"cached_tokens": cached},
        f"{answer}_tokens_details": {"reasoning_tokens": reasoning},
    }


def of_messages(given: int, made: int, *, read: int = 0, **written: Any) -> dict[str, Any]:
    split = {f"ephemeral_{ttl}_input_tokens": written.get(f"for_{ttl}", 0) for ttl in ("5m", "1h")}
    report: dict[str, Any] = {
        "input_tokens": given,
        "output_tokens": made,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written.get("written", sum(split.values())),
    }
    return report | ({} if "written" in written else {"cache_creation": split})


USAGES: dict[Make, Callable[..., dict[str, Any]]] = {
    chat: partial(of_openai, "prompt", "completion"),
    responses: partial(of_openai, "input", "output"),
    messages: of_messages,
}


def reporting(api: Make, given: int, made: int, *, tier: str = "", **more: Any) -> Answer:
    """An answer of an API's default model that reports so many tokens of input and output."""
    asked = more.pop("model", "claude-opus-4-6" if api is messages else "gpt-4o")
    told = {name: more.pop(name) for name in ("stops_after", "then") if name in more}
    usage = USAGES[api](given, made, **more)
    return Answer(usage=usage, model=ANSWERING[asked], service_tier=tier, **told)


@dataclass(frozen=True)
class Report:
    """A report of a provider, and its price in nanodollars: of a stream that says less another."""

    api: Make
    given: int
    made: int
    nanodollars: int
    streamed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> Answer:
        model = {name: self.options[name] for name in ("model",) if name in self.options}
        return reporting(self.api, self.given, self.made, **model, **self.details)

    @property
    def input(self) -> Any:
        """All tokens of the prompt: Anthropic has those of its cache apart."""
        cached = ("read", "written", "for_5m", "for_1h")
        return self.given + sum(self.details.get(name, 0) for name in cached)


GPT_5 = {"model": "gpt-5"}
PRIORITY, FLEX = ({**GPT_5, "service_tier": tier} for tier in ("priority", "flex"))
CACHED = {"cached": 1_200, "reasoning": 100}
SERVED, SERVED_FLEX, NOT_SERVED = (
    {**CACHED, "tier": tier} for tier in ("priority", "flex", "default")
)
BOTH_TIMES = {"read": 900, "for_5m": 500, "for_1h": 1_500}
REPORTS = {
    # 183 of $2.50 a million, 1,024 of $1.25, 31 of $10: $0.0020475
    "chat, cached": Report(chat, 1_207, 31, 2_047_500, details={"cached": 1_024}),
    # 800 of $2.50, 1,200 of $0.25, 300 of $20
    "chat, priority": Report(chat, 2_000, 300, 8_300_000, None, PRIORITY, SERVED),
    # 800 of $0.625, 1,200 of $0.0625, 300 of $5
    "chat, flex": Report(chat, 2_000, 300, 2_075_000, None, FLEX, SERVED_FLEX),
    # 800 of $1.25, 1,200 of $0.125, 300 of $10
    "chat, priority not served": Report(chat, 2_000, 300, 4_150_000, None, PRIORITY, NOT_SERVED),
    "responses, cached": Report(responses, 2_000, 300, 4_150_000, None, GPT_5, CACHED),
    "responses, priority": Report(responses, 2_000, 300, 8_300_000, None, GPT_5, SERVED),
    # 25 of $5, 900 of $0.50, 80 of $25, 2,000 of $6.25
    "messages, written": Report(
        messages, 25, 80, 15_075_000, details={"read": 900, "written": 2_000}
    ),
    # 25 of $5, 900 of $0.50, 80 of $25, 500 of $6.25, 1,500 of $10
    "messages, both times": Report(messages, 25, 80, 20_700_000, 15_075_000, details=BOTH_TIMES),
}
