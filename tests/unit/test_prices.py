"""Prices: as genai-prices has them, or as the user says."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.errors import UnknownPriceError
from langchain_quota.model_usage import ModelUsage
from langchain_quota.prices import Price, cost, highest_cost, listed_price, priced, resolve_prices
from tests.examples import examples

genai_prices = pytest.importorskip("genai_prices")
from genai_prices.data_snapshot import get_snapshot  # noqa: E402 - it may be missing

DATE = datetime(2026, 11, 22, 12, tzinfo=UTC)
PRICES = partial(listed_price, at=DATE)

KNOWN = {
    "gpt-4o-2024-08-06": "openai",
    "gpt-4o-mini-2024-07-18": "openai",
    "gpt-4.1-2025-04-14": "openai",
    "gpt-5-2025-08-07": "openai",
    "o3-2025-04-16": "openai",
    "claude-opus-4-6": "anthropic",
    "claude-haiku-4-5-20251001": "anthropic",
    "gemini-2.5-pro": "google_genai",
    "gemini-2.5-flash": "google_vertexai",
    "mistral-large-latest": "mistralai",
    "deepseek-chat": "deepseek",
    "anthropic.claude-sonnet-4-5-20250929-v1:0": "amazon_bedrock",
}
ALL = [
    (provider.id, model.id)
    for provider in get_snapshot().providers
    for model in provider.models
    if provider.find_model(model.id)
]
ALL += [
    (provider.id, model)
    for provider in get_snapshot().providers
    for model in KNOWN
    if provider.find_model(model, all_providers=get_snapshot().providers)
]
"""All models of the list, and those that a provider has of others."""


def theirs(usage: ModelUsage, at: datetime = DATE) -> Decimal:
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


def usage_of(model: str, given: int, made: int, **more: Any) -> ModelUsage:
    return ModelUsage(
        response_model=model,
        input_tokens=given,
        output_tokens=made,
        total_tokens=given + made,
        **more,
    )


@st.composite
def usages(draw: st.DrawFn) -> ModelUsage:
    """A run of any model of the list: its details are parts of the whole."""
    provider, model = draw(st.sampled_from(ALL))
    sizes = st.integers(0, 400_000)
    read, written, sounds, text = (draw(sizes) for _ in range(4))
    reasoning, spoken, said = (draw(sizes) for _ in range(3))
    return usage_of(
        *(model, read + written + sounds + text, reasoning + spoken + said),
        provider=provider,
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
    assert listed_price(usage, at=at) == theirs(usage, at)


@pytest.mark.parametrize(
    ("tokens", "microdollars"), [(200_000, 250_010), (200_001, 500_018)], ids=["short", "long"]
)
def test_a_long_prompt_costs_more(tokens: int, microdollars: int) -> None:
    """Where the price depends on the size of the prompt, it is that of all its tokens."""
    usage = usage_of("gemini-2.5-pro", tokens, 1, provider="google_genai")
    assert cost(usage, PRICES) == microdollars


@pytest.mark.parametrize("provider", ["ollama", "openai", ""])
def test_a_model_without_a_price_is_an_error(provider: str) -> None:
    """A user's own model gets advice on its price, and never another model's price."""
    usage = usage_of("llama-of-mine", 1, 1, provider=provider)
    with pytest.raises(UnknownPriceError, match=r"prices=\{'llama-of-mine': Price\(.* model="):
        cost(usage, PRICES)


# Prices of the user's own.


def test_a_table_goes_first() -> None:
    """A model in the table has the table's price; others have that of the list."""
    prices = resolve_prices({"gpt-4o": Price(input="1", output="2")})
    usage = usage_of("gpt-4o-2024-08-06", 1_000, 100, provider="openai", request_model="gpt-4o")
    assert cost(usage, prices) == 1_200
    assert cost(replace(usage, request_model=""), prices) == 3_500


@pytest.mark.parametrize(
    ("price", "microdollars"),
    [
        ({}, 2_000),
        ({"cache_read": "0.1"}, 1_910),
        ({"cache_creation": "2"}, 2_300),
        ({"cache_creation": "2", "cache_creation_1h": "4"}, 2_700),
        ({"cache_creation_1h": "4"}, 2_600),
        ({"input_audio": 11}, 2_500),
        ({"output_audio": Decimal(21)}, 3_000),
        ({"reasoning": "0"}, 1_900),
    ],
)
def test_parts_have_prices_of_their_own(price: Mapping[str, Any], microdollars: int) -> None:
    """A part without a price has that of the whole; one with a price is paid once."""
    usage = usage_of(
        *("mine", 1_000, 1_000),
        cache_read_tokens=100,
        cache_creation_tokens=300,
        cache_creation_1h_tokens=200,
        input_audio_tokens=50,
        output_audio_tokens=50,
        reasoning_tokens=100,
    )
    prices = resolve_prices({"mine": Price(input="1", output="1", **price)})
    assert cost(usage, prices) == microdollars


def test_a_model_has_a_price_before_it_is_called() -> None:
    """Whether there is a price is known from the name of the model alone."""
    assert priced(ModelUsage(provider="openai", request_model="gpt-5"), PRICES) == 0
    with pytest.raises(UnknownPriceError, match="'mine'"):
        priced(ModelUsage(provider="openai", request_model="mine"), PRICES)


def test_a_function_may_look_up() -> None:
    """What a function does not find in a table of its own has no price."""
    table: dict[str, Decimal] = {}
    with pytest.raises(UnknownPriceError, match="'mine'") as raised:
        cost(usage_of("mine", 1, 0), lambda usage: table[usage.response_model])
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_function_must_give_decimals() -> None:
    """A float is refused where it comes from, and not rounded somehow."""
    prices: Any = lambda _: 0.1  # noqa: E731 - what users write
    with pytest.raises(TypeError, match=r"prices must give a Decimal of dollars, .* not 0\.1"):
        cost(usage_of("mine", 1, 0), resolve_prices(prices))


@pytest.mark.parametrize(
    ("prices", "text"),
    [
        ({"mine": "2.50"}, "must have a Price for the name of each model, not '2.50' for 'mine'"),
        ({1: Price(input=1, output=1)}, "for 1"),
        ("2.50", "must be a table of Price by model, a function or None, not '2.50'"),
    ],
)
def test_other_prices_are_refused(prices: Any, text: str) -> None:
    """What are no prices is refused at once."""
    with pytest.raises(TypeError, match=text):
        resolve_prices(prices)


# The most that a call can cost.


def test_the_bound_takes_the_dearest_way() -> None:
    """Before a call nobody knows what will be cached: all of it may be, for an hour."""
    usage = usage_of("claude-opus-4-6", 1_000, 100, provider="anthropic")
    assert highest_cost(usage, PRICES) == 12_500  # 1,000 of $10, 100 of $25


def test_the_bound_takes_a_dear_cache() -> None:
    """What is read from a cache may be dearer than what is not."""
    prices = resolve_prices({"mine": Price(input=1, output=1, cache_read=2)})
    assert highest_cost(usage_of("mine", 1_000, 100), prices) == 2_100


@examples(300)
@given(usage=usages())
def test_nothing_costs_more_than_the_bound(usage: ModelUsage) -> None:
    """However a provider splits the tokens of texts, they cost at most the bound."""
    usage = replace(usage, input_audio_tokens=0, output_audio_tokens=0)
    plain = replace(
        usage,
        cache_read_tokens=0,
        cache_creation_tokens=0,
        cache_creation_1h_tokens=0,
        reasoning_tokens=0,
    )
    assert cost(usage, PRICES) <= highest_cost(plain, PRICES)


# Without genai-prices.
