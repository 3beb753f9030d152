"""What the tokens of a model run cost, in US dollars."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Context, Decimal, localcontext
from functools import partial
from typing import cast

from langchain_quota.arguments import check_sync_function
from langchain_quota.errors import UnknownPriceError
from langchain_quota.limits.budgets import Price, Prices
from langchain_quota.limits.model_usage import ModelUsage
from langchain_quota.units import Dollars, checked_dollars, microdollars

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
    """The most that so many tokens can cost, in microdollars."""
    # Before the call it is not known which tokens the provider will read from its cache, write to
    # it, or use for reasoning. For one model of the list, reading costs more than `input`.
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
    from genai_prices import Usage, calc_price  # noqa: PLC0415 - its import is slow

    for_1h = min(usage.cache_creation_1h_tokens, usage.cache_creation_tokens)
    read, written = usage.cache_read_tokens, usage.cache_creation_tokens
    sounds, spoken, reasoning = (
        usage.input_audio_tokens,
        usage.output_audio_tokens,
        usage.reasoning_tokens,
    )
    tokens = Usage(
        # It refuses a report whose parts are more than the whole.
        input_tokens=max(usage.input_tokens, read + written + sounds),
        output_tokens=max(usage.output_tokens, spoken + reasoning),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_5m_tokens=written - for_1h,
        cache_write_1h_tokens=for_1h,
        input_audio_tokens=sounds,
        output_audio_tokens=spoken,
        output_reasoning_tokens=reasoning,
        # Cached audio tokens are in both parts, so the result is never too low.
        cache_audio_read_tokens=0,
        cache_audio_write_tokens=0,
    )
    for name in usage.models:
        try:
            with localcontext(_EXACT):
                price: Decimal = calc_price(
                    tokens,
                    name,
                    provider_id=usage.provider or None,
                    genai_request_timestamp=at,
                    price_context={"service_tier": usage.service_tier, "speed": usage.speed},
                ).total_price
        except LookupError:
            continue
        return price
    return None


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
    price = next((table[name] for name in usage.models if name in table), None)
    if price is None:
        return others(usage)
    for_1h = min(usage.cache_creation_1h_tokens, usage.cache_creation_tokens)
    for_5m = usage.cache_creation_tokens - for_1h
    read, sounds = usage.cache_read_tokens, usage.input_audio_tokens
    spoken, reasoning = usage.output_audio_tokens, usage.reasoning_tokens
    written = price.cache_creation
    # Cached audio tokens are in both parts, so the result is never too low.
    parts: list[tuple[int, Sequence[Dollars | None]]] = [
        (max(0, usage.input_tokens - for_1h - for_5m - read - sounds), [price.input]),
        (read, [price.cache_read, price.input]),
        (for_5m, [written, price.input]),
        (for_1h, [price.cache_creation_1h, written, price.input]),
        (sounds, [price.input_audio, price.input]),
        (max(0, usage.output_tokens - spoken - reasoning), [price.output]),
        (spoken, [price.output_audio, price.output]),
        (reasoning, [price.reasoning, price.output]),
    ]
    with localcontext(_EXACT):
        # A part without a price has that of the whole.
        rates = (next(each for each in given if each is not None) for _, given in parts)
        total = sum(tokens * Decimal(rate) for (tokens, _), rate in zip(parts, rates, strict=True))
        return total / _PER
