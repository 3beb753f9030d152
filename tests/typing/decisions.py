"""Decisions, their observers, and exceptions; checked by mypy and pyright, never run."""

import functools
from collections.abc import Awaitable
from datetime import datetime
from typing import Any, Literal, assert_type

from langchain_quota import (
    Decision,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimitExceededError,
)
from langchain_quota.core.decision import Answer, CountStatus, LimitStatus, Outcome
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits.call import Call


def read(decision: Decision, answer: Answer, warning: QuotaWarning) -> UserWarning:
    """All that a decision tells."""
    assert_type(decision.call, Call)
    assert_type(decision.call.kind, Literal["model", "tool"])
    assert_type((decision.call.tool, decision.call.id), tuple[str | None, str | None])
    assert_type((decision.call.agent, decision.call.amount), tuple[str | None, int])
    assert_type(decision.call.thread_id, object)
    assert_type(decision.outcome, Outcome)
    assert_type(decision.refused_by, tuple[LimitStatus, ...])
    assert_type(decision.resets_at, datetime | None)
    assert_type(decision.answer, Answer | None)
    assert_type(answer.type, Literal["approve", "reject"])
    assert_type((answer.by, answer.message), tuple[str, str])
    if leading := decision.leading:
        assert_type(leading, LimitStatus)
        assert_type((leading.limit, leading.scope), tuple[str, str | None])
        assert_type((leading.refused, leading.share), tuple[bool, float])
        assert_type(leading.count_of("run"), CountStatus | None)
        assert_type(leading.counts[0].limit, int | None)
        assert_type(leading.quotas[0], CountStatus)
    return warning


def outcome_of(decision: Decision) -> int:
    """An outcome is a text, and one of four."""
    assert_type(decision.outcome.upper(), str)
    match decision.outcome:
        case Outcome.ALLOWED | Outcome.WOULD_BLOCK:
            return 0
        case Outcome.BLOCKED | Outcome.SKIPPED:
            return 1


def caught() -> Any:
    """The exceptions tell who refused."""
    try:
        return Decision(Call("tool", tool="search", thread_id="7"), Outcome.ALLOWED)
    except (ToolCallLimitExceededError, ModelCallLimitExceededError) as error:
        assert_type(error.decision, Decision | None)
        assert_type(error.run_count, int)
        return error.decision.resets_at if error.decision else error.thread_limit
    except QuotaStoreError as error:
        assert_type(error.timed_out, bool)


limits = [ModelCallLimit(run_limit=10)]
seen: list[Decision] = []


def sync(decision: Decision) -> None:
    seen.append(decision)


async def awaited(decision: Decision) -> None:
    sync(decision)


async def with_note(note: str, decision: Decision) -> None:
    sync(decision)


class Billing:
    async def __call__(self, decision: Decision) -> None:
        sync(decision)


def either(decision: Decision) -> Awaitable[None] | None:
    return None if decision.refused_by else awaited(decision)


# One observer, and several.
QuotaMiddleware(limits, on_decision=sync)
QuotaMiddleware(limits, on_decision=either)
QuotaMiddleware(limits, on_decision=Billing())
QuotaMiddleware(limits, on_decision=functools.partial(with_note, "note"))
QuotaMiddleware(limits, on_decision=[sync, awaited, Billing(), seen.append])


def of_outcome(outcome: str) -> str:
    """Takes no decision."""
    return outcome


# Not these.
QuotaMiddleware(limits, on_decision=of_outcome)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=[sync, "log"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
seen[0].outcome = Outcome.ALLOWED  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
seen[0].call.tool.upper()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
Call("agent")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Decision(Call("model"), "allowed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
