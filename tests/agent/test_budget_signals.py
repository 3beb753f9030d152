"""What spans and logs say of budgets: amounts in the limit's unit, as each call is judged."""

import logging
from decimal import Decimal

import pytest
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata

from langchain_quota import CostLimit, QuotaMiddleware, TokenLimit
from langchain_quota.limits import Limit
from langchain_quota.model_usage import ModelUsage
from tests.agent.rules import Scene
from tests.signals import Signals

USED = (60, 25, 30)
"""The tokens of three model calls. Together they are more than the limit."""

UNITS = pytest.mark.parametrize(
    ("limit", "unit", "parts"),
    [
        (TokenLimit(thread_limit=100), "tokens", 1),
        (CostLimit(thread_limit="0.0001"), "dollars", 1_000_000),
    ],
    ids=["tokens", "dollars"],
)
"""A token costs a millionth of a dollar: the numbers of both are the same, but for their parts."""


def scene_of(signals: Signals, limit: Limit) -> Scene:
    """An agent whose first three model calls use what `USED` says, and call a tool."""
    script = [
        AIMessage(
            "",
            tool_calls=[{"name": "search", "args": {}, "id": f"search-{tokens}"}],
            usage_metadata=UsageMetadata(
                input_tokens=tokens - 1, output_tokens=1, total_tokens=tokens
            ),
        )
        for tokens in USED
    ]
    prices = a_microdollar_a_token if isinstance(limit, CostLimit) else None
    quota = QuotaMiddleware([limit], telemetry=signals.telemetry, prices=prices)
    return Scene(signals, [*script, "Never said."], [quota])


def a_microdollar_a_token(used: ModelUsage) -> Decimal:
    """What a model run costs."""
    return Decimal(used.total_tokens) / 1_000_000


@UNITS
async def test_a_span_has_what_was_used_when_the_call_was_judged(
    signals: Signals, limit: Limit, unit: str, parts: int
) -> None:
    """A call is charged later, so its own amount is on the span of the next one."""
    await scene_of(signals, limit).turn()

    spans = [dict(span.attributes or {}) for span in signals.spans()]
    models = [each for each in spans if each["langchain_quota.kind"] == "model"]
    assert [each["langchain_quota.decision"] for each in models] == [*["allowed"] * 3, "blocked"]
    assert {each["langchain_quota.unit"] for each in models} == {unit}
    assert {each["langchain_quota.thread.limit"] for each in models} == {100 / parts}
    used = [each["langchain_quota.thread.used"] for each in models]
    assert used == [0, 60 / parts, 85 / parts, 115 / parts]


@UNITS
async def test_logs_have_amounts_in_the_limits_unit(
    signals: Signals, limit: Limit, unit: str, parts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Coming near, using up and refusing are logged with what was used, and of how much."""
    caplog.set_level(logging.DEBUG, "langchain_quota")

    await scene_of(signals, limit).turn()

    told = [
        [
            getattr(record, f"quota_{field}")
            for field in ("event", "used", "threshold", "unit", "scope")
        ]
        for record in caplog.records
        if hasattr(record, "quota_event")
    ]
    assert told == [
        [event, used / parts, 100 / parts, unit, "thread"]
        for event, used in (("near", 85), ("exhausted", 115), ("refused", 115))
    ]
    shown = {"tokens": "85 tokens of 100 tokens", "dollars": "$0.000085 of $0.0001"}[unit]
    assert shown in caplog.text
