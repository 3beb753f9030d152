"""The real clients of the fake provider, and what it reports to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from pydantic import SecretStr

from langchain_quota.model_usage import ModelUsage
from langchain_quota.prices import listed_price

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


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of a provider, what is read of it, and its price in microdollars.

    Attributes:
        microdollars: Where a stream says less, its price is another one.
    """

    api: Make
    usage: Mapping[str, Any]
    read: ModelUsage
    microdollars: int
    service_tier: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    if_streamed: tuple[ModelUsage, int] | None = None

    @property
    def model(self) -> str:
        return self.read.response_model


GPT_4O = ModelUsage(
    provider="openai", request_model="gpt-4o", response_model="gpt-4o-2024-08-06", total_tokens=1
)
GPT_5 = replace(GPT_4O, request_model="gpt-5", response_model="gpt-5-2025-08-07")
CLAUDE = ModelUsage(
    provider="anthropic",
    request_model="claude-opus-4-6",
    response_model="claude-opus-4-6",
)


def numbers(usage: ModelUsage, given: int, made: int, **details: Any) -> ModelUsage:
    return replace(
        usage, input_tokens=given, output_tokens=made, total_tokens=given + made, **details
    )


def of_chat(given: int, made: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": given + made,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning, "audio_tokens": 0},
    }


def of_responses(given: int, made: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": given,
        "output_tokens": made,
        "total_tokens": given + made,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": reasoning},
    }


def of_messages(given: int, made: int, *, read: int = 0, **written: int) -> dict[str, Any]:
    split = {f"ephemeral_{ttl}_input_tokens": written.get(f"for_{ttl}", 0) for ttl in ("5m", "1h")}
    total = written.get("written", sum(split.values()))
    report = {
        "input_tokens": given,
        "output_tokens": made,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": total,
    }
    return report | ({} if "written" in written else {"cache_creation": split})


REPORTS = {
    "chat": Report(
        api=chat,
        usage=of_chat(1_000, 300),
        read=numbers(GPT_4O, 1_000, 300),
        microdollars=5_500,  # 1,000 of $2.50 a million, 300 of $10
    ),
    "chat, cached": Report(
        api=chat,
        usage=of_chat(1_207, 31, cached=1_024),
        read=numbers(GPT_4O, 1_207, 31, cache_read_tokens=1_024),
        microdollars=2_048,  # 183 of $2.50, 1,024 of $1.25, 31 of $10: 2,047.5
    ),
    "chat, priority": Report(
        api=chat,
        usage=of_chat(2_000, 300, cached=1_200, reasoning=100),
        service_tier="priority",
        options={"model": "gpt-5", "service_tier": "priority"},
        read=numbers(
            *(GPT_5, 2_000, 300),
            service_tier="priority",
            cache_read_tokens=1_200,
            reasoning_tokens=100,
        ),
        microdollars=8_300,  # 800 of $2.50, 1,200 of $0.25, 300 of $20
    ),
    "chat, flex": Report(
        api=chat,
        usage=of_chat(2_000, 300, cached=1_200, reasoning=100),
        service_tier="flex",
        options={"model": "gpt-5", "service_tier": "flex"},
        read=numbers(
            *(GPT_5, 2_000, 300),
            service_tier="flex",
            cache_read_tokens=1_200,
            reasoning_tokens=100,
        ),
        microdollars=2_075,  # 800 of $0.625, 1,200 of $0.0625, 300 of $5
    ),
    "chat, priority asked and not served": Report(
        api=chat,
        usage=of_chat(2_000, 300, cached=1_200),
        service_tier="default",
        options={"model": "gpt-5", "service_tier": "priority"},
        read=numbers(GPT_5, 2_000, 300, service_tier="default", cache_read_tokens=1_200),
        microdollars=4_150,  # 800 of $1.25, 1,200 of $0.125, 300 of $10
    ),
    "responses, cached": Report(
        api=responses,
        usage=of_responses(1_500, 120, cached=1_024, reasoning=64),
        options={"model": "gpt-5"},
        read=numbers(
            *(GPT_5, 1_500, 120),
            service_tier="default",
            cache_read_tokens=1_024,
            reasoning_tokens=64,
        ),
        microdollars=1_923,  # 476 of $1.25, 1,024 of $0.125, 120 of $10
    ),
    "responses, priority": Report(
        api=responses,
        usage=of_responses(1_500, 120, cached=1_024, reasoning=64),
        service_tier="priority",
        options={"model": "gpt-5"},
        read=numbers(
            *(GPT_5, 1_500, 120),
            service_tier="priority",
            cache_read_tokens=1_024,
            reasoning_tokens=64,
        ),
        microdollars=3_846,  # 476 of $2.50, 1,024 of $0.25, 120 of $20
    ),
    "messages": Report(
        api=messages,
        usage=of_messages(25, 80, read=900),
        read=numbers(CLAUDE, 925, 80, cache_read_tokens=900),
        microdollars=2_575,  # 25 of $5, 900 of $0.50, 80 of $25
    ),
    "messages, written to the cache": Report(
        api=messages,
        usage=of_messages(25, 80, read=900, written=2_000),
        read=numbers(CLAUDE, 2_925, 80, cache_read_tokens=900, cache_creation_tokens=2_000),
        microdollars=15_075,  # and 2,000 of $6.25
    ),
    "messages, written for different times": Report(
        api=messages,
        usage=of_messages(25, 80, read=900, for_5m=500, for_1h=1_500),
        read=numbers(
            *(CLAUDE, 2_925, 80),
            cache_read_tokens=900,
            cache_creation_tokens=2_000,
            cache_creation_1h_tokens=1_500,
        ),
        microdollars=20_700,  # and 500 of $6.25, 1,500 of $10
        if_streamed=(
            numbers(CLAUDE, 2_925, 80, cache_read_tokens=900, cache_creation_tokens=2_000),
            15_075,
        ),
    ),
    "messages, tier": Report(
        api=messages,
        usage=of_messages(25, 80) | {"service_tier": "standard", "speed": "standard"},
        read=numbers(CLAUDE, 25, 80, service_tier="standard", speed="standard"),
        microdollars=2_125,
        if_streamed=(numbers(CLAUDE, 25, 80), 2_125),
    ),
}
