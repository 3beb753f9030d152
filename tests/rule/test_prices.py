"""Prices of the list: as genai-prices has them, and never above the bound before a call."""

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota import CostLimit, Price, QuotaMiddleware
from langchain_quota.features.budgets import prices as priced
from langchain_quota.limits.call import ModelUsage
from langchain_quota.testing import ScriptedChatModel
from tests.examples import examples
from tests.scene import Scene
from tests.telemetry import Signals, paid

genai_prices = pytest.importorskip("genai_prices")
from genai_prices.data_snapshot import get_snapshot  # noqa: E402 - it may be missing

DATE = datetime(2026, 11, 22, 12, tzinfo=UTC)
PRICES = partial(priced.listed_price, at=DATE)
KNOWN = {
    *("gpt-4o-2024-08-06", "gpt-5-2025-08-07", "o3-2025-04-16", "claude-opus-4-6"),
    *("gemini-2.5-pro", "mistral-large-latest", "deepseek-chat"),
    "anthropic.claude-sonnet-4-5-20250929-v1:0",
}


@cache
def listed() -> list[tuple[str, str]]:
    """All models of the list, and those that a provider has of others."""
    providers = get_snapshot().providers
    return [
        (provider.id, model)
        for provider in providers
        for model in [*(each.id for each in provider.models), *KNOWN]
        if provider.find_model(model, all_providers=providers)
    ]


def theirs(usage: ModelUsage, at: datetime) -> Decimal:
    """What genai-prices itself says of the same usage."""
    counts: dict[str, Any] = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_creation_tokens,
        "cache_write_5m_tokens": usage.cache_creation_tokens - usage.cache_creation_1h_tokens,
        "cache_write_1h_tokens": usage.cache_creation_1h_tokens,
        "input_audio_tokens": usage.input_audio_tokens,
        "output_audio_tokens": usage.output_audio_tokens,
        "output_reasoning_tokens": usage.reasoning_tokens,
        "cache_audio_read_tokens": 0,
        "cache_audio_write_tokens": 0,
    }
    context = {"service_tier": usage.service_tier, "speed": usage.speed}
    price: Decimal = genai_prices.calc_price(
        genai_prices.Usage(**counts),
        usage.models[0],
        provider_id=usage.provider or None,
        genai_request_timestamp=at,
        price_context={name: value for name, value in context.items() if value},
    ).total_price
    return price


@st.composite
def usages(draw: st.DrawFn) -> ModelUsage:
    """A run of any model of the list: its details are parts of the whole."""
    provider, model = draw(st.sampled_from(listed()))
    sizes = st.integers(0, 400_000)
    read, written, sounds, text, reasoning, spoken, said = (draw(sizes) for _ in range(7))
    return ModelUsage(
        response_model=model,
        provider=provider,
        input_tokens=read + written + sounds + text,
        output_tokens=reasoning + spoken + said,
        total_tokens=read + written + sounds + text + reasoning + spoken + said,
        service_tier=draw(st.sampled_from(["", "priority", "flex", "fast", "default"])),
        speed=draw(st.sampled_from(["", "fast"])),
        cache_read_tokens=read,
        cache_creation_tokens=written,
        cache_creation_1h_tokens=draw(st.integers(0, written)),
        input_audio_tokens=sounds,
        output_audio_tokens=spoken,
        reasoning_tokens=reasoning,
    )


@examples(500)
@given(usage=usages(), hours=st.integers(-24 * 700, 24 * 90))
def test_every_usage_costs_what_the_list_says(usage: ModelUsage, hours: int) -> None:
    """Whatever a run has used, and when, it costs what genai-prices says."""
    at = DATE + timedelta(hours=hours)
    assert priced.listed_price(usage, at=at) == theirs(usage, at)


@examples(300)
@given(usage=usages())
def test_nothing_costs_more_than_the_bound(usage: ModelUsage) -> None:
    """However a provider splits the tokens of texts, they cost at most the bound."""
    usage = replace(usage, input_audio_tokens=0, output_audio_tokens=0)
    parts = ("cache_read", "cache_creation", "cache_creation_1h", "reasoning")
    none: Any = {f"{each}_tokens": 0 for each in parts}
    assert priced.cost(usage, PRICES) <= priced.highest_cost(replace(usage, **none), PRICES)


@pytest.mark.parametrize(
    ("name", "provider", "plain", "of"),
    [
        ("openai/gpt-4o", "openai", "gpt-4o", "openai"),
        ("openai/gpt-4o", "", "gpt-4o", "openai"),
        ("anthropic/claude-sonnet-4.5", "openai", "claude-sonnet-4-5", "anthropic"),
        ("anthropic/claude-sonnet-4.5", "openrouter", "anthropic/claude-sonnet-4.5", "openrouter"),
        ("azure/gpt-4o", "my-gateway", "gpt-4o", "azure"),
        ("meta-llama/llama-3.1-8b-instruct", "openai", None, "openrouter"),
        ("eu.anthropic.claude-sonnet-4-20250514-v1:0", "", None, "aws"),
        ("us.anthropic.claude-sonnet-4-20250514-v1:0", "anthropic_bedrock", None, "aws"),
        ("bedrock/us.anthropic.claude-sonnet-4-20250514-v1:0", "openai", None, "aws"),
    ],
)
def test_names_of_gateways(name: str, provider: str, plain: str | None, of: str) -> None:
    """A model costs what its provider takes, also if a gateway has its own name for it."""
    tokens: dict[str, Any] = {"input_tokens": 300_000, "output_tokens": 9, "total_tokens": 300_009}
    listed = plain or name.removeprefix("bedrock/")
    known = theirs(replace(ModelUsage(response_model=listed, provider=of), **tokens), DATE)
    asked = replace(ModelUsage(request_model=name, provider=provider), **tokens)
    assert priced.listed_price(asked, at=DATE) == known


@pytest.mark.parametrize("name", ["azure/prod-chat", "mine/gpt-4o", "gpt-4.1-mine", "eu.mine.gpt"])
def test_what_no_list_has_stays_unknown(name: str) -> None:
    """A prefix does not make a price."""
    assert priced.listed_price(ModelUsage(request_model=name, provider="openai"), at=DATE) is None


async def test_without_the_list_a_table_works_alone(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without genai-prices, the lack of prices says what to install."""
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    table, limits = {"mine": Price(input=1, output=1)}, [CostLimit(run_limit=1)]
    model = ScriptedChatModel(model="mine", script=[paid(5)])
    await Scene(signals, model, limits, prices=table).play()
    assert set(signals.samples("langchain_quota_spent_dollars_total").values()) == {0.000005}
    with pytest.raises(ModuleNotFoundError, match=r'pip install "langchain-quota\[cost\]"'):
        QuotaMiddleware(limits, telemetry=signals.telemetry)
