"""Let calls wait for room in the windows of quotas, first come, first served.

A waiting call stands in one queue: that of the quota which has room last. So it delays no call that
needs other quotas only. The tool calls of a message are admitted together, as soon as the first one
can start. Under a smooth quota the others get start times, for which the hook around tools waits.
"""

import math
import time
from collections import Counter as Counts
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from secrets import token_hex

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.core.admission import AcquireRequest, Correction, Demand, Threshold
from langchain_quota.core.plans import Meter, Place
from langchain_quota.core.stops import make_reason
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call, Kind, Scope
from langchain_quota.limits.options import has_number
from langchain_quota.middleware.calls import Change, Step, refund_corrections
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature, StepCheck, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import as_edited
from langchain_quota.middleware.state import feature_ledger, ledger, refunds_of
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.expiring_dict import ExpiringDict
from langchain_quota.runtime.queues import LOOKS_AGAIN, Queues, Waiter, queues_of
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.keys import seconds_until_room

_MIN_PAUSE = 0.001
"""Shortest pause before a waiting call asks the store again, in seconds."""

_MICROSECOND = 1e-6
_MAX_REMEMBERED = 10_000
"""For how many messages and calls this process remembers when they started."""


class Waiting(Feature):
    """Queues calls for limits with `wait`, and says when a smooth quota has room again."""

    name = "waiting"
    store: StoreClient
    """Quotas need one."""

    @classmethod
    def create(cls, kernel: Kernel) -> "Waiting | None":
        """Return the feature if a limit has `wait` or a quota is smooth."""
        has_smooth_quota = any(quota.smooth for limit in kernel.limits for quota in limit.quotas)
        return cls(kernel) if has_smooth_quota or _max_waits(kernel.limits) else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools if calls of a message can start one after the other."""
        smooth = (limit.name for limit in limits if any(quota.smooth for quota in limit.quotas))
        return () if _max_waits(limits).keys().isdisjoint(smooth) else ("wrap_tool_call",)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._max_waits = _max_waits(kernel.limits)
        # When the first call of a message started, and the clock when that was last looked up.
        self._first_starts: ExpiringDict[tuple[float, float]] = ExpiringDict(_MAX_REMEMBERED)
        self._cancelled: ExpiringDict[bool] = ExpiringDict(_MAX_REMEMBERED)
        self._id = token_hex(8)
        self._lock = fork_safe_lock()

    def _with_resets(self, step: Step) -> Step:
        """Set `resets_at` of smooth quotas to the time when the next call fits."""
        result, places = step.result, {**step.places}
        if not result.drained_in:
            return step
        now, charged = self.store.clock(), result.charged(step.demands)
        # Of the limits on one count, the smallest burst says when the next call fits.
        smooth = (meter for meter in _meters_by_scope(step).values() if meter.spacing)
        for meter in sorted(smooth, key=lambda meter: -(meter.maximum or 0)):
            name, place = meter.counter, places[meter.counter]
            room = (meter.maximum or 0) - meter.amount - charged[name]
            wait = seconds_until_room(place.key, result.drained_in[name], room)
            places[name] = place._replace(resets_at=in_utc(now + wait))
        return step._replace(places=places)

    async def admit(self, mode: Mode, step: Step, admit: StepCheck) -> Step:
        """Check a step when there is room for it, or when it may wait no longer."""
        waits = {
            quota: (meter, place)
            for quota, meter in _meters_by_scope(step).items()
            if quota[0] in self._max_waits and (place := step.places.get(meter.counter))
            if meter.per and (meter.spacing or place.resets_at)
        }
        if not waits:
            return self._with_resets(await admit(mode, step))
        waiter, queues = Waiter(mode, step.waited), queues_of(self.store.store)
        deadline = waiter.came_at + min(self._max_waits[limit] for limit, _ in waits)
        if step.waited_for:
            # Calls that are checked again, because a limit asks, have waited before.
            step, _ = self._allow_later_starts(step, deadline)
            return self._with_resets(await admit(mode, step))
        quotas = {_queue_of(*waited): quota for quota, waited in waits.items()}
        wait = _Wait(step, deadline, queues, quotas, waiter, *next(iter(waits)))
        attempt, waiting = partial(self._attempt, mode, wait, admit), partial(self._waiting, wait)
        is_over = False
        try:
            if not await waiter.retry(attempt, deadline, waiting):
                await self._check_now(mode, wait, admit)
            is_over = True
        finally:
            queues.leave(waiter)
            step = wait.step._replace(waited=waiter.waited, waited_for=wait.limit)
            # If a person is asked, the calls that run are known later.
            if step.is_second or not is_over:
                self._record_waits(step, is_over=is_over)
        return step

    async def _attempt(self, mode: Mode, wait: "_Wait", admit: StepCheck) -> float:
        """Check the calls if it is their turn; return in how many seconds to do so again."""
        if not wait.queues.is_next(wait.waiter, sorted(wait.quotas)):
            wait.limit, wait.scope = wait.quotas[wait.waiter.queue]
            return math.inf
        step = await self._rebuild(mode, wait.step) if wait.waiter.has_waited else wait.step
        # Let a refusal by a limit with `wait` stop all calls: then none is charged, so that they
        # can be checked again later.
        stops = step.stops
        waiting = {**stops, **dict.fromkeys(self._max_waits, 1)}
        step = step._replace(stops=waiting, outage_stops=stops)
        step, later_calls = self._allow_later_starts(step, wait.deadline)
        step = self._with_resets(await admit(mode, step))
        # These stops have names of limits on other calls, too.
        wait.step = step = step._replace(stops=stops)
        if not (step.result.stopped and step.answered):
            return 0.0
        pause, last, quota = self._find_missing_room(step, stops, later_calls)
        if time.monotonic() + last > wait.deadline or step.result.frozen:
            await self._check_now(mode, wait, admit)
            return 0.0
        wait.limit, wait.scope = quota
        meter = _meters_by_scope(step)[quota]
        wait.queues.move(wait.waiter, _queue_of(meter, step.places[meter.counter]))
        return min(pause, LOOKS_AGAIN)

    async def _check_now(self, mode: Mode, wait: "_Wait", admit: StepCheck) -> None:
        """Check calls that wait no longer, with their own stops: so `exit_behavior` decides."""
        step, _ = self._allow_later_starts(await self._rebuild(mode, wait.step), wait.deadline)
        wait.step = self._with_resets(await admit(mode, step))

    @contextmanager
    def _waiting(self, wait: "_Wait") -> Iterator[None]:
        """Write an event to the run's stream before the first wait, and count the wait."""
        if self.recorder.streams and not wait.waiter.has_waited:
            step, result = wait.step, wait.step.result
            meter = _meters_by_scope(step)[wait.limit, wait.scope]
            place = step.places[meter.counter]
            reason = make_reason(
                "waiting",
                wait.limit,
                wait.scope,
                subject=self.recorder.subject_label(wait.scope, place.subject),
                used=result.used[meter.counter] if step.answered else None,
                threshold=meter.maximum,
                unit=next(one.unit for one in self._kernel.limits if one.name == wait.limit),
                resets_at=place.resets_at,
            )
            self.recorder.stream("waiting", reason)
        caller = wait.step.context
        with self.recorder.waiting(caller.agent, wait.limit, caller.thread_id):
            yield

    async def _rebuild(self, mode: Mode, step: Step) -> Step:
        """Return a step of the same calls, with limits and windows as they are now."""
        kind: Kind = "model" if step.pending is None else "tool"
        resolved = await self._kernel.resolve_limits(mode, kind, step.state, step.runtime)
        return await self._kernel.prepared(mode, step.rebuilt(*resolved))

    def _allow_later_starts(self, step: Step, deadline: float) -> tuple[Step, Mapping[str, int]]:
        """Raise the thresholds of smooth quotas for all calls but the first.

        Return by how many calls each counter is raised: as many as can start before the deadline.
        """
        # In a graph with a tool node of its own, nothing could delay a call until its start time.
        if step.pending is None or not self._kernel.runs_tools:
            return step, {}
        microseconds = max(0, int((deadline - time.monotonic()) * 10**6))
        later_calls = {
            meter.counter: int(microseconds // meter.spacing)
            for (limit, _), meter in _meters_by_scope(step).items()
            if limit in self._max_waits
            and meter.spacing
            # Calls that share an id start together, so they cannot be spread.
            and all(amounts.get(meter.counter, 0) <= 1 for amounts, _ in step.demands)
        }
        counters, demands = set[str](), []
        for amounts, thresholds in step.demands:
            raised = []
            for threshold in thresholds:
                waits = threshold.counter in counters and threshold.limit in self._max_waits
                later = later_calls.get(threshold.counter, 0) if waits else 0
                raised.append(threshold._replace(maximum=threshold.maximum + later))
            counters.update(amounts)
            demands.append(Demand(amounts, tuple(raised)))
        return step._replace(demands=demands), later_calls

    def _find_missing_room(
        self, step: Step, stops: Mapping[str, int], later_calls: Mapping[str, int]
    ) -> tuple[float, float, tuple[str, Scope]]:
        """Return when the first and the last call have room, and the quota that has it last.

        Both are in seconds from now, and infinite if waiting does not help.
        """
        never = math.inf, math.inf, ("", "")
        meters, places, result = _meters_by_scope(step), step.places, step.result
        windows = {
            quota
            for quota, meter in meters.items()
            if meter.per and (meter.spacing or places[meter.counter].resets_at)
        }
        permanent_refusals, demanded = Counts[str](), Counts[str]()
        thresholds: list[Threshold] = []
        for demand, refused in zip(step.demands, result.refused, strict=True):
            permanent = [
                name
                for name, scope in refused.items()
                if step.limits.by_name[name].enforce
                and name not in step.limits.asking  # a person is asked when there is room
                and not (name in self._max_waits and (name, scope) in windows)
            ]
            permanent_refusals.update(permanent)
            if not permanent:
                demanded.update(demand.amounts)
                with_wait = (t for t in demand.thresholds if t.limit in self._max_waits)
                thresholds += [t for t in with_wait if (t.limit, t.scope) in meters]
        if any(permanent_refusals[name] >= after for name, after in stops.items()):
            return never
        missing: list[tuple[float, float, tuple[str, Scope]]] = []
        for limit, scope, counter, maximum, _ in thresholds:
            meter, room = meters[limit, scope], maximum - demanded[counter]
            pause = last = math.inf
            if meter.spacing:
                level = result.drained_in[counter]
                last = seconds_until_room(places[counter].key, level, room)
                pause = last = last if room >= 0 or counter in later_calls else math.inf
                if counter in later_calls:
                    pause = seconds_until_room(places[counter].key, level, maximum - 1)
                    # The first call fits now. The last one is late by a part of an interval: wait
                    # for that part, so that every other start time is a whole number of intervals.
                    pause = pause if pause > 0 else round(last * 10**6) % meter.spacing / 10**6
                # If every call has its start time, something else refuses the batch.
                if last <= 0 or not pause:
                    continue
            elif result.used[counter] <= room:
                continue
            elif room >= 0 and meter.per and (ends := places[counter].resets_at) is not None:
                pause = last = ends.timestamp() - self.store.clock()
            missing.append((max(_MIN_PAUSE, pause), last, (limit, scope)))
        pause, _, quota = max(missing, key=itemgetter(0), default=never)
        return pause, max([pause, *(last for _, last, _ in missing)]), quota

    def _record_waits(
        self, step: Step, delayed: Collection[str] = (), *, is_over: bool = True
    ) -> None:
        """Record how long each call has waited, but not of calls that start later."""
        limit = step.waited_for
        for call, plan, index in zip(step.calls, step.plans, step.index_of, strict=True):
            matches = any(rule.limit.name == limit for rule in plan.rules)
            # In an outage nobody waits.
            if not matches or str(call.id) in delayed or (is_over and not step.answered):
                continue
            outcome = "cancelled"
            if is_over:
                outcome = "blocked" if limit in step.result.refused[index] else "allowed"
            self.recorder.record_wait(step.context.agent, limit, outcome, step.waited)

    def conclude(self, step: Step, change: Change) -> Change:
        """Save when the tool calls of a message start, if they cannot all start now."""
        starts = self._start_times(step)
        if step.waited_for:
            self._record_waits(step, starts)
        if not starts or step.sent is None:
            return change
        source = {"message": step.message, "name": step.sent.attempt_id, "by": self._id}
        return change.saving(self.name, {**source, "starts": starts, "waited": step.waited})

    def _start_times(self, step: Step) -> Mapping[str, tuple[float, str, Scope]]:
        """Return in how many seconds each tool call starts, and for which quota, by its id.

        It is empty if all can start now.
        """
        result = step.result
        if step.pending is None or not step.answered or result.stopped:
            return {}
        levels: dict[str, float] = {**result.drained_in}
        starts: dict[str, tuple[float, str, Scope]] = {}
        for call, plan, index in zip(step.calls, step.plans, step.index_of, strict=True):
            smooth = [
                (rule.limit.name, meter)
                for rule in plan.rules
                for meter in rule.meters
                if meter.spacing and rule.limit.name in self._max_waits and result.admitted[index]
            ]
            for limit, meter in smooth:
                room, key = (meter.maximum or 0) - 1, step.places[meter.counter].key
                seconds = seconds_until_room(key, levels[meter.counter], room)
                start = max(0.0, seconds), limit, meter.scope
                starts[str(call.id)] = max(start, starts.get(str(call.id), start))
            for counter, spacing in {meter.counter: meter.spacing for _, meter in smooth}.items():
                levels[counter] += spacing
        return starts if any(seconds for seconds, *_ in starts.values()) else {}

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call at its start time. If it is cancelled before, refund it."""
        state, call_id = request.state, str(request.tool_call["id"])
        state = state if isinstance(state, Mapping) else {}
        entries, newest = feature_ledger(state, self.name), ledger(state).get("batch")
        charge = newest and newest["calls"].get(call_id)
        start = entries.get("starts", {}).get(call_id)
        if not (newest and charge and start and entries["message"] == newest["message"]):
            return await call(request)
        (refund,) = refund_corrections(entries["name"], {call_id: charge["keys"]})
        is_resumed = entries["by"] != self._id or self._cancelled.get(refund.id, 0) is not None
        caller, (delay, limit, scope) = call_context(running_runtime()), start
        tool = as_edited(request.tool_call, state)["name"]
        called = Call("tool", tool, call_id, 1, caller.agent, caller.thread_id)
        waiter, outcome = Waiter(mode), "cancelled"

        @contextmanager
        def waiting() -> Iterator[None]:
            if not waiter.has_waited:
                self.recorder.stream("waiting", make_reason("waiting", limit, scope))
            with self.recorder.waiting(caller.agent, limit, caller.thread_id):
                yield

        try:
            starts = partial(self._seconds_to_start, entries["name"], delay)
            await waiter.retry(starts, math.inf, waiting)
            outcome = "allowed"
        except BaseException:
            if not is_resumed:
                self._cancelled.put(refund.id, True, waiter.came_at)
                self.store.settle_soon(AcquireRequest("", "", corrections=(refund,)))
                self.recorder.record_refunds(refunds_of(called, charge))
            raise
        finally:
            waits = waiter.waited, entries.get("waited", 0.0)
            self.recorder.record_start(called, limit, outcome, *waits)
        if is_resumed:
            # The call may have been refunded. The store makes each correction once, so this pair
            # leaves it charged once.
            again = Correction(f"{refund.id}/again", charge["keys"])
            self.store.settle_soon(AcquireRequest("", "", corrections=(refund, again)))
        return await call(request)

    async def _seconds_to_start(self, message: str, delay: float) -> float:
        """Return in how many seconds a call starts: so long after its message's first one."""
        with self._lock:
            now = self.store.clock()
            first, looked_at = self._first_starts.get(message, 0) or (now, now)
            # The clock may have gone back: move the first start with it.
            first -= max(0.0, looked_at - now)
            seconds = first + delay - now
            starts_now = seconds < _MICROSECOND
            # A call that starts late delays the later calls, too.
            self._first_starts.put(message, (now - delay if starts_now else first, now), now)
            return 0.0 if starts_now else seconds


@dataclass(slots=True)
class _Wait:
    """A step that waits: until when, the quotas by their queues, and the one it waits for now."""

    step: Step
    deadline: float  # by `time.monotonic`
    queues: Queues
    quotas: Mapping[str, tuple[str, Scope]]
    waiter: Waiter
    limit: str
    scope: Scope


def _max_waits(limits: Sequence[Limit]) -> dict[str, float]:
    """Return how many seconds calls may wait for each limit with `wait`, by the limit's name."""
    return {
        limit.name: limit.seconds
        for limit in limits
        if has_number(limit) and limit.enforce and getattr(limit, "wait", None) is not None
    }


def _meters_by_scope(step: Step) -> dict[tuple[str, Scope], Meter]:
    """Return the meters of the calls that have a maximum, by limit and scope."""
    return {
        (rule.limit.name, meter.scope): meter
        for plan in step.plans
        for rule in plan.rules
        for meter in rule.meters
        if meter.maximum is not None
    }


def _queue_of(meter: Meter, place: Place) -> str:
    """Return the name of a count's queue, which is the same in all its windows."""
    return place.key if meter.spacing else place.key.rpartition(":")[0]
