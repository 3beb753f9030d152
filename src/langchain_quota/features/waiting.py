"""Calls that wait for room in the windows of quotas, in the order in which they come."""

import math
import time
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from langchain_quota.admission import AcquireResult
from langchain_quota.concurrency import Form, wait_for
from langchain_quota.decision import Scope
from langchain_quota.limits import Limit
from langchain_quota.limits.options import counts_calls
from langchain_quota.middleware.calls import Batch, Conclusion
from langchain_quota.middleware.feature import Feature
from langchain_quota.middleware.flow import clock_of
from langchain_quota.rule import Asked, Check, ResolvedLimit, ResolvedLimits
from langchain_quota.semaphores import Slot, semaphore_of
from langchain_quota.stores.grants import in_utc
from langchain_quota.stores.keys import lacking

_SHORTEST = 0.001
"""How long a call pauses at least between two questions to the store, in seconds."""


class Waiting(Feature):
    """Has calls wait, and says when there is room in a smooth quota."""

    name = "waiting"

    @classmethod
    def of(cls, limiter: Any) -> "Waiting | None":
        """The feature, if a limit waits, or a quota is smooth."""
        smooth = any(quota.smooth for each in limiter.limits for quota in each.quotas)
        return cls(limiter) if smooth or _waiting(limiter.limits) else None

    def __init__(self, limiter: Any) -> None:
        super().__init__(limiter)
        self._seconds = _waiting(limiter.limits)
        self._clock = clock_of(limiter._store.store)  # noqa: SLF001 - quotas need a store

    def answered(self, batch: Batch, result: AcquireResult) -> None:
        """Note when the next call fits into smooth quotas."""
        if not result.empty_in:
            return
        now, charged = self._clock(), result.charged(batch.hits)

        def timed(check: Check) -> Check:
            if not check.spacing:
                return check
            room = (check.most or 0) - check.hit - charged[check.counter]
            seconds = lacking(result.empty_in[check.counter], room, check.spacing)
            return check._replace(resets_at=in_utc(now + seconds))

        def known(limit: ResolvedLimit) -> ResolvedLimit:
            return limit._replace(checks=tuple(map(timed, limit.checks)))

        batch.limits = ResolvedLimits(map(known, batch.limits.limits))
        batch.ask(Asked.of(map(known, each.limits)) for each in batch.asked)

    def unanswered(self, batch: Batch) -> None:
        """Wait for nothing while the store cannot be asked."""
        batch.stops = batch.own.get(self.name, batch.stops)

    async def judged(self, form: Form, batch: Batch) -> tuple[Batch, AcquireResult]:
        """Judge a batch when there is room for it, or when it may wait no longer."""
        lines = self._lines(batch)
        if not lines:
            return await super().judged(form, batch)
        began = time.monotonic()
        until = began + min(self._seconds[limit] for limit, _ in lines.values())
        wait = _Wait(until, *next(iter(lines.values())))
        decision = "cancelled"
        try:
            batch, result = await self._judged(form, batch, lines, wait)
            refused = {name for each in result.refused for name in each}
            decision = "blocked" if wait.limit in refused else "allowed"
            return batch, result
        finally:
            for slot in wait.slots:
                slot.give_back()
            waited = batch.own["waited"] = time.monotonic() - began if wait.has_waited else 0.0
            of = batch.context.agent, wait.limit, decision, waited, wait.scope
            self._recorder.record_wait(*of)

    def concluded(self, batch: Batch, conclusion: Conclusion) -> Conclusion:
        """Say in the decisions how long the calls have waited."""
        waited = batch.own.get("waited")
        if not waited:
            return conclusion
        decisions = [each._replace(waited=waited) for each in conclusion.decisions]
        return conclusion._replace(decisions=decisions)

    async def _judged(
        self, form: Form, batch: Batch, lines: "_Lines", wait: "_Wait"
    ) -> tuple[Batch, AcquireResult]:
        in_time = await self._queue(form, batch.context.agent, lines, wait)
        if wait.has_waited:
            batch = await self._again(form, batch)
        while in_time:
            # A stopped batch charges nothing.
            stops = batch.own[self.name] = batch.stops
            batch.stops = {**stops, **dict.fromkeys(self._seconds, 1)}
            batch, result = await super().judged(form, batch)
            if not (result.stopped and batch.answered):
                return batch, result
            wait.limit, wait.scope, seconds = self._room(batch, result, stops, wait)
            in_time = time.monotonic() + seconds <= wait.until
            if in_time:
                wait.has_waited = True
                with self._recorder.waiting(batch.context.agent, wait.limit):
                    await wait_for(form, seconds)
            batch = await self._again(form, batch)
        return await super().judged(form, batch)

    async def _queue(self, form: Form, agent: str | None, lines: "_Lines", wait: "_Wait") -> bool:
        """Wait behind the calls that came before; whether its turn comes in time."""
        # Every call takes its places in this order, so no two calls wait for each other.
        for line, (limit, scope) in sorted(lines.items()):
            semaphore = semaphore_of(self._store and self._store.store, line)
            with self._recorder.waiting(agent, limit):
                slot = await semaphore.take(form, 1, wait.until - time.monotonic())
            wait.slots.append(slot)
            if slot.waits:
                wait.limit, wait.scope, wait.has_waited = limit, scope, True
            if not slot.taken:
                return False
        return True

    async def _again(self, form: Form, batch: Batch) -> Batch:
        """The same calls at this moment."""
        limiter, kind = self._limiter, "model" if batch.pending is None else "tool"
        of = form, kind, batch.state, batch.runtime
        again = batch.remake(await limiter._limits_now(*of))  # noqa: SLF001 - the kernel's
        assert again is not None  # noqa: S101 - for the type checker: the calls wait
        for checks in limiter._hooks["checks"]:  # noqa: SLF001 - the same
            checks(again)
        return again

    def _lines(self, batch: Batch) -> "_Lines":
        """The lines in which calls wait, and for which quota; one for the windows of a count."""
        return {
            # Without the number of a fixed window.
            check.key if check.spacing else check.key.rpartition(":")[0]: (name, check.scope)
            for (name, _), check in _checks(batch).items()
            if name in self._seconds and check.key and _has_window(check)
        }

    def _room(
        self, batch: Batch, result: AcquireResult, stops: Any, wait: "_Wait"
    ) -> tuple[str, Scope, float]:
        """Which quota lacks room, and for how many seconds: for ever if waiting does not help."""
        checks = _checks(batch)
        others, wanted = Counts[str](), Counts[str]()
        over = []
        for hits, refused in zip(batch.hits, result.refused, strict=True):
            lasting = [
                name
                for name, scope in refused.items()
                if batch.limits.by_name[name].enforce
                and not (name in self._seconds and _has_window(checks[name, scope]))
            ]
            others.update(lasting)
            if not lasting:
                wanted.update(hits.amounts)
                over += [each for each in hits.thresholds if each.limit in self._seconds]
        never = wait.limit, wait.scope, math.inf
        if any(others[name] >= after for name, after in stops.items()):
            return never
        found = []
        for each in over:
            check, room = checks[each.limit, each.scope], each.most - wanted[each.counter]
            if result.used[each.counter] <= room:
                continue
            seconds = math.inf
            if room >= 0 and check.resets_at is not None:
                # The time is that of one call.
                more = (wanted[each.counter] - check.hit) * check.spacing / 10**6
                seconds = check.resets_at.timestamp() - self._clock() + more
            found.append((each.limit, each.scope, max(_SHORTEST, seconds)))
        return max(found, key=itemgetter(2), default=never)


_Lines = dict[str, tuple[str, Scope]]
"""Lines, and for which limit and scope calls wait there."""


@dataclass(slots=True)
class _Wait:
    """Until when a batch may wait, for which quota it does, and its places in the lines."""

    until: float
    limit: str
    scope: Scope
    has_waited: bool = False
    slots: list[Slot] = field(default_factory=list)


def _waiting(limits: Sequence[Limit]) -> dict[str, float]:
    """How long calls wait, by the name of the limit."""
    return {
        each.name: each.seconds
        for each in limits
        if counts_calls(each) and each.enforce and getattr(each, "wait", None) is not None
    }


def _checks(batch: Batch) -> dict[tuple[str, Scope], Check]:
    """The checks of the calls, by limit and scope."""
    limits = (limit for asked in batch.asked for limit in asked.limits)
    return {(each.limit.name, check.scope): check for each in limits for check in each.checks}


def _has_window(check: Check) -> bool:
    return bool(check.spacing) or check.resets_at is not None
