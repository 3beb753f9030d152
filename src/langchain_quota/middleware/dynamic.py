"""The numbers and subjects of limits at one moment: some are functions of state and runtime."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from langchain_quota.limits import (
    RUN,
    THREAD,
    Limit,
    QuotaTerms,
    Terms,
    checked_count,
    stored_as,
)
from langchain_quota.middleware.origin import Origin, origin
from langchain_quota.middleware.subjects import checked_subject, subject_of
from langchain_quota.state import ledger
from langchain_quota.stores.keys import CountKey
from langchain_quota.telemetry.recorder import Recorder

_ARGUMENTS = ("thread_limit", "run_limit")

_Values = dict[tuple[str, int], Any]
"""What the functions of a limit gave, by argument and, for quotas, the quota's index."""


def terms_now(
    limits: Sequence[Limit],
    state: Any,
    runtime: Any,
    recorder: Recorder,
    *,
    now: float | None = None,
) -> list[Terms]:
    """The terms of limits for this state and runtime.

    Args:
        limits: The limits.
        state: The hook's state.
        runtime: The hook's runtime.
        recorder: Counts what functions raise.
        now: The time in seconds since the Unix epoch, if a store keeps counts.

    Raises:
        RuntimeError: A function is async; only the agent's async methods can wait for it.
        TypeError: A number or subject has the wrong type.
        ValueError: A number is negative, or a subject is missing.
        Exception: Whatever a function raises; it is counted.
    """
    found = []
    caller = origin(runtime, model_name=None)
    for limit in limits:
        values: _Values = {}
        for key, function in _functions(limit):
            try:
                value = function(state, runtime)
            except Exception as error:
                recorder.record_error("dynamic_limit", error)
                raise
            if inspect.iscoroutine(value):
                value.close()
            if inspect.isawaitable(value):
                raise RuntimeError(
                    f"{key[0]} of limit {limit.name!r} is async: call the agent with ainvoke or "
                    "astream"
                )
            values[key] = value
        found.append(_terms(limit, values, state, runtime, caller=caller, now=now))
    return found


async def aterms_now(
    limits: Sequence[Limit],
    state: Any,
    runtime: Any,
    recorder: Recorder,
    *,
    now: float | None = None,
) -> list[Terms]:
    """The terms of limits for this state and runtime; async functions are awaited.

    Args:
        limits: The limits.
        state: The hook's state.
        runtime: The hook's runtime.
        recorder: Counts what functions raise.
        now: The time in seconds since the Unix epoch, if a store keeps counts.

    Raises:
        TypeError: A number or subject has the wrong type.
        ValueError: A number is negative, or a subject is missing.
        Exception: Whatever a function raises; it is counted.
    """
    found = []
    caller = origin(runtime, model_name=None)
    for limit in limits:
        values: _Values = {}
        for key, function in _functions(limit):
            try:
                value = function(state, runtime)
                values[key] = await value if inspect.isawaitable(value) else value
            except Exception as error:
                recorder.record_error("dynamic_limit", error)
                raise
        found.append(_terms(limit, values, state, runtime, caller=caller, now=now))
    return found


def _functions(
    limit: Limit,
) -> Iterator[tuple[tuple[str, int], Callable[[Any, Any], Awaitable[Any] | Any]]]:
    for argument in _ARGUMENTS:
        if callable(function := getattr(limit, argument)):
            yield (argument, 0), function
    for index, quota in enumerate(limit.quotas):
        if callable(quota.limit):
            yield ("limit", index), quota.limit
        if callable(quota.per):
            yield ("per", index), quota.per


def _terms(  # noqa: PLR0913 - what a hook knows
    limit: Limit, values: _Values, state: Any, runtime: Any, *, caller: Origin, now: float | None
) -> Terms:
    computed = {argument: values[argument, 0] for argument in _ARGUMENTS if (argument, 0) in values}
    if now is None:
        return Terms.of(limit, **computed)
    counter = stored_as(limit)
    thread, run = caller.run_thread_id, ledger(state).get("run")
    quotas = []
    for index, quota in enumerate(limit.quotas):
        number = values.get(("limit", index), quota.limit)
        if number is None:
            continue
        what = f"quota {quota.name!r} of limit {limit.name!r}"
        if ("per", index) in values:
            subject = checked_subject(what, values["per", index])
        else:
            subject = subject_of(what, str(quota.per), runtime, caller)
        key = CountKey.at(counter, quota.dimension, subject, quota.window, now)
        quotas.append(
            QuotaTerms(
                scope=quota.name,
                limit=checked_count(f"limit of {what}", number),
                subject=subject,
                key=str(key),
                resets_at=key.resets_at,
                per_thread=quota.per == THREAD,
                computed=callable(quota.limit),
            )
        )
    return Terms.of(
        limit,
        thread_key=None if thread is None else str(CountKey(counter, THREAD, str(thread))),
        run_key=None if run is None else str(CountKey(counter, RUN, run)),
        quotas=tuple(quotas),
        remembers=caller.remembers,
        **computed,
    )
