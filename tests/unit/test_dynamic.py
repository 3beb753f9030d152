"""Limits whose numbers are functions of the agent's state and runtime."""

import asyncio
import gc
import warnings
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import pytest

from langchain_quota import ModelCallLimit, ToolCallLimit
from langchain_quota.limits import Limit, Terms
from langchain_quota.middleware.dynamic import aterms_now, terms_now
from tests.conftest import Signals

STATE = {"plan": 3}


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
    Terms(LIMITS[0], 5, 2, "continue"),
    Terms(LIMITS[1], None, 9, "continue"),
    Terms(LIMITS[2], None, 3, "error"),
]


def test_functions_are_called_with_state_and_runtime(signals: Signals) -> None:
    """The terms have what the functions give for this state and runtime, in the limits' order."""
    assert terms_now(LIMITS, STATE, RUNTIME, signals.telemetry) == EXPECTED


async def test_functions_are_called_on_the_async_path(signals: Signals) -> None:
    """Sync functions give the same under the async hooks."""
    assert await aterms_now(LIMITS, STATE, RUNTIME, signals.telemetry) == EXPECTED


@pytest.mark.parametrize(
    "function",
    [async_plan, AsyncPlan(), lambda state, _: async_plan(state, RUNTIME)],
    ids=["function", "object", "lambda"],
)
async def test_async_functions_are_awaited(function: Any, signals: Signals) -> None:
    """Whatever gives an awaitable is awaited, however it is written."""
    limit = ToolCallLimit(run_limit=function, thread_limit=plan)
    (terms,) = await aterms_now([limit], STATE, RUNTIME, signals.telemetry)
    assert (terms.thread_limit, terms.run_limit) == (5, 5)


@pytest.mark.parametrize("function", [async_plan, AsyncPlan()], ids=["function", "object"])
def test_async_functions_need_async_methods(function: Any, signals: Signals) -> None:
    """Under the sync hooks the error says which limit is async and what to call instead."""
    limit = ToolCallLimit(run_limit=function, name="plan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"run_limit of limit 'plan' is async: .*ainvoke"):
            terms_now([limit], STATE, RUNTIME, signals.telemetry)
        gc.collect()
    # Nobody is told of a coroutine that was never awaited, beside the error.
    assert caught == []


async def test_a_future_needs_async_methods(signals: Signals) -> None:
    """A function that gives a future is async, too."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(4)

    def promised(state: Any, runtime: Any) -> Awaitable[int]:
        return future

    limit = ModelCallLimit(thread_limit=promised)
    with pytest.raises(RuntimeError, match="thread_limit of limit 'model' is async"):
        terms_now([limit], STATE, RUNTIME, signals.telemetry)
    (terms,) = await aterms_now([limit], STATE, RUNTIME, signals.telemetry)
    assert terms.thread_limit == 4


async def test_none_is_no_limit(signals: Signals) -> None:
    """A function may give None: at this moment there is no limit."""
    limit = ToolCallLimit(run_limit=lambda *_: None)
    (terms,) = terms_now([limit], STATE, RUNTIME, signals.telemetry)
    assert terms == Terms(limit, None, None, "continue")
    assert await aterms_now([limit], STATE, RUNTIME, signals.telemetry) == [terms]


async def test_a_function_that_raises(signals: Signals) -> None:
    """The error reaches the caller as it is, from either path, and is counted."""
    limit = ToolCallLimit(run_limit=failing)
    with pytest.raises(LookupError, match="no such tenant"):
        terms_now([limit], STATE, RUNTIME, signals.telemetry)
    assert errors(signals) == 1
    for each in (limit, ToolCallLimit(run_limit=async_failing)):
        with pytest.raises(LookupError, match="no such tenant"):
            await aterms_now([each], STATE, RUNTIME, signals.telemetry)
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
        terms_now([limit], STATE, RUNTIME, signals.telemetry)
    assert repr(value) in str(caught.value)
    with pytest.raises(error, match="run_limit of limit 'plan'"):
        await aterms_now([limit], STATE, RUNTIME, signals.telemetry)
