"""Decisions, their observers, and exceptions; checked by mypy and pyright, never run."""

import functools
import queue
from collections.abc import Awaitable, Callable
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
from langchain_quota.runtime.units import Level


def read(decision: Decision, answer: Answer, warning: QuotaWarning) -> UserWarning:
    """All that a decision tells."""
    assert_type(decision.call, Call)
    assert_type(decision.call.kind, Literal["model", "tool"])
    assert_type((decision.call.tool, decision.call.id), tuple[str | None, str | None])
    assert_type((decision.call.agent, decision.call.amount), tuple[str | None, int])
    assert_type(decision.call.thread_id, object)
    assert_type(decision.outcome, Outcome)
    assert_type(decision.limits, tuple[LimitStatus, ...])
    assert_type(decision.refused_by, tuple[LimitStatus, ...])
    assert_type(decision.resets_at, datetime | None)
    assert_type(decision.answer, Answer | None)
    assert_type(answer.type, Literal["approve", "reject"])
    assert_type((answer.by, answer.message), tuple[str, str])
    assert_type(sum(answer.granted.values()), int)
    if leading := decision.leading:
        assert_type(leading, LimitStatus)
        assert_type((leading.limit, leading.scope), tuple[str, str | None])
        assert_type((leading.refused, leading.share), tuple[bool, float])
        assert_type(leading.count_of("run"), CountStatus | None)
        assert_type(leading.counts[0].limit, int | None)
        assert_type(leading.counts[0].crossed(0.8), Level | None)
        assert_type(leading.quotas[0], CountStatus)
        assert_type(leading.quotas[0].resets_at, datetime | None)
        assert_type(leading.quotas[0].used, int)
    return warning


def outcome_of(decision: Decision) -> int:
    """An outcome is a text, and one of four."""
    text: str = decision.outcome
    if decision.outcome == "blocked" or decision.outcome in {"skipped", "would_block"}:
        return len(text)
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
jobs: queue.Queue[Decision] = queue.Queue()


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
QuotaMiddleware(limits, on_decision=awaited)
QuotaMiddleware(limits, on_decision=either)
QuotaMiddleware(limits, on_decision=Billing())
QuotaMiddleware(limits, on_decision=functools.partial(with_note, "note"))
QuotaMiddleware(limits, on_decision=jobs.put_nowait)
QuotaMiddleware(limits, on_decision=lambda decision: print(decision.outcome))
QuotaMiddleware(limits, on_decision=())
QuotaMiddleware(limits, on_decision=[sync, awaited, Billing(), seen.append])
several: list[Callable[[Decision], None]] = [sync, seen.append]
QuotaMiddleware(limits, on_decision=several)


def of_outcome(outcome: str) -> None:
    """Takes no decision."""


def with_answer(decision: Decision) -> str:
    return decision.outcome


# Not these.
QuotaMiddleware(limits, on_decision=of_outcome)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=with_answer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=with_note)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
QuotaMiddleware(limits, on_decision=[sync, "log"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
seen[0].outcome = Outcome.ALLOWED  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
seen[0].call.tool.upper()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
seen[0].leading.limit  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
seen[0].blocked  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
Call("agent")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Decision(Call("model"), "allowed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
