"""The limits and the places of their counts, for a state, a runtime and a time."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple
from uuid import UUID

from langchain_quota.core.admission import Rollover
from langchain_quota.core.plans import (
    LimitSet,
    Meter,
    Place,
    Places,
    Rule,
    store_counter,
    thread_counter,
)
from langchain_quota.limits import Limit, is_dynamic
from langchain_quota.limits.call import ROOT_RUN, RUN, THREAD, Kind
from langchain_quota.limits.options import has_number, whole_amount
from langchain_quota.limits.quotas import Quota
from langchain_quota.middleware.context import CallContext
from langchain_quota.middleware.state import State, ledger
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.sync_async import Mode, newest_dicts
from langchain_quota.runtime.units import computed
from langchain_quota.stores.keys import CountKey, check_prefix, read_emission_interval
from langchain_quota.telemetry.recorder import Recorder

_MOST_RUNS = 256
"""The number of runs and subjects for which limits are kept."""


class LimitResolver:
    """Resolves limits for a state, a runtime and a time."""

    def __init__(
        self, limits: Sequence[Limit], recorder: Recorder, store: StoreClient | None
    ) -> None:
        # Limits on concurrency have a feature of their own.
        self.of_kind: dict[Kind | None, list[Limit]] = {
            kind: [limit for limit in limits if has_number(limit) and kind in {*limit.kinds, None}]
            for kind in ("model", "tool", None)
        }
        self.recorder = recorder
        self._store = store
        # The limits whose numbers are no functions.
        self._numbers = {limit.name: fixed(limit) for limit in limits if not is_dynamic(limit)}
        # What the newest runs are held to, and the plans for the newest numbers.
        self._newest = newest_dicts(_MOST_RUNS)
        self._compiled = newest_dicts(_MOST_RUNS)
        self._named: set[Kind | None] = {
            kind for kind, of_kind in self.of_kind.items() if all(map(_depends_on_names, of_kind))
        }
        """The kinds of calls whose limits follow from thread, run, names and the time alone."""
        self.fixed: dict[Kind | None, tuple[LimitSet, Places]] = {}
        """Limits whose maximum never changes, by kind of call."""
        self.root_run_subject: Callable[..., Awaitable[str]] | None = None
        """Names the root run, by mode, state, caller and prefix, if a quota needs it."""
        if store is None and len(self._numbers) == len(limits):
            self.fixed = {
                kind: (LimitSet(self._numbers[limit.name] for limit in of_kind), {})
                for kind, of_kind in self.of_kind.items()
            }

    async def resolve(
        self,
        mode: Mode,
        kind: Kind | None,
        state: State,
        runtime: object,
        caller: CallContext,
    ) -> tuple[LimitSet, Places]:
        """Return the limits on calls of a kind, or on all calls, and where their counts are now."""
        store = self._store
        prefix = "" if store is None else prefix_now(store.prefix, state, runtime)
        subject = ""
        if self.root_run_subject is not None:
            subject = await self.root_run_subject(mode, state, caller, prefix)
        now = 0.0 if store is None else store.clock()
        moment = _ResolutionContext(mode, state, runtime, caller, prefix, subject, now)
        newest: dict[str, Any] = {}
        if kind in self._named:
            quotas = [(limit, quota) for limit in self.of_kind[kind] for quota in limit.quotas]
            names = [await self._subject(moment, limit, quota) for limit, quota in quotas]
            run = caller.run_thread_id, caller.remembers, ledger(state).get("run")
            newest = self._newest((kind, prefix, *run, *names))
            since, until, limits, places = newest.get("limits", (inf, 0.0, None, None))
            if since <= now < until:
                return limits, places
        places = {}
        rules = [await self._rule(moment, limit, places) for limit in self.of_kind[kind]]
        numbers = self._compiled((kind, *[(rule.meters, rule.shared) for rule in rules]))
        limits = numbers["limits"] = numbers.get("limits") or LimitSet(rules)
        ends = [place.resets_at.timestamp() for place in places.values() if place.resets_at]
        newest["limits"] = now, min(ends, default=inf), limits, places
        return limits, places

    async def _rule(
        self, moment: "_ResolutionContext", limit: Limit, places: dict[str, Place]
    ) -> Rule:
        """Return the rule of a limit, and add the places of its counts."""
        rule = self._numbers.get(limit.name)
        if rule is None:
            thread = await self._evaluate(moment, limit, "thread_limit", limit.thread_limit)
            run = await self._evaluate(moment, limit, "run_limit", limit.run_limit)
            rule = Rule.of(limit, thread=thread, run=run)
        if self._store is None or not limit.counted:
            return rule
        caller, counter = moment.caller, store_counter(limit)
        subjects = caller.run_thread_id, ledger(moment.state).get("run")
        for meter, name in zip(rule.meters, subjects, strict=True):
            # Without a limit the store does not count. The state always keeps the run's count.
            if name is not None and meter.is_limited and meter.counter not in places:
                key = CountKey(counter, meter.scope, str(name), prefix=moment.prefix)
                mirrored = meter.scope == RUN or caller.remembers
                places[meter.counter] = Place(str(key), mirrored, key.subject)
        meters = [*rule.meters]
        for quota in limit.quotas:
            maximum = await self._evaluate(moment, limit, "limit", quota.limit)
            if maximum is None and quota.smooth:
                # Its count would have no rate at which it drains.
                continue
            subject = await self._subject(moment, limit, quota)
            meter, place = quota_meter(
                limit, quota, maximum, subject, prefix=moment.prefix, now=moment.now
            )
            # Quotas of several limits may be one count, and a thread's in all is that of the limit.
            same = (name for name, other in places.items() if other.key == place.key)
            meter = meter._replace(counter=next(same, meter.counter))
            if quota.per == THREAD and quota.period is None:
                place = place._replace(mirrored=caller.remembers)
            places.setdefault(meter.counter, place)
            meters.append(meter)
        return rule.stored(meters, places)

    async def _subject(self, moment: "_ResolutionContext", limit: Limit, quota: Quota) -> str:
        what = f"quota {quota.name!r} of limit {limit.name!r}"
        if callable(quota.per):
            return subject_text(what, await self._evaluate(moment, limit, "per", quota.per))
        if quota.per == ROOT_RUN:
            return moment.subject
        return _named(what, quota.per, moment.runtime, moment.caller)

    async def _evaluate(
        self, moment: "_ResolutionContext", limit: Limit, argument: str, value: Any
    ) -> Any:
        """Return a value, or that of the user's function, whose errors are counted and named."""
        if not callable(value):
            return value
        try:
            value = value(moment.state, moment.runtime)
            if moment.mode and inspect.isawaitable(value):
                value = await value
        except Exception as error:
            error.add_note(f"raised by the function for {argument} of limit {limit.name!r}")
            self.recorder.record_error("dynamic_limit", error)
            raise
        if inspect.iscoroutine(value):
            value.close()
        if inspect.isawaitable(value):
            raise RuntimeError(
                f"{argument} of limit {limit.name!r} is async: call the agent with ainvoke or "
                "astream"
            )
        return computed(value)


class _ResolutionContext(NamedTuple):
    """Values on which limits depend."""

    mode: Mode
    state: State
    runtime: object
    caller: CallContext
    prefix: str
    subject: str
    now: float


def _depends_on_names(limit: Limit) -> bool:
    """Return whether the user has no function that computes a part of a limit for each call."""
    functions = [function for quota in limit.quotas for function in (quota.limit, quota.per)]
    return not is_dynamic(limit) and not any(map(callable, functions))


def fixed(limit: Limit) -> Rule:
    """Return the rule of a limit whose numbers are no functions."""
    return Rule.of(limit, thread=limit.thread_limit, run=limit.run_limit)


def quota_meter(  # noqa: PLR0913 - what a key needs
    limit: Limit, quota: Quota, maximum: object, subject: str, *, prefix: str, now: float
) -> tuple[Meter, Place]:
    """Return the meter of a quota, and its place at a time in seconds since the Unix epoch."""
    what = f"limit of quota {quota.name!r} of limit {limit.name!r}"
    counter, window = store_counter(limit), quota.period
    number = None if maximum is None else whole_amount(limit.unit, what, maximum)
    rate = None if number is None or not quota.smooth else max(1, number)
    at = partial(CountKey.at, counter, quota.dimension, subject, window, prefix=prefix, limit=rate)
    key, rollover = at(now), None
    if quota.rollover is not None and number is not None:
        most, ends = whole_amount(limit.unit, "rollover", quota.rollover), key.ends or 0
        previous, following = at(ends - (key.window or 0) - 1), at(ends)
        rollover = Rollover(str(previous), most, number, following.ends or 0)
    spacing: float = read_emission_interval(str(key))
    if spacing and limit.unit != "calls":
        spacing = (key.window or 0) * 10**6 / (rate or 1)
    # A thread's use in all is one count, for every limit.
    in_all = quota.dimension == THREAD and key.window is None
    meter = Meter(
        quota.name,
        # No other name of a count has a colon, and a name after it.
        thread_counter(limit) if in_all else f"{limit.name}:{quota.name}",
        number
        if number is None or not quota.smooth
        else min(number, quota.burst or (1 if limit.unit == "calls" else number)),
        amount=int(limit.unit == "calls"),
        computed=callable(quota.limit),
        per=quota.dimension,
        spacing=spacing,
        window=key.window or 0 if quota.smooth else 0,
    )
    # The handler of the root run has its count, too.
    mirrored = quota.per == ROOT_RUN
    return meter, Place(str(key), mirrored, key.subject, key.resets_at, rollover)


def _named(what: str, per: str, runtime: object, caller: CallContext) -> str:
    """Return the subject of a quota whose `per` is a name."""
    if per == "global":
        return ""
    if per == THREAD:
        if caller.run_thread_id is None:
            raise ValueError(
                f"{what} is per thread, and this run has none: call the agent with "
                '{"configurable": {"thread_id": …}}'
            )
        return subject_text(what, str(caller.run_thread_id))
    if per == "agent":
        if not caller.agent:
            raise ValueError(f"{what} is per agent, and this one has no name: create_agent(name=…)")
        return caller.agent
    context = getattr(runtime, "context", None)
    value = context.get(per) if isinstance(context, Mapping) else getattr(context, per, None)
    if value is None:
        raise ValueError(
            f"{what} needs {per!r} in runtime.context: call the agent with "
            f'context={{"{per}": …}}, or an object that has it'
        )
    return subject_text(what, value)


def subject_text(what: str, value: object) -> str:
    """Validate a subject, and return its text."""
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise TypeError(
            f"the subject of {what} must be a string, a whole number or a UUID, not "
            f"{type(value).__name__}"
        )
    if not str(value):
        raise ValueError(f"the subject of {what} must not be empty")
    return str(value)


def prefix_now(prefix: object, state: object, runtime: object) -> str:
    """Return the prefix of the store's keys now; empty where its prefix is no function."""
    if not callable(prefix):
        return ""
    try:
        value = prefix(state, runtime)
    except Exception as error:
        error.add_note("raised by the function for prefix of the store")
        raise
    if inspect.iscoroutine(value):
        value.close()
    return check_prefix("what the function for prefix of the store gives", value)
