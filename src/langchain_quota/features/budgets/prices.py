"""The prices of model runs and tool calls, in US dollars."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from decimal import Context, Decimal, localcontext
from functools import lru_cache, partial
from typing import cast

from langchain_core.messages import ToolCall

from langchain_quota.errors import UnknownPriceError
from langchain_quota.features.budgets.reports import charged_tokens
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import CostLimit, Price, Prices, UnknownPrice
from langchain_quota.limits.call import ModelUsage
from langchain_quota.limits.options import NANODOLLARS, whole_amount
from langchain_quota.middleware.flow import Kernel
from langchain_quota.runtime.arguments import validate_sync_function
from langchain_quota.runtime.units import Dollars, computed, nanodollars, parse_dollars
from langchain_quota.telemetry import logs, names
from langchain_quota.telemetry.labels import NONE, label

_PER = Decimal(10**6)
"""A price is for so many tokens."""

_EXACT = Context(prec=50)
"""The decimal context of all computations, whatever the application's own is."""

_BEDROCK = re.compile(r"[a-z-]+\.[a-z]", re.IGNORECASE)
"""How ids of models in Bedrock begin: with a vendor, perhaps after a region: `eu.anthropic.…`."""

MOST_KNOWN = 1_000
"""The most models that are known to have a price. Callers of a gateway may invent names."""

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
                    f"for {model!r}: write Price(input=2.50, output=10)"
                )
    elif prices is not None and not callable(prices):
        raise TypeError(
            f"prices must be a table of Price by model, a function or None, not {prices!r}"
        )
    else:
        validate_sync_function("prices", prices, "usage")


def resolve_prices(prices: object) -> Prices:
    """Return the prices that an argument `prices` means; a table wins over genai-prices."""
    if prices is None:
        if not _has_list():
            raise ModuleNotFoundError(_MISSING, name="genai_prices")
        return listed_price
    check_prices(prices)
    if isinstance(prices, Mapping):
        return partial(_tabled_price, dict(prices), listed_price if _has_list() else lambda _: None)
    return cast("Prices", prices)


def priced(usage: ModelUsage, prices: Prices) -> Decimal:
    """Return the price of a model run in dollars; without use, whether its model has a price."""
    unknown = UnknownPriceError(next(iter(usage.models), ""), usage.provider)
    try:
        dollars = computed(prices(usage))
    except LookupError as error:
        raise unknown from error
    if dollars is None:
        raise unknown
    if not isinstance(dollars, Decimal | float | int):
        raise TypeError(f"prices must give a number of dollars, or None, not {dollars!r}")
    return parse_dollars("what prices gives", dollars)


def cost(usage: ModelUsage, prices: Prices) -> int:
    """Return the price of a model run in nanodollars, rounded up once.

    A run that has used nothing, and an answer from LangChain's response cache, cost nothing.
    """
    if usage.cached or not usage.total_tokens:
        return 0
    return nanodollars(priced(usage, prices))


def cost_and_source(
    usage: ModelUsage, prices: Prices, unknown_price: UnknownPrice
) -> tuple[int, str]:
    """Return what a model run costs in nanodollars, and whether that is `known` or `reported`."""
    try:
        return cost(usage, prices), "known"
    except UnknownPriceError:
        # A provider that reports no cost of tokens that were used has not said what they cost.
        if unknown_price != "reported" or not usage.reported_cost:
            raise
        return nanodollars(usage.reported_cost), "reported"


def highest_cost(usage: ModelUsage, prices: Prices) -> int:
    """Return the most that so many tokens can cost, in nanodollars."""
    # Before the call it is not known which tokens the provider will read from its cache, write to
    # it, or use for reasoning. For one model of the list, reading costs more than `input`.
    read = replace(usage, cache_read_tokens=usage.input_tokens)
    written = replace(usage, cache_creation_tokens=usage.input_tokens)
    inputs = (usage, read, written, replace(written, cache_creation_1h_tokens=usage.input_tokens))
    return max(
        cost(replace(tokens, reasoning_tokens=reasoning), prices)
        for tokens in inputs
        for reasoning in (0, usage.output_tokens)
    )


class Pricing:
    """The prices of a middleware, asked before a model is called and after."""

    def __init__(self, kernel: Kernel) -> None:
        limits = [limit for limit in kernel.limits if isinstance(limit, CostLimit)]
        # Without a limit of costs, nothing costs anything.
        self._prices = resolve_prices(kernel.options["prices"] if limits else lambda _: Decimal(0))
        table = kernel.options["prices"]
        self._table = table if isinstance(table, Mapping) else {}
        self._recorder = kernel.recorder
        self._unknown: UnknownPrice = kernel.options["unknown_price"]
        # What a run is charged at least if its price is not known when it is done.
        self._least = max(
            (
                whole_amount(limit.unit, "reserve", limit.reserve)
                for limit in limits
                if limit.reserve is not None and not callable(limit.reserve)
            ),
            default=1,
        )
        # A model that has a price is not asked for again.
        self._check_once = lru_cache(MOST_KNOWN)(partial(priced, prices=self._prices))
        # By the name that was asked for: runs that had no price when they were paid.
        self._failed: dict[str, ModelUsage] = {}

    def check(self, usage: ModelUsage, *, agent: str | None) -> None:
        """Check that a model has a price, before a call of it is paid."""
        if self._unknown == "allow":
            return
        # If its price failed after an earlier call, that call must have a price first.
        failed = self._failed.get(usage.request_model)
        try:
            if failed is None:
                self._check_once(usage)
            else:
                _priced_again(failed, self._prices)
        except UnknownPriceError as error:
            if failed is None and self._unknown == "reported":
                return
            model = self._recorder.model_label(error.model)
            self._recorder.count(names.MODEL_RUNS, agent, model, "unknown", NONE)
            raise
        self._failed.pop(usage.request_model, None)

    def cost(
        self, usage: ModelUsage, agent: str | None, held: int, *, cut_off: bool
    ) -> tuple[int, str]:
        """Return the price of a model run in nanodollars, and where it comes from."""
        # It is paid already: nothing is raised.
        try:
            amount, source = cost_and_source(usage, self._prices, self._unknown)
            return amount, self._name_unpaid(usage, agent) if source == "known" else source
        except UnknownPriceError as error:
            self._recorder.log_first(logs.no_price, agent, str(error))
        except Exception as error:  # noqa: BLE001 - the user's function
            self._recorder.record_error("prices", error)
        if self._unknown == "allow":
            return 0, "unknown"
        if self._unknown == "reported" and cut_off and held:
            # It could report nothing: what it holds is as much as it can cost.
            return held, "unknown"
        self._failed[usage.request_model] = usage
        if len(self._failed) > MOST_KNOWN:
            self._failed.pop(next(iter(self._failed)), None)
        return max(held, self._least), "unknown"

    def _name_unpaid(self, usage: ModelUsage, agent: str | None) -> str:
        """Log what the price of a run does not include; return whether the price is known."""
        for tool in () if usage.cached else sorted({*usage.provider_tools}):
            others = tuple(name for name in usage.provider_tools if name != tool)
            of_others = cost(replace(usage, provider_tools=others), self._prices)
            if cost(usage, self._prices) == of_others:
                self._recorder.log_first(logs.unpaid_tool, agent, label(tool))
        price = next((self._table[name] for name in usage.models if name in self._table), None)
        for part in ("cache_creation_1h", "cache_creation") if price and price.input else ():
            # Writing a cache costs more than other input.
            if _parts(usage)[part] and getattr(price, part) is None:
                reason = f"its Price has no {part}, so too little is charged: give it"
                error = UnknownPriceError(usage.models[0], usage.provider, reason=reason)
                self._recorder.log_first(logs.no_price, agent, str(error))
                return "unknown"
        return "known"

    def of_tool(self, limit: Limit, call: ToolCall) -> int:
        """Return the price of a tool call by a limit, in nanodollars, rounded up."""
        price = limit.tool_prices[call["name"]] if isinstance(limit, CostLimit) else 0
        if not callable(price):
            return nanodollars(parse_dollars("tool_prices", price))
        argument = f"tool_prices[{call['name']!r}] of limit {limit.name!r}"
        try:
            return nanodollars(parse_dollars(f"what {argument} gives", computed(price(call))))
        except Exception as error:
            error.add_note(f"raised by the function for {argument}")
            self._recorder.record_error("prices", error)
            raise

    def most(self, limit: Limit, bound: object) -> int:
        """Return the bound of a call, in the unit of a limit."""
        if not isinstance(bound, ModelUsage):
            return whole_amount(limit.unit, f"reserve of limit {limit.name!r}", bound)
        if limit.counter != NANODOLLARS:
            return charged_tokens(bound, limit.counter)
        try:
            return highest_cost(bound, self._prices)
        except Exception as error:
            if self._unknown == "allow" and not isinstance(error, UnknownPriceError):
                self._recorder.record_error("prices", error)
            elif self._unknown == "error" or not isinstance(error, UnknownPriceError):
                raise
            return 0


def _priced_again(failed: ModelUsage, prices: Prices) -> None:
    """Check that a run has a price by now that had none when it was paid."""
    try:
        cost(failed, prices)
    except Exception as error:
        reason = "an earlier call is paid, and what answered has no price: give it, prices="
        if not isinstance(error, UnknownPriceError):
            text = f"{type(error).__name__}: {error}"
            reason = f"prices failed for an earlier call that was paid ({text})"
        model = next(iter(failed.models), "")
        raise UnknownPriceError(model, failed.provider, reason=reason) from error


def listed_price(usage: ModelUsage, *, at: datetime | None = None) -> Decimal | None:
    """Return the price of a model run by genai-prices; `None` if the model is not in the list."""
    from genai_prices import Usage, calc_price  # noqa: PLC0415 - its import is slow

    parts = _parts(usage)
    written = parts["cache_creation"] + parts["cache_creation_1h"]
    tokens = Usage(
        input_tokens=parts["input"] + parts["cache_read"] + written + parts["input_audio"],
        output_tokens=parts["output"] + parts["output_audio"] + parts["reasoning"],
        cache_read_tokens=parts["cache_read"],
        cache_write_tokens=written,
        cache_write_5m_tokens=parts["cache_creation"],
        cache_write_1h_tokens=parts["cache_creation_1h"],
        input_audio_tokens=parts["input_audio"],
        output_audio_tokens=parts["output_audio"],
        output_reasoning_tokens=parts["reasoning"],
        cache_audio_read_tokens=0,
        cache_audio_write_tokens=0,
        web_searches=usage.provider_tools.count("web_search") or None,
    )
    names = [(name, usage.provider or None) for name in usage.models]
    for name, provider in (*names, *_behind_gateways(usage.models)):
        with localcontext(_EXACT), suppress(LookupError):
            price: Decimal = calc_price(
                tokens,
                name,
                provider_id=provider,
                genai_request_timestamp=at,
                price_context={"service_tier": usage.service_tier, "speed": usage.speed},
            ).total_price
            return price
    return None


def _behind_gateways(models: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of models as gateways have them, each with who genai-prices knows them from."""
    for name in models:
        if "/" in name:
            # Such as `azure/gpt-4o`: for LiteLLM, genai-prices takes the prefix for the provider.
            yield name, "litellm"
            yield name, "openrouter"
        elif _BEDROCK.match(name):
            yield name, "aws"


def _has_list() -> bool:
    """Return whether genai-prices is installed, and load it: later it would block an event loop."""
    try:
        from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it is an extra
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] != "genai_prices":
            raise
        return False
    get_snapshot()
    return True


def _tabled_price(
    table: Mapping[str, Price], fallback: Prices, usage: ModelUsage
) -> Decimal | float | None:
    """Return the price of a run by a table, or by other prices if the model is not in it."""
    price = next((table[name] for name in usage.models if name in table), None)
    if price is None:
        return fallback(usage)

    def rate(part: str) -> Decimal:
        dollars: Dollars | None = getattr(price, part)
        return rate(_WHOLE[part]) if dollars is None else parse_dollars(part, dollars)

    with localcontext(_EXACT):
        return sum(tokens * rate(part) for part, tokens in _parts(usage).items()) / _PER


_WHOLE = {
    "cache_read": "input",
    "cache_creation": "input",
    "cache_creation_1h": "cache_creation",
    "input_audio": "input",
    "output_audio": "output",
    "reasoning": "output",
}
"""Whose price a part has that has none of its own."""


def _parts(usage: ModelUsage) -> dict[str, int]:
    """Return the tokens by the fields of `Price`, each token in one of them."""
    # Cached audio tokens are in two of them, so that the price is never too low.
    for_1h = min(usage.cache_creation_1h_tokens, usage.cache_creation_tokens)
    of_input = {
        "cache_read": usage.cache_read_tokens,
        "cache_creation": usage.cache_creation_tokens - for_1h,
        "cache_creation_1h": for_1h,
        "input_audio": usage.input_audio_tokens,
    }
    of_output = {"output_audio": usage.output_audio_tokens, "reasoning": usage.reasoning_tokens}
    return {
        "input": max(0, usage.input_tokens - sum(of_input.values())),
        **of_input,
        "output": max(0, usage.output_tokens - sum(of_output.values())),
        **of_output,
    }
