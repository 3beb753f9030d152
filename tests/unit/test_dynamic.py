"""Limits whose numbers are functions of the agent's state and runtime."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, Quota, ToolCallLimit
from langchain_quota.limits import Limit, QuotaTerms, Terms
from langchain_quota.middleware.dynamic import aterms_now, terms_now
from tests.conftest import Signals

STATE = {"plan": 3, "langchain_quota": {"run": "r1"}}


@dataclass(frozen=True)
class Runtime:
    context: dict[str, int]


RUNTIME = Runtime({"bonus": 2})


def plan(state: Any, runtime: Any) -> int:
    return int(state["plan"]) + int(runtime.context["bonus"])


async def async_plan(state: Any, runtime: Any) -> int:
    await asyncio.sleep(0)
    return plan(state, runtime)


class AsyncPlan:
    """An object that is called, with a method that is awaited."""

    async def __call__(self, state: Any, runtime: Any) -> int:
        return plan(state, runtime)


def failing(state: Any, runtime: Any) -> int:
    raise LookupError("no such tenant")


async def async_failing(state: Any, runtime: Any) -> int:
    raise LookupError("no such tenant")


def errors(signals: Signals) -> float | None:
    return signals.value(
        "langchain_quota_errors_total", component="dynamic_limit", error_type="LookupError"
    )


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (ToolCallLimit(run_limit=1), False),
        (ToolCallLimit(run_limit=1, message=lambda _: "no"), False),
        (ToolCallLimit(run_limit=plan), True),
        (ToolCallLimit(thread_limit=plan, run_limit=1), True),
        (ModelCallLimit(thread_limit=1), False),
        (ModelCallLimit(thread_limit=async_plan), True),
    ],
)
def test_which_limits_are_dynamic(limit: Limit, expected: bool) -> None:  # noqa: FBT001 - a row of the table
    """A limit is dynamic if either number is a function; its message does not matter."""
    assert limit.is_dynamic is expected


LIMITS: list[Limit] = [
    ToolCallLimit("search", thread_limit=plan, run_limit=2),
    ToolCallLimit(run_limit=9),
    ModelCallLimit(run_limit=lambda state, _: state["plan"], exit_behavior="error"),
]
EXPECTED = [
    Terms(LIMITS[0], 5, 2, "continue", computed=("thread",)),
    Terms(LIMITS[1], None, 9, "continue"),
    Terms(LIMITS[2], None, 3, "error", computed=("run",)),
]


def test_functions_are_called_with_state_and_runtime(signals: Signals) -> None:
    """The terms have what the functions give for this state and runtime, in the limits' order."""
    assert terms_now(LIMITS, STATE, RUNTIME, signals.recorder) == EXPECTED


async def test_functions_are_called_on_the_async_path(signals: Signals) -> None:
    """Sync functions give the same under the async hooks."""
    assert await aterms_now(LIMITS, STATE, RUNTIME, signals.recorder) == EXPECTED


@pytest.mark.parametrize(
    "function",
    [async_plan, AsyncPlan(), lambda state, _: async_plan(state, RUNTIME)],
    ids=["function", "object", "lambda"],
)
async def test_async_functions_are_awaited(function: Any, signals: Signals) -> None:
    """Whatever gives an awaitable is awaited, however it is written."""
    limit = ToolCallLimit(run_limit=function, thread_limit=plan)
    (terms,) = await aterms_now([limit], STATE, RUNTIME, signals.recorder)
    assert (terms.thread_limit, terms.run_limit) == (5, 5)


@pytest.mark.parametrize("function", [async_plan, AsyncPlan()], ids=["function", "object"])
def test_async_functions_need_async_methods(function: Any, signals: Signals) -> None:
    """Under the sync hooks the error says which limit is async and what to call instead."""
    limit = ToolCallLimit(run_limit=function, name="plan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"run_limit of limit 'plan' is async: .*ainvoke"):
            terms_now([limit], STATE, RUNTIME, signals.recorder)
        gc.collect()
    # Nobody is told of a coroutine that was never awaited, beside the error. What other tests
    # left to the garbage collector may be told here, too.
    assert [each for each in caught if "never awaited" in str(each.message)] == []


async def test_a_future_needs_async_methods(signals: Signals) -> None:
    """A function that gives a future is async, too."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(4)

    def promised(state: Any, runtime: Any) -> Awaitable[int]:
        return future

    limit = ModelCallLimit(thread_limit=promised)
    with pytest.raises(RuntimeError, match="thread_limit of limit 'model' is async"):
        terms_now([limit], STATE, RUNTIME, signals.recorder)
    (terms,) = await aterms_now([limit], STATE, RUNTIME, signals.recorder)
    assert terms.thread_limit == 4


async def test_none_is_no_limit(signals: Signals) -> None:
    """A function may give None: at this moment there is no limit."""
    limit = ToolCallLimit(run_limit=lambda *_: None)
    (terms,) = terms_now([limit], STATE, RUNTIME, signals.recorder)
    assert terms == Terms(limit, None, None, "continue", computed=("run",))
    assert await aterms_now([limit], STATE, RUNTIME, signals.recorder) == [terms]


async def test_a_function_that_raises(signals: Signals) -> None:
    """The error reaches the caller as it is, from either path, and is counted."""
    limit = ToolCallLimit(run_limit=failing)
    with pytest.raises(LookupError, match="no such tenant"):
        terms_now([limit], STATE, RUNTIME, signals.recorder)
    assert errors(signals) == 1
    for each in (limit, ToolCallLimit(run_limit=async_failing)):
        with pytest.raises(LookupError, match="no such tenant"):
            await aterms_now([each], STATE, RUNTIME, signals.recorder)
    assert errors(signals) == 3


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (2.5, TypeError), ("3", TypeError), (-1, ValueError)]
)
async def test_what_a_function_gives_is_checked(
    value: Any, error: type[Exception], signals: Signals
) -> None:
    """A number out of bounds fails the run with an error that names the limit and the value."""
    limit = ToolCallLimit(run_limit=lambda *_: value, name="plan")
    with pytest.raises(error, match="run_limit of limit 'plan'") as caught:
        terms_now([limit], STATE, RUNTIME, signals.recorder)
    assert repr(value) in str(caught.value)
    with pytest.raises(error, match="run_limit of limit 'plan'"):
        await aterms_now([limit], STATE, RUNTIME, signals.recorder)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
TODAY = f"86400:{NOON.timestamp() // 86400:.0f}"


@dataclass(frozen=True)
class Run:
    """What LangGraph tells a hook of the run."""

    thread_id: object
    checkpoint_ns: str = "node:task"
    task_id: str = "task"


@dataclass(frozen=True)
class ThreadRuntime:
    """The runtime of a hook that runs on a thread."""

    context: Any
    execution_info: Run = Run(7)


ANN = ThreadRuntime({"user_id": "ann", "plan": "pro"})


def tenant(state: Any, runtime: Any) -> object:
    return runtime.context["user_id"].upper()


async def async_tenant(state: Any, runtime: Any) -> object:
    await asyncio.sleep(0)
    return tenant(state, runtime)


def shared(limit: Limit, signals: Signals, runtime: Any = ANN, now: datetime = NOON) -> Terms:
    (terms,) = terms_now([limit], STATE, runtime, signals.recorder, now=now.timestamp())
    return terms


async def test_the_terms_of_quotas(signals: Signals) -> None:
    """Each quota has its subject, key and end of window at this moment, on either path."""
    limit = ToolCallLimit(
        "email", quotas=[Quota(5, per="user_id", window=DAY), Quota(99, per="global")]
    )
    terms = shared(limit, signals)
    assert terms.quotas == (
        QuotaTerms(
            "user_id", 5, "ann", f"email:user_id:ann:{TODAY}", datetime(2026, 1, 2, tzinfo=UTC)
        ),
        QuotaTerms("global", 99, "", "email:global:"),
    )
    now = NOON.timestamp()
    assert await aterms_now([limit], STATE, ANN, signals.recorder, now=now) == [terms]


async def test_without_a_store_there_are_no_keys(signals: Signals) -> None:
    """Where no store is, nobody's id is asked for."""
    limit = ToolCallLimit(thread_limit=3, quotas=[Quota(5, per="user_id")])
    for terms in (
        *terms_now([limit], STATE, RUNTIME, signals.recorder),
        *await aterms_now([limit], STATE, RUNTIME, signals.recorder),
    ):
        assert terms == Terms(limit, 3, None, "continue")


def test_a_threads_key(signals: Signals) -> None:
    """A thread limit and a quota per thread without a window are kept under one key."""
    limit = ToolCallLimit("search", thread_limit=3, run_limit=2)
    quota = ToolCallLimit("search", quotas=[Quota(5)])
    assert shared(limit, signals).thread_key == "search:thread:7"
    (per_thread,) = shared(quota, signals).quotas
    assert per_thread == QuotaTerms("thread", 5, "7", "search:thread:7", per_thread=True)
    assert shared(quota, signals).thread_key is None


def test_a_run_without_a_thread_has_no_key(signals: Signals) -> None:
    """Without a thread's id its count stays in the state; a quota per thread is refused."""
    nowhere = ThreadRuntime({}, Run(None))
    assert shared(ToolCallLimit(thread_limit=3), signals, nowhere).thread_key is None
    with pytest.raises(ValueError, match=r"quota 'thread' of limit 'tool:\*' is per thread"):
        shared(ToolCallLimit(quotas=[Quota(5)]), signals, nowhere)


def test_a_runs_key(signals: Signals) -> None:
    """A run limit is kept under the run's name, on any thread or none; other limits are not."""
    limit = ToolCallLimit("search", thread_limit=3, run_limit=2)
    assert shared(limit, signals).run_key == "search:run:r1"
    nowhere = ThreadRuntime({}, Run(None))
    assert shared(limit, signals, nowhere).run_key == "search:run:r1"
    assert shared(ModelCallLimit(run_limit=2), signals).run_key == "model:run:r1"
    assert shared(ToolCallLimit(thread_limit=3), signals).run_key is None


@pytest.mark.parametrize("known", [{}, {"run": None}], ids=["begun before", "reset"])
def test_a_run_without_a_name_has_no_key(known: Any, signals: Signals) -> None:
    """What began before runs had names, or was reset, is counted by the state alone."""
    limit = ToolCallLimit(run_limit=3)
    state = {"langchain_quota": known}
    (terms,) = terms_now([limit], state, ANN, signals.recorder, now=NOON.timestamp())
    assert (terms.run_key, terms.shared) == (None, False)


def test_windows_follow_each_other(signals: Signals) -> None:
    """At the edge of a window the key is another one, and the reset is the next edge."""
    limit = ToolCallLimit("search", quotas=[Quota(5, per="global", window=DAY)])
    edge = datetime(2026, 1, 2, tzinfo=UTC)
    (before,) = shared(limit, signals, now=edge - timedelta(microseconds=1)).quotas
    (after,) = shared(limit, signals, now=edge).quotas
    assert (before.resets_at, after.resets_at) == (edge, edge + DAY)
    assert before.key != after.key


def test_what_is_counted_apart_has_keys_apart(signals: Signals) -> None:
    """Other calls, other subjects, other windows: none shares a count with another."""
    hour = timedelta(hours=1)
    limits: list[Limit] = [
        ModelCallLimit(thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit("model", thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit(thread_limit=1, quotas=[Quota(1, per="user_id")]),
        ToolCallLimit(exclude=["model"], quotas=[Quota(1, per="user_id"), Quota(1, per="plan")]),
        ToolCallLimit(
            "search",
            quotas=[Quota(1), Quota(1, window=DAY, name="day"), Quota(1, window=hour, name="hour")],
        ),
    ]
    found = [shared(limit, signals) for limit in limits]
    kept = [each.thread_key for each in found if each.thread_key]
    kept += [quota.key for each in found for quota in each.quotas]
    assert len(kept) == len(set(kept)) == 11


@pytest.mark.parametrize("function", [tenant, async_tenant], ids=["sync", "async"])
async def test_a_function_says_whose_calls(function: Any, signals: Signals) -> None:
    """A subject that is computed is kept under the quota's name."""
    limit = ToolCallLimit("search", quotas=[Quota(5, per=function, name="tenant")])
    now = NOON.timestamp()
    (terms,) = await aterms_now([limit], STATE, ANN, signals.recorder, now=now)
    assert terms.quotas == (QuotaTerms("tenant", 5, "ANN", "search:tenant:ANN"),)


async def test_a_quotas_number_can_be_computed(signals: Signals) -> None:
    """A computed number is marked so; `None` is no quota, and then nobody is asked whose it is."""
    limit = ToolCallLimit(
        quotas=[
            Quota(lambda state, _: state["plan"], per="user_id"),
            Quota(lambda *_: None, per="unknown"),
        ]
    )
    terms = shared(limit, signals)
    assert [(each.scope, each.limit, each.computed) for each in terms.quotas] == [
        ("user_id", 3, True)
    ]
    now = NOON.timestamp()
    assert await aterms_now([limit], STATE, ANN, signals.recorder, now=now) == [terms]


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


@pytest.mark.parametrize(
    "quota",
    [Quota(failing, per="global"), Quota(1, per=failing, name="tenant")],
    ids=["limit", "per"],
)
async def test_a_quotas_function_that_raises(quota: Quota, signals: Signals) -> None:
    """The error reaches the caller as it is, from either path, and is counted."""
    limit = ToolCallLimit(quotas=[quota])
    with pytest.raises(LookupError, match="no such tenant"):
        shared(limit, signals)
    with pytest.raises(LookupError, match="no such tenant"):
        await aterms_now([limit], STATE, ANN, signals.recorder, now=NOON.timestamp())
    assert errors(signals) == 2


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (2.5, TypeError), ("3", TypeError), (-1, ValueError)]
)
def test_a_computed_quota_is_checked(value: Any, error: type[Exception], signals: Signals) -> None:
    """A number out of bounds fails the run with an error that names quota, limit and value."""
    limit = ToolCallLimit(quotas=[Quota(lambda *_: value, per="user_id")], name="plan")
    with pytest.raises(error, match="limit of quota 'user_id' of limit 'plan'") as caught:
        shared(limit, signals)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error"), [(None, TypeError), (True, TypeError), ("", ValueError)]
)
def test_a_computed_subject_is_checked(
    value: Any, error: type[Exception], signals: Signals
) -> None:
    """A function that names nobody fails the run, and no calls are counted as everybody's."""
    limit = ToolCallLimit(quotas=[Quota(5, per=lambda *_: value, name="tenant")], name="plan")
    with pytest.raises(error, match="the subject of quota 'tenant' of limit 'plan'"):
        shared(limit, signals)
