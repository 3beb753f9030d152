"""What is decided about each call: examples first, then what must hold for every batch."""

from typing import Any

from langchain_quota import (
    Call,
    ModelCallLimit,
    ToolCallLimit,
)
from langchain_quota.limits import Limit
from tests.judged import Judged, Used, judge


def outcomes(judged: Judged) -> list[str]:
    return [decision.outcome.value for decision in judged.decisions]


def test_a_call_can_be_charged_later() -> None:
    """Judged without charging, a call that fits is shown, deferred, and charged to no limit."""
    limit = ModelCallLimit(thread_limit=5, run_limit=1)
    judged = judge([limit], {"model": Used(3, 0)}, [Call("model")], charging=False)
    (found,) = judged.decisions[0].limits
    assert outcomes(judged) == ["allowed"]
    assert (found.charged, found.deferred) == (False, True)
    assert (found.thread_before, found.thread_used, found.thread_count) == (3, 4, 3)
    full = judge([limit], {"model": Used(3, 1)}, [Call("model")], charging=False)
    assert (outcomes(full), full.decisions[0].limits[0].deferred) == (["blocked"], False)


WAYS: list[dict[str, Any]] = [
    {},
    {"give_up_after": 2},
    {"exit_behavior": "end"},
    {"exit_behavior": "error"},
    {"enforce": False},
    {"enforce": False, "exit_behavior": "end"},
]
UNNUMBERED: list[Limit] = [
    ToolCallLimit(tools, exclude=exclude, run_limit=0, **way)
    for tools, exclude in (
        ("search", ()),
        ("search", ()),
        (("calc", "search"), ()),
        (None, ("fetch",)),
    )
    for way in WAYS
]
UNNUMBERED += [
    ModelCallLimit(run_limit=0, exit_behavior="finalize"),
    ModelCallLimit(run_limit=0, enforce=False),
]
