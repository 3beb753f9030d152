"""Who calls, from what LangGraph gives a hook, and the limits that hold for them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.limits import Limit
from langchain_quota.middleware._context import (
    CallContext,
    aresolve,
    resolve,
    subject_of,
)
from langchain_quota.middleware._reset import thread_keys
from langchain_quota.resolved import ResolvedLimit, ResolvedQuota
from tests.signals import Signals

WHAT = "quota 'daily' of limit 'tool:email'"


@dataclass(frozen=True)
class With:
    """A runtime with a context."""

    context: Any


@pytest.mark.parametrize(
    ("per", "caller", "remedy"),
    [
        ("thread", CallContext("boss"), r"this run has none: .*thread_id"),
        ("agent", CallContext(None, run_thread_id=7), r"create_agent\(name="),
        ("agent", CallContext("", run_thread_id=7), r"create_agent\(name="),
    ],
)
def test_a_caller_that_is_not_known_is_refused(per: str, caller: CallContext, remedy: str) -> None:
    """Runs without a thread, and agents without a name, are not counted as one."""
    with pytest.raises(ValueError, match=remedy) as caught:
        subject_of(WHAT, per, None, caller)
    assert WHAT in str(caught.value)


STATE = {"plan": 3, "langchain_quota": {"run": "r1"}}
BONUS = With({"bonus": 2})
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
TODAY = f"86400:{NOON.timestamp() // 86400:.0f}"


def plan(state: Any, runtime: Any) -> int:
    return int(state["plan"]) + int(runtime.context["bonus"])


async def async_plan(state: Any, runtime: Any) -> int:
    await asyncio.sleep(0)
    return plan(state, runtime)


@dataclass(frozen=True)
class Run:
    """What LangGraph says to a hook of the run."""

    thread_id: object
    checkpoint_ns: str = "node:task"
    task_id: str = "task"


@dataclass(frozen=True)
class OnThread:
    """The runtime of a hook that runs on a thread."""

    context: Any
    execution_info: Run = Run(7)


ANN = OnThread({"user_id": "ann", "plan": "pro"})


def tenant(state: Any, runtime: Any) -> object:
    return runtime.context["user_id"].upper()


async def async_tenant(state: Any, runtime: Any) -> object:
    await asyncio.sleep(0)
    return tenant(state, runtime)


def shared(
    limit: Limit, signals: Signals, runtime: Any = ANN, now: datetime = NOON
) -> ResolvedLimit:
    """A limit as it is where a store keeps counts."""
    (resolved,) = resolve([limit], STATE, runtime, signals.recorder, now=now.timestamp())
    return resolved


async def ashared(limit: Limit, signals: Signals, runtime: Any = ANN) -> ResolvedLimit:
    """The same under the async hooks."""
    now = NOON.timestamp()
    (resolved,) = await aresolve([limit], STATE, runtime, signals.recorder, now=now)
    return resolved


@pytest.mark.parametrize(
    "quota",
    [Quota(async_plan, per="global"), Quota(1, per=async_tenant, name="global_tenant")],
    ids=["limit", "per"],
)
def test_async_functions_of_quotas_need_async_methods(quota: Quota, signals: Signals) -> None:
    """Under the sync hooks the error says which argument of which limit is async."""
    argument = "limit" if callable(quota.limit) else "per"
    with pytest.raises(RuntimeError, match=rf"{argument} of limit 'tool:\*' is async: .*ainvoke"):
        shared(ToolCallLimit(quotas=[quota]), signals)


@pytest.mark.parametrize(("value", "error"), [(None, TypeError), ("", ValueError)])
def test_a_computed_subject_is_checked(
    value: Any, error: type[Exception], signals: Signals
) -> None:
    """A function without a subject fails the run; its calls are not counted for everybody."""
    limit = ToolCallLimit(quotas=[Quota(5, per=lambda *_: value, name="tenant")], name="plan")
    with pytest.raises(error, match="the subject of quota 'tenant' of limit 'plan'"):
        shared(limit, signals)


async def test_quotas_are_resolved(signals: Signals) -> None:
    """Each has its number, subject, key and end of window at this moment, on either path.

    A number of `None` is no quota, and then nobody is asked whose it is.
    """
    limit = ToolCallLimit(
        "email",
        quotas=[
            Quota(5, per="user_id", window=DAY),
            Quota(lambda state, _: state["plan"], per="global"),
            Quota(7, per=tenant, name="tenant"),
            Quota(lambda *_: None, per="unknown"),
        ],
    )
    resolved = shared(limit, signals)
    assert resolved.quotas == (
        ResolvedQuota(
            "user_id",
            5,
            "ann",
            f"email:user_id:ann:{TODAY}",
            datetime(2026, 1, 2, tzinfo=UTC),
            per="user_id",
        ),
        ResolvedQuota("global", 3, "", "email:global:", per="global", computed=True),
        ResolvedQuota("tenant", 7, "ANN", "email:tenant:ANN", per="tenant"),
    )
    assert resolved.computed == ("global",)
    assert await ashared(limit, signals) == resolved
    awaited = replace(limit, quotas=[Quota(7, per=async_tenant, name="tenant")])
    assert (await ashared(awaited, signals)).quotas == resolved.quotas[2:]


def test_without_a_store_there_are_no_keys(signals: Signals) -> None:
    """Where no store is, nobody's id is asked for."""
    limit = ToolCallLimit(thread_limit=3, quotas=[Quota(5, per="user_id")])
    assert resolve([limit], STATE, BONUS, signals.recorder) == [ResolvedLimit(limit, 3, None)]


@pytest.mark.parametrize("tool", ["search", "model"])
def test_a_reset_finds_what_is_counted(tool: str, signals: Signals) -> None:
    """A thread's reset names the very keys under which its calls are counted, and no others."""
    daily = Quota(5, window=DAY, name="daily")
    limits: Sequence[Limit] = [
        ToolCallLimit(tool, thread_limit=9, quotas=[daily, Quota(5, per="global", window=DAY)]),
        ModelCallLimit(quotas=[Quota(5)]),
    ]
    first, second = (shared(limit, signals) for limit in limits)
    found = thread_keys(limits, {"configurable": {"thread_id": "7"}}, NOON.timestamp())
    keys = [str(first.thread_key), first.quotas[0].key, second.quotas[0].key]
    assert found == sorted(keys)
