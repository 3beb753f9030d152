"""Calls that wait for room in the windows of quotas, first come, first served.

A call stands in one queue: that of the quota which has room last, so it keeps nobody waiting who
has room there. The tool calls of a message are admitted together, as soon as the first one can
start; the others of a smooth quota get start times, and sleep until then in the hook around tools.
"""

import math
import time
from collections import Counter as Counts
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from secrets import token_hex
from typing import Any, NamedTuple

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, Demand
from langchain_quota.core.checks import CallChecks, Check, ResolvedLimit, ResolvedLimits
from langchain_quota.limits import Limit
from langchain_quota.limits.call import Call, Kind, Scope
from langchain_quota.limits.options import counts_calls
from langchain_quota.middleware.calls import Batch, HookResult, refunded_limits
from langchain_quota.middleware.conclude import refunds_of
from langchain_quota.middleware.context import running_agent
from langchain_quota.middleware.feature import BatchCheck, Feature, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel, clock_of
from langchain_quota.middleware.state import feature_ledger, ledger
from langchain_quota.runtime.semaphores import LOOKS_AGAIN, Queues, Waiter, queues_of
from langchain_quota.runtime.sync_async import Mode, fork_safe_lock, wait_for
from langchain_quota.stores.expiring_dict import ExpiringDict
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.keys import seconds_until_room

_SHORTEST = 0.001
"""How long a call pauses at least between two questions to the store, in seconds."""

_MICROSECOND = 1e-6
_MOST_KEPT = 10_000
"""For how many messages and calls this process remembers when they started."""


class Waiting(Feature):
    """Has calls wait, and says when there is room in a smooth quota."""

    name = "waiting"

    @classmethod
    def create(cls, kernel: Kernel) -> "Waiting | None":
        """Return the feature if a limit waits or a quota is smooth."""
        smooth = any(quota.smooth for limit in kernel.limits for quota in limit.quotas)
        return cls(kernel) if smooth or _waiting(kernel.limits) else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools if calls of a message can start one after the other."""
        waits = _waiting(limits)
        smooth = (limit for limit in limits if any(quota.smooth for quota in limit.quotas))
        return ("wrap_tool_call",) if any(each.name in waits for each in smooth) else ()

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._seconds = _waiting(kernel.limits)
        assert kernel.store is not None  # noqa: S101 - for the type checker: quotas need a store
        self._clock = clock_of(kernel.store.store)
        # When the first call of a message started, and the time when that was last looked up.
        self._begun: ExpiringDict[tuple[float, float]] = ExpiringDict(_MOST_KEPT)
        self._cancelled: ExpiringDict[bool] = ExpiringDict(_MOST_KEPT)
        self._id = token_hex(8)
        self._lock = fork_safe_lock()

    def on_store_result(self, batch: Batch, result: AcquireResult) -> None:
        """Note when the next call fits into smooth quotas."""
        if not result.drained_in:
            return
        now, charged = self._clock(), result.charged(batch.demands)

        def timed(check: Check) -> Check:
            if not check.spacing:
                return check
            room = (check.maximum or 0) - check.amount - charged[check.counter]
            seconds = seconds_until_room(result.drained_in[check.counter], room, check.spacing)
            return check._replace(resets_at=in_utc(now + seconds))

        def known(limit: ResolvedLimit) -> ResolvedLimit:
            return limit._replace(checks=tuple(map(timed, limit.checks)))

        batch.limits = ResolvedLimits(map(known, batch.limits.limits))
        batch.set_checks(CallChecks.of(map(known, each.limits)) for each in batch.call_checks)

    def on_store_unavailable(self, batch: Batch) -> None:
        """Wait for nothing while the store cannot be asked."""
        batch.stops = batch.feature_data.get(self.name, batch.stops)

    async def check_batch(
        self, mode: Mode, batch: Batch, acquire: BatchCheck
    ) -> tuple[Batch, AcquireResult]:
        """Check a batch when there is room for it, or when it may wait no longer."""
        waits = [
            (limit, scope, _queue_of(check))
            for (limit, scope), check in _checks(batch).items()
            if limit in self._seconds and check.key and _has_window(check)
        ]
        if not waits:
            return await acquire(batch)
        began = time.monotonic()
        until = began + min(self._seconds[limit] for limit, *_ in waits)
        queues = queues_of(self.store and self.store.store)
        of = {queue: (limit, scope) for limit, scope, queue in waits}
        wait = _Wait(until, queues, of, Waiter(mode), *waits[0][:2])
        decision = "cancelled"
        try:
            batch, result = await self._judged(mode, batch, wait, acquire)
            self._note_starts(batch, result)
            refused = {name for refusals in result.refused for name in refusals}
            decision = "blocked" if wait.limit in refused else "allowed"
            return batch, result
        finally:
            queues.move(wait.waiter)
            waited = batch.feature_data["waited"] = (
                time.monotonic() - began if wait.has_waited else 0.0
            )
            done = batch.context.agent, wait.limit, decision, waited, wait.scope
            self.recorder.record_wait(*done)

    def on_hook_result(self, batch: Batch, conclusion: HookResult) -> HookResult:
        """Say in the decisions how long the calls have waited."""
        waited = batch.feature_data.get("waited")
        if not waited:
            return conclusion
        decisions = [decision._replace(waited=waited) for decision in conclusion.decisions]
        return conclusion._replace(decisions=decisions)

    async def _judged(
        self, mode: Mode, batch: Batch, wait: "_Wait", acquire: BatchCheck
    ) -> tuple[Batch, AcquireResult]:
        in_time, agent = True, batch.context.agent
        while in_time:
            in_time = await self._comes_next(agent, wait)
            if wait.has_waited:
                batch = await self._again(mode, batch)
            # A stopped batch charges nothing.
            stops = batch.feature_data[self.name] = batch.stops
            if in_time:
                batch.stops = {**stops, **dict.fromkeys(self._seconds, 1)}
            later = self._let_start_later(batch, wait.until)
            batch, result = await acquire(batch)
            if not (in_time and result.stopped and batch.answered):
                return batch, result
            lack = self._lack(batch, result, stops, later)
            in_time = time.monotonic() + max(lack.pause, lack.last) <= wait.until
            if in_time:
                wait.limit, wait.scope, wait.has_waited = lack.limit, lack.scope, True
                wait.queues.move(wait.waiter, lack.queue)
                with self.recorder.waiting(agent, wait.limit):
                    await wait_for(mode, min(lack.pause, LOOKS_AGAIN))
        batch = await self._again(mode, batch)
        self._let_start_later(batch, wait.until)
        return await acquire(batch)

    async def _comes_next(self, agent: str | None, wait: "_Wait") -> bool:
        """Wait behind earlier calls that lack room; return whether the turn comes in time."""
        seconds = 0.0
        while True:
            with self.recorder.waiting(agent, wait.limit):
                if seconds > 0:
                    await wait.waiter.sleep(seconds)
                if wait.queues.is_next(wait.waiter, sorted(wait.of)):
                    return True
            (wait.limit, wait.scope), wait.has_waited = wait.of[wait.waiter.queue], True
            seconds = wait.until - time.monotonic()
            if seconds <= 0:
                return False

    async def _again(self, mode: Mode, batch: Batch) -> Batch:
        """Return a batch of the same calls at this moment."""
        kernel = self._kernel
        kind: Kind = "model" if batch.pending is None else "tool"
        limits = await kernel.resolve_limits(mode, kind, batch.state, batch.runtime)
        again = batch.rebuild(limits)
        assert again is not None  # noqa: S101 - for the type checker: the calls wait
        kernel.adjust_checks(again)
        return again

    def _let_start_later(self, batch: Batch, until: float) -> Mapping[str, int]:
        """Let all but the first call of smooth quotas start later; return by how many calls."""
        # In a graph whose node of tools is not ours, nothing keeps a call from starting.
        if batch.pending is None or not self._kernel.runs_tools:
            return {}
        microseconds = max(0, int((until - time.monotonic()) * 10**6))
        later = {
            check.counter: microseconds // check.spacing
            for (limit, _), check in _checks(batch).items()
            if limit in self._seconds
            and check.spacing
            # Calls that share an id are one call.
            and all(amounts.get(check.counter, 0) <= 1 for amounts, _ in batch.demands)
        }
        seen, demands = set[str](), []
        for amounts, over in batch.demands:
            raised = [
                threshold._replace(maximum=threshold.maximum + later.get(threshold.counter, 0))
                if threshold.counter in seen and threshold.limit in self._seconds
                else threshold
                for threshold in over
            ]
            seen.update(amounts)
            demands.append(Demand(amounts, tuple(raised)))
        batch.demands = demands
        return later

    def _lack(
        self, batch: Batch, result: AcquireResult, stops: Any, later: Mapping[str, int]
    ) -> "_Lack":
        """Return the quota that has room last: never, if waiting does not help."""
        checks = _checks(batch)
        permanent, wanted = Counts[str](), Counts[str]()
        over = []
        for demands, refused in zip(batch.demands, result.refused, strict=True):
            lasting = [
                name
                for name, scope in refused.items()
                if batch.limits.by_name[name].enforce
                and not (name in self._seconds and _has_window(checks[name, scope]))
            ]
            permanent.update(lasting)
            if not lasting:
                wanted.update(demands.amounts)
                over += [
                    threshold
                    for threshold in demands.thresholds
                    if threshold.limit in self._seconds
                ]
        if any(permanent[name] >= after for name, after in stops.items()):
            return _Lack()
        lacks = []
        for each in over:
            check, room = checks[each.limit, each.scope], each.maximum - wanted[each.counter]
            if result.used[each.counter] <= room:
                continue
            pause = last = math.inf
            if each.counter in later:
                spacing, level = check.spacing, result.drained_in[each.counter]
                last, pause = (
                    seconds_until_room(level, n, spacing) for n in (room, each.maximum - 1)
                )
                # Start times are whole calls later.
                pause = pause if pause > 0 else last % (spacing / 10**6)
            elif room >= 0 and check.resets_at is not None:
                # The time is that of one call.
                extra = (wanted[each.counter] - check.amount) * check.spacing / 10**6
                pause = last = check.resets_at.timestamp() - self._clock() + extra
            lack = _Lack(max(_SHORTEST, pause), last, each.limit, each.scope, _queue_of(check))
            lacks.append(lack)
        longest = max(lacks, key=attrgetter("pause"), default=_Lack())
        return longest._replace(last=max((each.last for each in lacks), default=math.inf))

    def _note_starts(self, batch: Batch, result: AcquireResult) -> None:
        """Write down after how many seconds tool calls start, if they cannot all start now."""
        if batch.pending is None or batch.sent is None or not batch.answered or result.stopped:
            return
        levels, starts = dict(result.drained_in), dict[str, tuple[float, str, Scope]]()
        for call, checks, index in zip(batch.calls, batch.call_checks, batch.index_of, strict=True):
            smooth = [
                (limit.limit.name, check)
                for limit in checks.limits
                for check in limit.checks
                if check.spacing and limit.limit.name in self._seconds and result.admitted[index]
            ]
            for limit, check in smooth:
                seconds = seconds_until_room(
                    levels[check.counter], (check.maximum or 0) - 1, check.spacing
                )
                start = max(0.0, seconds), limit, check.scope
                starts[str(call.id)] = max(start, starts.get(str(call.id), start))
            for counter, spacing in {check.counter: check.spacing for _, check in smooth}.items():
                levels[counter] += spacing
        if any(seconds for seconds, *_ in starts.values()):
            noted = {"message": batch.message, "name": batch.sent.attempt_id, "by": self._id}
            batch.save(self.name, {**noted, "starts": starts})

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call when its start time has come. Refund it if it is cancelled before."""
        state, call_id = request.state, str(request.tool_call["id"])
        state = state if isinstance(state, Mapping) else {}
        entries, judged = feature_ledger(state, self.name), ledger(state).get("batch")
        charge = judged and judged["calls"].get(call_id)
        start = entries.get("starts", {}).get(call_id)
        if not (judged and charge and start and entries["message"] == judged["message"]):
            return await call(request)
        name, (after, limit, scope) = f"{entries['name']}/{call_id}", start
        refund = Correction(name, {key: -amount for key, amount in charge["keys"].items()})
        is_resumed = entries["by"] != self._id or self._cancelled.get(name, 0) is not None
        began, agent, decision = time.monotonic(), running_agent(), "cancelled"
        try:
            while seconds := self._seconds_to_start(entries["name"], after):
                with self.recorder.waiting(agent, limit):
                    await wait_for(mode, seconds)
            decision = "allowed"
        except BaseException:
            if not is_resumed:
                self._cancelled.put(name, True, began)
                self._settle_soon(refund)
                of = Call("tool", request.tool_call["name"], call_id, 1, agent)
                self.recorder.record_refunds(refunds_of(of, refunded_limits(charge)))
            raise
        finally:
            waited = time.monotonic() - began
            self.recorder.record_wait(agent, limit, decision, waited, scope)
        if is_resumed:
            # It may have been refunded. Each correction is made once, so it is charged once.
            self._settle_soon(refund, Correction(f"{name}/again", charge["keys"]))
        return await call(request)

    def _settle_soon(self, *corrections: Correction) -> None:
        if self.store is not None:
            self.store.settle_soon(AcquireRequest("", "", corrections=corrections))

    def _seconds_to_start(self, message: str, after: float) -> float:
        """Return in how many seconds a call starts; 0 if it starts now, and later ones after it."""
        with self._lock:
            now = self._clock()
            # The clock may have gone back. And a call that starts late delays those after it.
            first, seen = self._begun.get(message, 0) or (now, now)
            first -= max(0.0, seen - now)
            seconds = first + after - now
            is_over = seconds < _MICROSECOND
            self._begun.put(message, (now - after if is_over else first, now), now)
            return 0.0 if is_over else seconds


@dataclass(slots=True)
class _Wait:
    """Until when a batch may wait, in which queues, and for which quota it does."""

    until: float
    queues: Queues
    of: Mapping[str, tuple[str, Scope]]
    waiter: Waiter
    limit: str
    scope: Scope
    has_waited: bool = False


class _Lack(NamedTuple):
    """The quota that has room last: after what pause, when the last call starts, and its queue."""

    pause: float = math.inf
    last: float = math.inf
    limit: str = ""
    scope: Scope = ""
    queue: str = ""


def _waiting(limits: Sequence[Limit]) -> dict[str, float]:
    """Return how long calls wait, in seconds, by the name of the limit."""
    return {
        limit.name: limit.seconds
        for limit in limits
        if counts_calls(limit) and limit.enforce and getattr(limit, "wait", None) is not None
    }


def _checks(batch: Batch) -> dict[tuple[str, Scope], Check]:
    """Return the checks of the calls, by limit and scope."""
    limits = (limit for checks in batch.call_checks for limit in checks.limits)
    return {(limit.limit.name, check.scope): check for limit in limits for check in limit.checks}


def _has_window(check: Check) -> bool:
    return bool(check.spacing) or check.resets_at is not None


def _queue_of(check: Check) -> str:
    """Return the queue of a count: the same in all its windows."""
    key = check.key or ""
    return key if check.spacing else key.rpartition(":")[0]
