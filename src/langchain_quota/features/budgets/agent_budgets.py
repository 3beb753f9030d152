"""The budgets that an agent may have: from its settings, and before each model call."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_quota.arguments import check_choice, check_switch
from langchain_quota.features.budgets.budgets import Budgets
from langchain_quota.features.budgets.prices import (
    Price,
    Prices,
    UnknownPrice,
    check_prices,
    resolve_prices,
)
from langchain_quota.limits import Limit
from langchain_quota.middleware._calls import Late
from langchain_quota.middleware._form import Form
from langchain_quota.middleware._store import StoreClient
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.telemetry.recorder import Recorder


def budgets_of(  # noqa: PLR0913 - keyword-only settings
    kind: type[Budgets],
    limits: Sequence[Limit],
    *,
    prices: Prices | Mapping[str, Price] | None,
    unknown_price: UnknownPrice,
    charge_all_models: bool,
    store: StoreClient | None,
    recorder: Recorder,
) -> Budgets | None:
    """The budgets among the limits; `None` if there are none."""
    check_choice("unknown_price", unknown_price, ("error", "allow"))
    check_switch("charge_all_models", charge_all_models)
    units = {limit.unit for limit in limits}
    if "microdollars" not in units and (prices is not None or unknown_price == "allow"):
        check_prices(prices)
        in_vain = "unknown_price='allow'" if prices is None else "prices="
        raise ValueError(
            f"{in_vain} needs a limit of costs: add a CostLimit to the limits, or leave it out"
        )
    if units == {"calls"}:
        if charge_all_models:
            raise ValueError(
                "charge_all_models=True needs a budget to charge: add a TokenLimit or a CostLimit "
                "to the limits"
            )
        return None
    return kind(
        limits,
        prices=resolve_prices(prices) if "microdollars" in units else None,
        allow_unknown=unknown_price == "allow",
        store=store,
        recorder=recorder,
        all_models=charge_all_models,
    )


async def late_use(
    form: Form,
    budgets: Budgets | None,
    state: Mapping[str, Any],
    runtime: Any,
    limits: ResolvedLimits,
) -> Late | None:
    """The use of budgets that the state does not have yet; now a store has counted it."""
    if budgets is None:
        return None
    if budgets.others is not None:
        await budgets.others.settle(form, state, runtime, limits)
    return budgets.late(state)
