"""The receipts of a middleware, with its prices."""

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_quota.features.budgets.model_runs import watch_runs
from langchain_quota.features.budgets.prices import cost, resolve_prices
from langchain_quota.limits.call import ModelUsage
from langchain_quota.middleware.flow import Kernel
from langchain_quota.telemetry.receipts import Receipt, opened


@contextmanager
def receipt_of(kernel: Kernel) -> Iterator[Receipt]:
    """Open a receipt for what runs in the block."""
    has_prices = any(limit.unit == "nanodollars" for limit in kernel.limits)
    prices = resolve_prices(kernel.options["prices"]) if has_prices else None

    def price(usage: ModelUsage) -> int | None:
        try:
            return None if prices is None else cost(usage, prices)
        except Exception:  # noqa: BLE001 - the user's function; the receipt says "cost unknown"
            return None

    watch_runs()
    with opened(Receipt(price)) as receipt:
        yield receipt
