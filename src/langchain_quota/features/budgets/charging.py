"""What model runs are charged: in the units of budgets, at the prices of their models."""

from collections.abc import Callable, Mapping, Sequence

from langchain_quota.errors import UnknownPriceError
from langchain_quota.features.budgets.model_runs import ModelRun
from langchain_quota.features.budgets.prices import cost, highest_cost, priced
from langchain_quota.limits import Limit
from langchain_quota.limits.budgets import CostLimit, Prices
from langchain_quota.limits.options import (
    BUDGETS,
    INPUT_TOKENS,
    MICRODOLLARS,
    OUTPUT_TOKENS,
    TOTAL_TOKENS,
    whole_amount,
)
from langchain_quota.model_usage import ModelUsage, TokenKind, charged_tokens
from langchain_quota.telemetry.recorder import Recorder

_TOKENS: Mapping[str, TokenKind] = {
    TOTAL_TOKENS: "total",
    INPUT_TOKENS: "input",
    OUTPUT_TOKENS: "output",
}

MOST_KNOWN = 1_000
"""The most models that are known to have a price. Callers of a gateway may invent names."""


class Charging:
    """Computes what model runs are charged."""

    def __init__(
        self,
        limits: Sequence[Limit],
        *,
        prices: Prices | None,
        allow_unknown: bool,
        recorder: Recorder,
    ) -> None:
        counters = {limit.counter for limit in limits}
        self._counters = [each for each in BUDGETS if each in counters]
        self._prices = prices
        self._allow_unknown = allow_unknown
        self._recorder = recorder
        # What a run is charged if its price is not known when it is done.
        reserves = [
            whole_amount(limit.unit, "reserve", limit.reserve)
            for limit in limits
            if isinstance(limit, CostLimit)
            and limit.reserve is not None
            and not callable(limit.reserve)
        ]
        self._least_cost = max(reserves, default=1)
        self._known: set[ModelUsage] = set()
        # By the name that was asked for: runs that had no price when they were paid.
        self._unpriced: dict[str, ModelUsage] = {}

    def check_price(self, asked: ModelUsage, agent: Callable[[], str | None]) -> None:
        """Check that a model has a price, before a call of it is paid."""
        # If its price failed after an earlier call, that call must have a price first.
        if self._prices is None or self._allow_unknown:
            return
        failed = self._unpriced.get(asked.request_model)
        if failed is None and asked in self._known:
            return
        try:
            if failed is None:
                priced(asked, self._prices)
            else:
                _priced_again(failed, self._prices)
        except UnknownPriceError as error:
            self._recorder.record_unknown_price(agent(), error.model)
            raise
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(asked)
        self._unpriced.pop(asked.request_model, None)

    def most(self, limit: Limit, bound: object) -> int:
        """The bound of a call, in the unit of a limit."""
        if not isinstance(bound, ModelUsage):
            return whole_amount(limit.unit, f"reserve of limit {limit.name!r}", bound)
        if limit.counter != MICRODOLLARS:
            return charged_tokens(bound, _TOKENS[limit.counter])
        try:
            return 0 if self._prices is None else highest_cost(bound, self._prices)
        except UnknownPriceError:
            if self._allow_unknown:
                return 0
            raise

    def amounts(
        self, run: ModelRun, held: Mapping[str, int], agent: Callable[[], str | None]
    ) -> dict[str, int]:
        """What a run is charged, by counter."""
        # A run that was cut off is charged at least what was held for it: its use is only an
        # estimate from what had arrived.
        usage = run.usage
        # A run whose price fails is charged what was held for it.
        least_cost = max(held.get(MICRODOLLARS, 0), self._least_cost)
        least = held if usage.estimated and run.status != "success" else {}
        return {
            counter: max(
                least.get(counter, 0),
                self._cost(usage, agent, least_cost)
                if counter == MICRODOLLARS
                else charged_tokens(usage, _TOKENS[counter]),
            )
            for counter in self._counters
        }

    def _cost(self, usage: ModelUsage, agent: Callable[[], str | None], least: int) -> int:
        """What a run costs, in microdollars. The run is paid already: nothing is raised."""
        if self._prices is None:
            return 0
        try:
            return cost(usage, self._prices)
        except UnknownPriceError as error:
            self._recorder.record_unknown_price(agent(), error.model)
        except Exception as error:  # noqa: BLE001 - the user's function
            self._recorder.record_error("prices", error)
        if self._allow_unknown:
            return 0
        self._unpriced[usage.request_model] = usage
        return least


def _priced_again(failed: ModelUsage, prices: Prices) -> None:
    """Check that a run has a price by now that had none when it was paid."""
    model = next(iter(failed.models), "")
    try:
        cost(failed, prices)
    except UnknownPriceError as error:
        reason = "an earlier call is paid, and what answered has no price: give it, prices="
        raise UnknownPriceError(model, failed.provider, reason=reason) from error
    except Exception as error:
        reason = (
            f"prices failed for an earlier call that was paid ({type(error).__name__}: {error})"
        )
        raise UnknownPriceError(model, failed.provider, reason=reason) from error
