"""Limits whose numbers are functions of the agent's state and runtime."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_quota.limits import Limit, Terms
from langchain_quota.telemetry import Telemetry

_ARGUMENTS = ("thread_limit", "run_limit")


def terms_now(
    limits: Sequence[Limit], state: Any, runtime: Any, telemetry: Telemetry
) -> list[Terms]:
    """The terms of limits for this state and runtime.

    Raises:
        RuntimeError: A function is async; only the agent's async methods can wait for it.
        Exception: Whatever a function raises; it is counted.
    """
    found = []
    for limit in limits:
        computed = {}
        for argument, function in _functions(limit):
            try:
                value = function(state, runtime)
            except Exception as error:
                telemetry.failed("dynamic_limit", error)
                raise
            if inspect.iscoroutine(value):
                value.close()
            if inspect.isawaitable(value):
                raise RuntimeError(
                    f"{argument} of limit {limit.name!r} is async: call the agent with ainvoke or "
                    "astream"
                )
            computed[argument] = value
        found.append(Terms.of(limit, **computed))
    return found


async def aterms_now(
    limits: Sequence[Limit], state: Any, runtime: Any, telemetry: Telemetry
) -> list[Terms]:
    """The terms of limits for this state and runtime; async functions are awaited.

    Raises:
        Exception: Whatever a function raises; it is counted.
    """
    found = []
    for limit in limits:
        computed = {}
        for argument, function in _functions(limit):
            try:
                value = function(state, runtime)
                computed[argument] = await value if inspect.isawaitable(value) else value
            except Exception as error:
                telemetry.failed("dynamic_limit", error)
                raise
        found.append(Terms.of(limit, **computed))
    return found


def _functions(
    limit: Limit,
) -> list[tuple[str, Callable[[Any, Any], int | Awaitable[int | None] | None]]]:
    return [
        (argument, function)
        for argument in _ARGUMENTS
        if callable(function := getattr(limit, argument))
    ]
