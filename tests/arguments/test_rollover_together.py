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


PLAIN, ROLLS, NINE = monthly(), monthly(rollover=5), monthly(9, rollover=5)
BY_PLAN = monthly(by_plan, rollover=5)
SMOOTH = monthly(window="1d", smooth=True)
DIFFER = ([ROLLS, PLAIN], [PLAIN, ROLLS], [ROLLS, monthly(rollover=4)], [NINE, ROLLS])
AGREE = (
    *([BY_PLAN, BY_PLAN], [ROLLS, monthly(rollover=5, name="also")], [PLAIN, monthly(9)]),
    *([ROLLS, monthly(per="agent")], [ROLLS, SMOOTH], [monthly(window="1d", rollover=5), SMOOTH]),
)


@pytest.mark.parametrize("make", [QuotaMiddleware, GraphQuota])
@pytest.mark.parametrize("quotas", [*DIFFER, [BY_PLAN, ROLLS], *AGREE])
def test_limits_on_one_count(make: Any, quotas: Any) -> None:
    """A hard limit beside one that rolls over would let through what the other one left."""
    for kind in (ToolCallLimit, TokenLimit, ModelCallLimit):
        others = [ModelCallLimit(quotas=quotas[:1]), kind(quotas=quotas[1:], name="hard")]
        if kind is not ModelCallLimit or quotas in AGREE:
            make(others, store=MemoryStore())
            continue
        with pytest.raises(ValueError, match="give both the same limit and rollover"):
            make(others, store=MemoryStore())
