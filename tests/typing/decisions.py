"""Decisions, usage, and helpers of users' tests; checked by mypy and pyright, never run."""

import functools
from collections.abc import Awaitable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, assert_type

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from langchain_quota import (
    Decision,
    ModelCallLimit,
    ModelCallLimitExceededError,
    QuotaMiddleware,
    QuotaWarning,
    ToolCallLimitExceededError,
    usage,
)
from langchain_quota.core.decision import Answer, CountStatus, LimitStatus, Outcome
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits.call import Call
from langchain_quota.testing import ScriptedChatModel, captured_decisions


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


# A script, and what a thread has used.
def answer(messages: Sequence[BaseMessage]) -> str | list[str]:
    return ["search"] if messages[-1].type == "human" else "Done."


batch = ["search", ("search", {"query": "x"})]
model = ScriptedChatModel(script=[batch, AIMessage("Hello."), TimeoutError("slow"), "Done."])
as_any_model: BaseChatModel = ScriptedChatModel(script=answer, keep_calls=10)
assert_type(model.calls[0].tools, tuple[str, ...])
assert_type(model.calls[0].messages, tuple[BaseMessage, ...])

quota = QuotaMiddleware([ModelCallLimit(thread_limit=10)])
agent = create_agent(as_any_model, middleware=[quota], checkpointer=InMemorySaver())
config: RunnableConfig = {"configurable": {"thread_id": "7"}}
used = usage(agent.get_state(config))
assert_type((used.model, used.run_model), tuple[int, int])
assert_type(used.tools, Mapping[str, int])
assert_type(used.run_tools.get("search", 0), int)


async def asynchronously() -> None:
    with captured_decisions() as decisions:
        await agent.ainvoke({"messages": []}, config)
    assert_type(decisions, list[Decision])
    assert_type(usage(await agent.aget_state(config)).model, int)
    await quota.areset(agent, config)
    assert_type((await quota.aleft("model", thread=7)).left, int | Decimal)
    assert_type((await quota.agrant("model", 5, thread=7, reason="more")).id, str)
    await quota.areset("model", user_id="ada", quota="daily", prefix="acme")


assert_type(quota.left("cost", tenant="acme", limit="2.50").left, int | Decimal)
assert_type(quota.grant("cost", 50, tenant="acme", until=datetime.now(UTC), by="bo").id, str)
if revoked := quota.revoke("cost", "4711", tenant="acme"):
    assert_type(revoked.amount, int)
quota.reset("cost", tenant="acme")
quota.reset(agent, config)

# Not these.
ScriptedChatModel(["Hello."])  # type: ignore[call-arg,arg-type]  # pyright: ignore[reportCallIssue]
model.calls = ()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
usage(config)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.left("cost", tenant=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
quota.grant("cost", tenant="acme")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
quota.reset(agent, "7")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
quota.reset(quota, config)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
used.tools["search"] = 0  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
