"""Decisions and exceptions; checked by mypy and pyright, never run."""

from datetime import datetime
from typing import Any, Literal, assert_type

from langchain_quota import (
    Answer,
    Call,
    Decision,
    Level,
    LimitStatus,
    ModelCallLimitExceededError,
    Outcome,
    QuotaStatus,
    QuotaStoreError,
    QuotaWarning,
    ToolCallLimitExceededError,
)


def read(decision: Decision) -> str:
    """All that a decision tells."""
    assert_type(decision.call, Call)
    assert_type(decision.call.kind, Literal["model", "tool"])
    assert_type(decision.call.tool, str | None)
    assert_type(decision.call.id, str | None)
    assert_type(decision.call.amount, int)
    assert_type(decision.call.agent, str | None)
    assert_type(decision.call.thread_id, object)
    assert_type(decision.outcome, Outcome)
    assert_type(decision.limits, tuple[LimitStatus, ...])
    assert_type(decision.refused_by, tuple[LimitStatus, ...])
    assert_type(decision.resets_at, datetime | None)
    assert_type(decision.answer, Answer | None)
    leading = decision.leading
    if leading is None:
        return ""
    assert_type(leading, LimitStatus)
    assert_type(leading.limit, str)
    assert_type(leading.refused, bool)
    assert_type(leading.scope, str | None)
    assert_type(leading.thread_used, int)
    assert_type(leading.thread_limit, int | None)
    assert_type(leading.run_limit, int | None)
    assert_type(leading.share, float)
    assert_type(leading.crossed("run", 0.8), Level | None)
    for quota in leading.quotas:
        assert_type(quota, QuotaStatus)
        assert_type(quota.resets_at, datetime | None)
        assert_type(quota.used, int)
    return leading.limit


def answered(answer: Answer) -> int:
    """What a person has answered."""
    assert_type(answer.type, Literal["approve", "reject"])
    assert_type(answer.by, str)
    assert_type(answer.message, str)
    return sum(answer.granted.values())


def outcome_of(decision: Decision) -> int:
    """An outcome is a text, and one of four."""
    text: str = decision.outcome
    if decision.outcome == "blocked" or decision.outcome in {"skipped", "would_block"}:
        return len(text)
    match decision.outcome:
        case Outcome.ALLOWED:
            return 0
        case Outcome.BLOCKED | Outcome.SKIPPED:
            return 1
        case Outcome.WOULD_BLOCK:
            return 2


def hand_made() -> Decision:
    """For the tests of an observer."""
    return Decision(Call("tool", tool="search", thread_id="7"), Outcome.ALLOWED)


def caught() -> Any:
    """The exceptions tell who refused."""
    try:
        return None
    except (ToolCallLimitExceededError, ModelCallLimitExceededError) as error:
        assert_type(error.decision, Decision | None)
        assert_type(error.run_count, int)
        return error.decision.resets_at if error.decision else error.thread_limit
    except QuotaStoreError as error:
        assert_type(error.timed_out, bool)
        return error.timed_out


def warned(warning: QuotaWarning) -> UserWarning:
    """A warning that filters know."""
    return warning


# Not these.
def wrong(decision: Decision) -> None:
    """Frozen, and without these."""
    decision.outcome = Outcome.ALLOWED  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    decision.call.tool.upper()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    decision.leading.limit  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    decision.blocked  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    Call("agent")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Decision(Call("model"), "allowed")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
