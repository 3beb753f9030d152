"""Arguments of limits at their bounds."""

import math
from collections.abc import Callable

import pytest

from langchain_quota import (
    ConcurrencyLimit,
    CostLimit,
    ModelCallLimit,
    QuotaMiddleware,
    ToolCallLimit,
)

ROWS: dict[str, tuple[Callable[[], object], str | None]] = {
    "a run may use its whole thread": (lambda: ToolCallLimit(thread_limit=2, run_limit=2), None),
    "two limits of one number": (
        lambda: QuotaMiddleware(
            [ToolCallLimit("search", run_limit=2), ToolCallLimit("search", run_limit=2, name="b")]
        ),
        None,
    ),
    "one name for two limits": (
        lambda: QuotaMiddleware(
            [ToolCallLimit("search", run_limit=2), ToolCallLimit("search", thread_limit=9)]
        ),
        "2 limits are named 'tool:search'",
    ),
    "a wait for ever": (lambda: ConcurrencyLimit(max_concurrency=1, wait=math.inf), "wait must be"),
    "a grant of nothing": (
        lambda: ModelCallLimit(run_limit=1, exit_behavior="ask", grant=0),
        "grant must be above 0",
    ),
    "nine million dollars": (lambda: CostLimit(run_limit=9_000_000, thread_limit=9e6), None),
    "a nanodollar more": (
        lambda: CostLimit(run_limit="9000000.000000001"),
        r"^run_limit must be from 0 to 9,000,000 dollars, not '9000000.000000001'$",
    ),
    "a tenth of a nanodollar": (lambda: CostLimit(run_limit="0.0000000001"), "nine decimal places"),
}


@pytest.mark.parametrize(("make", "error"), ROWS.values(), ids=ROWS)
def test_arguments_at_their_bounds(make: Callable[[], object], error: str | None) -> None:
    """What is just allowed is taken; what is just not allowed is refused, with the reason."""
    if error is None:
        make()
        return
    with pytest.raises(ValueError, match=error):
        make()
