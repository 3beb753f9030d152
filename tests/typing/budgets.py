"""Budgets, as users type them."""

from decimal import Decimal
from typing import Any

from langchain.agents.middleware.types import ModelRequest

from langchain_quota import (
    CostLimit,
    ModelUsage,
    Price,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    UnknownPriceError,
    usage_bound,
)
from langchain_quota.limits import Limit


def plan(state: Any, runtime: Any) -> Decimal:
    return Decimal(5) if runtime.context["paid"] else Decimal("0.50")


def bound(request: ModelRequest[Any]) -> int:
    return 1000 * len(request.messages)


def price(usage: ModelUsage) -> Decimal | None:
    return Decimal(usage.total_tokens) / 1000


limits: list[Limit] = [
    TokenLimit(run_limit=100_000, tokens="input", reserve=bound),
    TokenLimit(run_limit=100_000, reserve=usage_bound),
    TokenLimit(thread_limit=100_000, exit_behavior="ask", grant=50_000),
    CostLimit(run_limit=5, exit_behavior="ask", grant="2.50", name="asks"),
    CostLimit(run_limit="0.50", thread_limit=plan, quotas=[Quota("100", per="tenant")]),
]
own: QuotaMiddleware[Any, Any] = QuotaMiddleware(limits, prices=price, unknown_price="allow")
whole: QuotaMiddleware[Any, Any] = QuotaMiddleware(limits, charge_all_models=True)
table: QuotaMiddleware[Any, Any] = QuotaMiddleware(
    [CostLimit(run_limit=1, exit_behavior="finalize", keep="0.10")],
    prices={"my-model": Price(input="2.50", output=10)},
)


def named(error: UnknownPriceError) -> tuple[str, str]:
    return error.model, error.provider
