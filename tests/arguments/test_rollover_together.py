"""Limits on one count must agree on what rolls over to it: it raises all of them."""

from typing import Any

import pytest

from langchain_quota import (
    GraphQuota,
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaMiddleware,
    TokenLimit,
    ToolCallLimit,
)


def by_plan(state: object, runtime: object) -> int:
    return 5


def monthly(limit: Any = 5, **options: Any) -> Quota:
    return Quota(limit, **{"per": "tenant", "window": "month", **options})


PLAIN, ROLLS = monthly(), monthly(rollover=5)
DAILY, BY_AGENT = monthly(window="1d"), monthly(per="agent")
SMOOTH = monthly(window="1d", smooth=True)


@pytest.mark.parametrize("make", [QuotaMiddleware, GraphQuota])
@pytest.mark.parametrize(
    ("quotas", "others", "kind", "is_right"),
    [
        ([ROLLS], [PLAIN], ModelCallLimit, False),
        ([PLAIN], [ROLLS], ModelCallLimit, False),
        ([ROLLS], [monthly(rollover=4)], ModelCallLimit, False),
        ([monthly(9, rollover=5)], [ROLLS], ModelCallLimit, False),
        ([ROLLS, monthly(name="hard")], [PLAIN], ModelCallLimit, False),
        ([monthly(by_plan, rollover=5)], [ROLLS], ModelCallLimit, False),
        ([monthly(by_plan, rollover=5)], [monthly(by_plan, rollover=5)], ModelCallLimit, True),
        ([ROLLS], [monthly(rollover=5, name="also")], ModelCallLimit, True),
        ([PLAIN], [monthly(9)], ModelCallLimit, True),
        ([ROLLS], [BY_AGENT, DAILY], ModelCallLimit, True),
        ([monthly(window="1d", rollover=5)], [SMOOTH], ModelCallLimit, True),
        ([ROLLS], [PLAIN], ToolCallLimit, True),
        ([ROLLS], [PLAIN], TokenLimit, True),
    ],
)
def test_limits_on_one_count(
    make: Any, quotas: Any, others: Any, kind: Any, *, is_right: bool
) -> None:
    """A hard limit beside one that rolls over would let through what the other one left."""
    limits = [ModelCallLimit(quotas=quotas), kind(quotas=others, name="hard")]
    if is_right:
        make(limits, store=MemoryStore())
        return
    with pytest.raises(ValueError, match="give both the same limit and rollover"):
        make(limits, store=MemoryStore())
