"""What the tokens of a model run cost, in US dollars."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Context, Decimal, localcontext
from functools import lru_cache, partial
from typing import Any, cast

from langchain_quota.arguments import check_sync_function
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits.budgets import Price, Prices
from langchain_quota.limits.model_usage import ModelUsage
from langchain_quota.units import checked_dollars, microdollars

_PER = Decimal(10**6)
"""A price is for so many tokens."""

_EXACT = Context(prec=50)
"""The decimal context of all computations, whatever the application's own is."""

_MISSING = (
    "prices of known models need the package genai-prices: "
    'pip install "langchain-quota[cost]"; or give your own, prices={"model": Price(…)}'
)


def check_prices(prices: object) -> None:
    """Check an argument `prices`."""
    if isinstance(prices, Mapping):
        for model, price in prices.items():
            if not isinstance(model, str) or not isinstance(price, Price):
                raise TypeError(
                    f"prices must have a Price for the name of each model, not {price!r} "
                    f'for {model!r}: write Price(input="2.50", output="10")'
                )
    elif prices is not None and not callable(prices):
        raise TypeError(
            f"prices must be a table of Price by model, a function or None, not {prices!r}"
        )
    else:
        check_sync_function("prices", prices, "usage")


def resolve_prices(prices: object) -> Prices:
    """The prices that an argument `prices` means; a table wins over genai-prices."""
    if prices is None:
        if not _has_list():
            raise ModuleNotFoundError(_MISSING, name="genai_prices")
        return listed_price
    check_prices(prices)
    if isinstance(prices, Mapping):
        return partial(_tabled_price, dict(prices), listed_price if _has_list() else lambda _: None)
    return cast("Prices", prices)


def priced(usage: ModelUsage, prices: Prices) -> Decimal:
    """What a model run costs, in dollars; with nothing used, whether its model has a price."""
    unknown = UnknownPriceError(next(iter(usage.models), ""), usage.provider)
    try:
        dollars = prices(usage)
    except LookupError as error:
        raise unknown from error
    if dollars is None:
        raise unknown
    if not isinstance(dollars, Decimal):
        raise TypeError(f"prices must give a Decimal of dollars, or None, not {dollars!r}")
    return checked_dollars("what prices gives", dollars)


def cost(usage: ModelUsage, prices: Prices) -> int:
    """What a model run costs, in microdollars, rounded up once.

    A run that has used nothing, and an answer from LangChain's response cache, cost nothing.
    """
    if usage.cached or not usage.total_tokens:
        return 0
    return microdollars(priced(usage, prices))


def highest_cost(usage: ModelUsage, prices: Prices) -> int:
    """The most that so many tokens can cost, in microdollars.

    Before the call it is not known which tokens the provider will read from its cache, write to it,
    or use for reasoning. So the highest price is taken.
    """
    # For one model of the list, reading the cache costs more than `input`.
    read = replace(usage, cache_read_tokens=usage.input_tokens)
    written = replace(usage, cache_creation_tokens=usage.input_tokens)
    inputs = (usage, read, written, replace(written, cache_creation_1h_tokens=usage.input_tokens))
    return max(
        cost(replace(each, reasoning_tokens=reasoning), prices)
        for each in inputs
        for reasoning in (0, usage.output_tokens)
    )


def listed_price(usage: ModelUsage, *, at: datetime | None = None) -> Decimal | None:
    """What a model run costs by the list of genai-prices; `None` if the model is not in it."""
    # A newer list, which an application may have genai-prices load, is used within a minute.
    minute = int((time.time() if at is None else at.timestamp()) // 60)
    for name in usage.models:
        try:
            rates = _listed(name, usage.provider, usage.service_tier, usage.speed, minute)
        except LookupError:
            continue
        tokens = {
            ours: _reached(rates.get(theirs), usage.input_tokens)
            for ours, theirs in _LISTED.items()
        }
        with localcontext(_EXACT):
            return _total(tokens, usage) + (rates.get("requests_kcount") or 0) / Decimal(1000)
    return None


@lru_cache(maxsize=256)
def _listed(
    name: str, provider: str, service_tier: str, speed: str, minute: int
) -> Mapping[str, Any]:
    """The prices of a model in genai-prices, by its names for them; cached, since this is slow."""
    # Its import is slow, and only costs need it.
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415

    snapshot = get_snapshot()
    found, model = snapshot.find_provider_model(name, None, provider or None, None)
    # It has no tiers for models that a provider resells.
    is_own = any(model is each for each in found.models)
    context = {"service_tier": service_tier, "speed": speed} if is_own else {}
    at = datetime.fromtimestamp(minute * 60, UTC)
    return vars(model.get_prices(at, context))


_LISTED = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cache_read": "cache_read_mtok",
    "cache_creation": "cache_write_mtok",
    "cache_creation_1h": "cache_write_1h_mtok",
    "input_audio": "input_audio_mtok",
    "output_audio": "output_audio_mtok",
    "reasoning": "output_reasoning_mtok",
}
"""The fields of `Price`, and how genai-prices names them."""


def _reached(price: Any, input_tokens: int) -> Decimal | None:
    """The price in genai-prices for a prompt of this length; it is for all of its tokens."""
    if price is None or isinstance(price, Decimal):
        return price
    reached = [tier.price for tier in price.tiers if input_tokens > tier.start]
    found: Decimal = reached[-1] if reached else price.base
    return found


def _has_list() -> bool:
    """Whether genai-prices is installed. It is loaded now: later it would block an event loop."""
    try:
        from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it is an extra
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] != "genai_prices":
            raise
        return False
    get_snapshot()
    return True


def _tabled_price(table: Mapping[str, Price], others: Prices, usage: ModelUsage) -> Decimal | None:
    """What a run costs by a table, or by other prices if the model is not in it."""
    for name in usage.models:
        if name in table:
            given = vars(table[name]).items()
            with localcontext(_EXACT):
                return _total(
                    {name: None if value is None else Decimal(value) for name, value in given},
                    usage,
                )
    return others(usage)


def _total(rates: Mapping[str, Decimal | None], usage: ModelUsage) -> Decimal:
    """What the tokens cost. A kind of tokens without a price has the price of the whole."""
    prompt, answer = rates["input"] or Decimal(0), rates["output"] or Decimal(0)
    written = _or(rates["cache_creation"], prompt)
    for_1h = min(usage.cache_creation_1h_tokens, usage.cache_creation_tokens)
    for_5m = usage.cache_creation_tokens - for_1h
    read, sounds = usage.cache_read_tokens, usage.input_audio_tokens
    spoken, reasoning = usage.output_audio_tokens, usage.reasoning_tokens
    # Cached audio tokens are in both parts, so the result is never too low.
    text = max(0, usage.input_tokens - for_1h - for_5m - read - sounds)
    said = max(0, usage.output_tokens - spoken - reasoning)
    total = (
        text * prompt
        + read * _or(rates["cache_read"], prompt)
        + for_5m * written
        + for_1h * _or(rates["cache_creation_1h"], written)
        + sounds * _or(rates["input_audio"], prompt)
        + said * answer
        + spoken * _or(rates["output_audio"], answer)
        + reasoning * _or(rates["reasoning"], answer)
    )
    return total / _PER


def _or(rate: Decimal | None, whole: Decimal) -> Decimal:
    return whole if rate is None else rate
