"""Let calls wait for room in the windows of quotas, first come, first served.

A waiting call stands in one queue: that of the quota which has room last. So it delays no call that
needs other quotas only. The tool calls of a message are admitted together, as soon as the first one
can start. The other calls of a smooth quota get start times, and the hook around tools waits for
these.
"""

import math
import time
from collections import Counter as Counts
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from secrets import token_hex

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    Demand,
    Threshold,
)
from langchain_quota.core.plans import Meter, Place
from langchain_quota.core.stops import make_reason
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call, Kind, Scope
from langchain_quota.limits.options import counts_calls
from langchain_quota.middleware.calls import Step
from langchain_quota.middleware.conclude import refunds_of
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature, StepCheck, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.state import feature_ledger, ledger, refunded_limits
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, Queues, Waiter, queues_of
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock, wait_for
from langchain_quota.stores.counts import ExpiringDict
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
        waits = _max_waits(limits)
        smooth = (limit.name for limit in limits if any(quota.smooth for quota in limit.quotas))
        return () if waits.keys().isdisjoint(smooth) else ("wrap_tool_call",)

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._max_waits = _max_waits(kernel.limits)
        # When the first call of a message started, and the clock when that was last looked up.
        self._first_starts: ExpiringDict[tuple[float, float]] = ExpiringDict(_MAX_REMEMBERED)
        self._cancelled: ExpiringDict[bool] = ExpiringDict(_MAX_REMEMBERED)
        self._id = token_hex(8)
        self._lock = fork_safe_lock()

    def on_store_result(self, step: Step) -> Step:
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

    async def check_step(self, mode: Mode, step: Step, acquire: StepCheck) -> Step:
        """Check a step when there is room for it, or when it may wait no longer."""
        waits = {
            quota: (meter, place)
            for quota, meter in _meters_by_scope(step).items()
            if quota[0] in self._max_waits and (place := step.places.get(meter.counter))
            if meter.per and (meter.spacing or place.resets_at)
        }
        if not waits:
            return await acquire(mode, step)
        started_at = time.monotonic()
        deadline = started_at + min(self._max_waits[limit] for limit, _ in waits)
        queues = queues_of(self.store.store)
        quotas = {_queue_of(*waited): quota for quota, waited in waits.items()}
        wait = _Wait(deadline, queues, quotas, Waiter(mode), *next(iter(waits)))
        checked: Step | None = None
        delayed: Collection[str] = ()
        try:
            checked = await self._check_when_room(mode, step, wait, acquire)
            checked, delayed = self._save_start_times(checked, wait.seconds_since(started_at))
            return checked._replace(waited=wait.seconds_since(started_at))
        finally:
            queues.move(wait.waiter)
            waited = wait.seconds_since(started_at)
            for outcome in _wait_outcomes(checked or step, wait, delayed, is_over=bool(checked)):
                self.recorder.record_wait(step.context.agent, wait.limit, outcome, waited)

    async def _check_when_room(
        self, mode: Mode, step: Step, wait: "_Wait", acquire: StepCheck
    ) -> Step:
        may_wait, caller = True, step.context
        while may_wait:
            may_wait = await self._wait_for_turn(step, wait)
            if wait.has_waited:
                step = await self._rebuild(mode, step)
            # Let a refusal by a limit with `wait` stop all calls: then none is charged, so that
            # they can be checked again later.
            stops = step.stops
            if may_wait:
                waiting = {**stops, **dict.fromkeys(self._max_waits, 1)}
                step = step._replace(stops=waiting, outage_stops=stops)
            step, later_calls = self._allow_later_starts(step, wait.deadline)
            step = await acquire(mode, step)
            if not (may_wait and step.result.stopped and step.answered):
                return step
            pause, last, quota = self._find_missing_room(step, stops, later_calls)
            may_wait = time.monotonic() + last <= wait.deadline and not step.result.frozen
            if may_wait:
                wait.limit, wait.scope = quota
                self._begin_wait(step, wait, step.result)
                meter = _meters_by_scope(step)[quota]
                wait.queues.move(wait.waiter, _queue_of(meter, step.places[meter.counter]))
                with self.recorder.waiting(caller.agent, wait.limit, caller.thread_id):
                    await wait_for(mode, min(pause, LOOKS_AGAIN), wait.waiter)
        # Check once more with the step's own stops, so that the limit's `exit_behavior` decides
        # what a refusal does.
        step, _ = self._allow_later_starts(await self._rebuild(mode, step), wait.deadline)
        return await acquire(mode, step)

    def _begin_wait(self, step: Step, wait: "_Wait", result: AcquireResult | None = None) -> None:
        """Note that calls wait, and write an event to the run's stream the first time."""
        if self.recorder.streams and not wait.has_waited:
            meter = _meters_by_scope(step)[wait.limit, wait.scope]
            place = step.places[meter.counter]
            reason = make_reason(
                "waiting",
                wait.limit,
                wait.scope,
                subject=self.recorder.subject_label(wait.scope, place.subject),
                used=None if result is None else result.used[meter.counter],
                threshold=meter.maximum,
                unit=next(one.unit for one in self._kernel.limits if one.name == wait.limit),
                resets_at=place.resets_at,
            )
            self.recorder.stream("waiting", reason)
        wait.has_waited = True

    async def _wait_for_turn(self, step: Step, wait: "_Wait") -> bool:
        """Wait behind earlier calls of the same quotas; return whether they left in time."""
        seconds, caller = 0.0, step.context
        while True:
            with self.recorder.waiting(caller.agent, wait.limit, caller.thread_id):
                if seconds > 0:
                    await wait.waiter.sleep(seconds)
                if wait.queues.is_next(wait.waiter, sorted(wait.quotas)):
                    return True
            wait.limit, wait.scope = wait.quotas[wait.waiter.queue]
            self._begin_wait(step, wait)
            seconds = wait.deadline - time.monotonic()
            if seconds <= 0:
                return False

    async def _rebuild(self, mode: Mode, step: Step) -> Step:
        """Return a step of the same calls, with limits and windows as they are now."""
        kind: Kind = "model" if step.pending is None else "tool"
        resolved = await self._kernel.resolve_limits(mode, kind, step.state, step.runtime)
        return self._kernel.adjust_plans(step.rebuilt(*resolved))

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
                and not (name in self._max_waits and (name, scope) in windows)
            ]
            permanent_refusals.update(permanent)
            if not permanent:
                demanded.update(demand.amounts)
                thresholds += [t for t in demand.thresholds if t.limit in self._max_waits]
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

    def _save_start_times(self, step: Step, waited: float) -> tuple[Step, Collection[str]]:
        """Save when tool calls start, if they cannot all start now, and return their ids."""
        result = step.result
        if step.pending is None or step.sent is None or not step.answered or result.stopped:
            return step, ()
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
        if not any(seconds for seconds, *_ in starts.values()):
            return step, ()
        source = {"message": step.message, "name": step.sent.attempt_id, "by": self._id}
        return step.saving(self.name, {**source, "starts": starts, "waited": waited}), starts

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
        name, (delay, limit, scope) = f"{entries['name']}/{call_id}", start
        refund = Correction(name, {key: -amount for key, amount in charge["keys"].items()})
        is_resumed = entries["by"] != self._id or self._cancelled.get(name, 0) is not None
        caller, outcome = call_context(running_runtime()), "cancelled"
        called = Call("tool", request.tool_call["name"], call_id, 1, caller.agent, caller.thread_id)
        started_at, has_waited = time.monotonic(), False
        try:
            while seconds := self._seconds_to_start(entries["name"], delay):
                if not has_waited:
                    self.recorder.stream("waiting", make_reason("waiting", limit, scope))
                has_waited = True
                with self.recorder.waiting(caller.agent, limit):
                    await wait_for(mode, seconds)
            outcome = "allowed"
        except BaseException:
            if not is_resumed:
                self._cancelled.put(name, True, started_at)
                self.store.settle_soon(AcquireRequest("", "", corrections=(refund,)))
                self.recorder.record_refunds(refunds_of(called, refunded_limits(charge)))
            raise
        finally:
            waits = has_waited and time.monotonic() - started_at, entries.get("waited", 0.0)
            self.recorder.record_start(called, limit, outcome, *waits)
        if is_resumed:
            # The call may have been refunded. The store makes each correction once, so this pair
            # leaves it charged once.
            again = Correction(f"{name}/again", charge["keys"])
            self.store.settle_soon(AcquireRequest("", "", corrections=(refund, again)))
        return await call(request)

    def _seconds_to_start(self, message: str, delay: float) -> float:
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

    # By `time.monotonic`.
    deadline: float
    queues: Queues
    quotas: Mapping[str, tuple[str, Scope]]
    waiter: Waiter
    limit: str
    scope: Scope
    has_waited: bool = False

    def seconds_since(self, started_at: float) -> float:
        """Return how long the step has waited; 0 if it never waited."""
        return time.monotonic() - started_at if self.has_waited else 0.0


def _max_waits(limits: Sequence[Limit]) -> dict[str, float]:
    """Return how many seconds calls may wait for each limit with `wait`, by the limit's name."""
    return {
        limit.name: limit.seconds
        for limit in limits
        if counts_calls(limit) and limit.enforce and getattr(limit, "wait", None) is not None
    }


def _meters_by_scope(step: Step) -> dict[tuple[str, Scope], Meter]:
    """Return the meters of the calls, by limit and scope."""
    rules = (rule for plan in step.plans for rule in plan.rules)
    return {(rule.limit.name, meter.scope): meter for rule in rules for meter in rule.meters}


def _wait_outcomes(
    step: Step, wait: _Wait, delayed: Collection[str], *, is_over: bool
) -> Iterator[str]:
    """Yield the outcome of each call's wait, without calls that start later; none in an outage."""
    for call, plan, index in zip(step.calls, step.plans, step.index_of, strict=True):
        matches = any(rule.limit.name == wait.limit for rule in plan.rules)
        if not matches or str(call.id) in delayed:
            continue
        if not is_over:
            yield "cancelled"
        elif step.answered:
            yield "blocked" if wait.limit in step.result.refused[index] else "allowed"


def _queue_of(meter: Meter, place: Place) -> str:
    """Return the name of a count's queue, which is the same in all its windows."""
    return place.key if meter.spacing else place.key.rpartition(":")[0]
