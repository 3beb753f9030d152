"""The shared store as the hooks ask it: timed, its failures seen, its corrections not lost.

While the store does not answer:

- `on_store_error="deny"` refuses every call that a shared limit matches. Calls run that only limits
  on trial refuse.
- `on_store_error="allow"` judges by the counts of the state, without quotas.
- A correction waits in this process. It undoes the request, should the store have heard of it, and
  adds what has run all the same. It travels with the next requests of this client.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from typing import Self
from uuid import uuid4

from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._calls import Request
from langchain_quota.resolved import Outage
from langchain_quota.stores import QuotaStore
from langchain_quota.telemetry.recorder import Recorder

MAX_PENDING = 10_000
"""The most corrections that wait for the store to come back."""

COMPENSATED_AT_ONCE = 5
"""The most corrections that one request carries: they double what it costs, and no more."""


class StoreClient:
    """Asks a store, and says so when it cannot be asked.

    Args:
        store: The store.
        outage: What becomes of calls when it cannot be asked.
        recorder: Times its answers and counts its failures.
    """

    def __init__(self, store: QuotaStore, outage: Outage, recorder: Recorder) -> None:
        self.store = store
        self._outage: Outage = outage
        self._recorder = recorder
        self._lock = fork_safe_lock()
        self._down = False
        self._pending = _PendingCompensations()
        self._fills = recorder.watch_store(store)
        """Whether it can be full, and has not been nearly so yet."""

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    def acquire(self, request: Request) -> AcquireResult:
        """The store's answer or, where it gives none, what the state alone knows.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        sent = request.to_store()
        result, last = None, False
        with self._asking("acquire", sent):
            while not last:
                with self._carrying(sent) as (asked, last):
                    answer = self.store.acquire(asked)
                result = _checked(answer, sent) if last else None
        return self._or_fallback(request, sent, result)

    async def aacquire(self, request: Request) -> AcquireResult:
        """The store's answer or, where it gives none, what the state alone knows.

        Raises:
            TypeError: The store is used in a way that it does not support.
        """
        sent = request.to_store()
        result, last = None, False
        with self._asking("acquire", sent):
            while not last:
                with self._carrying(sent) as (asked, last):
                    answer = await self.store.aacquire(asked)
                result = _checked(answer, sent) if last else None
        return self._or_fallback(request, sent, result)

    def number(self, key: str, *, name: str, start: int) -> int | None:
        """Add one to a count, and return it; `None` if the store does not answer.

        Args:
            key: Its key.
            name: Names the addition, which is made once.
            start: Where the count begins.
        """
        sent = _addition(key, name, start)
        result = None
        with self._asking("acquire"):
            result = _checked(self.store.acquire(sent), sent)
        return None if result is None else result.used[key] + 1

    async def anumber(self, key: str, *, name: str, start: int) -> int | None:
        """Add one to a count, and return it; `None` if the store does not answer.

        Args:
            key: Its key.
            name: Names the addition, which is made once.
            start: Where the count begins.
        """
        sent = _addition(key, name, start)
        result = None
        with self._asking("acquire"):
            result = _checked(await self.store.aacquire(sent), sent)
        return None if result is None else result.used[key] + 1

    def peek(self, keys: Sequence[str]) -> dict[str, int] | None:
        """What is used of each key that the store has, in calls; `None` if it does not answer."""
        counts: dict[str, int] | None = None if keys else {}
        if keys:
            with self._asking("peek"):
                found = self.store.peek(keys)
                counts = {each.key: each.used for each in found if each is not None}
        return counts

    async def apeek(self, keys: Sequence[str]) -> dict[str, int] | None:
        """What is used of each key that the store has, in calls; `None` if it does not answer."""
        counts: dict[str, int] | None = None if keys else {}
        if keys:
            with self._asking("peek"):
                found = await self.store.apeek(keys)
                counts = {each.key: each.used for each in found if each is not None}
        return counts

    def reset(self, keys: Sequence[str]) -> None:
        """Set what is used of keys to 0. Corrections of them that wait are made first.

        Raises:
            QuotaStoreError: The store could not be asked.
        """
        with self._timing("reset"):
            last = False
            while not last:
                with self._carrying(_about(keys)) as (asked, last):
                    if asked.compensations:
                        self.store.acquire(replace(asked, counters={}))
            self.store.reset(keys)

    async def areset(self, keys: Sequence[str]) -> None:
        """Set what is used of keys to 0. Corrections of them that wait are made first.

        Raises:
            QuotaStoreError: The store could not be asked.
        """
        with self._timing("reset"):
            last = False
            while not last:
                with self._carrying(_about(keys)) as (asked, last):
                    if asked.compensations:
                        await self.store.aacquire(replace(asked, counters={}))
            await self.store.areset(keys)

    def _or_fallback(
        self, request: Request, sent: AcquireRequest, result: AcquireResult | None
    ) -> AcquireResult:
        if result is not None:
            request.answered = True
            request.mirror_root_run(result)
            return result
        calls = sum(asked.shared for asked in request.asked)
        result = request.without_store(self._outage)
        # Even with "deny" a call runs that only limits on trial refuse.
        ran: dict[str, int] = {}
        for hits, admitted in zip(sent.hits, result.admitted, strict=True):
            if admitted and not result.stopped:
                for key, amount in sent.keyed(hits.amounts).items():
                    ran[key] = ran.get(key, 0) + amount
        self.compensate_later(sent, ran)
        self._recorder.record_fallback(request.context.agent, self._outage, calls)
        return result

    def compensate_later(
        self, request: AcquireRequest, amounts: Mapping[str, int] | None = None
    ) -> None:
        """Correct the counts when the store can be asked again.

        Args:
            request: The one that failed: perhaps the store has heard of it, or will.
            amounts: What has run all the same, in calls by key.
        """
        attempt = request.attempt_id
        compensation = Compensation(
            attempt,
            amounts or {},
            attempt,
            request.idempotency_key,
            {each.key: each.used for each in request.counters.values() if each.key is not None},
        )
        with self._lock:
            lost = self._pending.add(compensation)
        if lost:
            error = QuotaStoreError(f"more than {MAX_PENDING} corrections wait for the store")
            self._recorder.record_error("store", error, log=False)

    @contextmanager
    def _carrying(self, request: AcquireRequest) -> Iterator[tuple[AcquireRequest, bool]]:
        """What to send next, and whether that is the request itself: corrections go ahead of it.

        If the store answers, the corrections that were sent are done.
        """
        with self._lock:
            carried, last = self._pending.take(request)
        asked = AcquireRequest("", "", compensations=carried)
        if last:
            compensations = (*carried, *request.compensations)
            asked = replace(request, compensations=compensations) if carried else request
        made = False
        try:
            yield asked, last
            made = True
        finally:
            with self._lock:
                self._pending.give_back(carried, made=made)

    @contextmanager
    def _asking(self, operation: str, request: AcquireRequest | None = None) -> Iterator[None]:
        try:
            with self._timing(operation):
                yield
        except TypeError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a store raises, it has not answered
            with self._lock:
                first, self._down = not self._down, True
            self._recorder.record_error("store", error, log=first)
        except BaseException:
            # Cancelled: the call will not run, but the store may have heard of it.
            if request is not None:
                self.compensate_later(request)
            raise
        else:
            with self._lock:
                back, self._down = self._down, False
            if back:
                self._recorder.record_recovery("store")
            if self._fills:
                self._fills = not self._recorder.store_nearly_full(self.store)

    @contextmanager
    def _timing(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        outcome = "error"
        try:
            yield
            outcome = "ok"
        except Exception as error:
            if getattr(error, "timed_out", False) or isinstance(error, TimeoutError):
                outcome = "timeout"
            raise
        finally:
            self._recorder.observe_store(operation, outcome, time.perf_counter() - started)


class _PendingCompensations:
    """Corrections that the store has not confirmed, the oldest first.

    Only one request at a time carries old ones. Otherwise every caller would send the same ones to
    a store that has just come back.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._by_attempt: dict[str, tuple[int, Compensation]] = {}
        self._about: dict[str, set[str]] = {}
        self._travelling: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_attempt)

    def add(self, compensation: Compensation) -> bool:
        """Keep a correction; whether the oldest had to make room for it."""
        self._by_attempt[compensation.id] = next(self._numbers), compensation
        for subject in _subjects(compensation):
            self._about.setdefault(subject, set()).add(compensation.id)
        full = len(self) > MAX_PENDING
        if full:
            self._remove(next(iter(self._by_attempt)))
        return full

    def take(self, request: AcquireRequest) -> tuple[tuple[Compensation, ...], bool]:
        """What the next request to the store carries, and whether that can be the request itself.

        Before it the store must know of its earlier attempts, and of all that may be in counts
        which the caller has, or corrects. One request at a time carries others, too.
        """
        attempts = self._made_again(request.idempotency_key)
        for key in _callers(request):
            attempts |= self._about.get(key, set())
        # The oldest goes first: its `starts` is the right start.
        first = [each for _, each in sorted(self._by_attempt[each] for each in attempts)]
        others: list[Compensation] = []
        if len(first) < COMPENSATED_AT_ONCE and not self._travelling:
            oldest = islice(self._by_attempt.items(), COMPENSATED_AT_ONCE)
            others = [each for attempt, (_, each) in oldest if attempt not in attempts]
            others = others[: COMPENSATED_AT_ONCE - len(first)]
            self._travelling = {each.id for each in others}
        return (*first[:COMPENSATED_AT_ONCE], *others), len(first) <= COMPENSATED_AT_ONCE

    def give_back(self, taken: Sequence[Compensation], *, made: bool) -> None:
        """Forget what was made; what was not can travel again."""
        for each in taken:
            self._travelling.discard(each.id)
            if made:
                self._remove(each.id)

    def _made_again(self, name: str) -> set[str]:
        """The earlier attempts of a request that a hook makes when it runs again.

        What they let through did not run.
        """
        found = set()
        for attempt in self._about.get(name, ()) if name else ():
            number, compensation = self._by_attempt[attempt]
            if compensation.idempotency_key == name:
                found.add(attempt)
                self._by_attempt[attempt] = number, replace(compensation, amounts={})
        return found

    def _remove(self, attempt: str) -> None:
        _, compensation = self._by_attempt.pop(attempt, (0, None))
        for subject in _subjects(compensation) if compensation else ():
            self._about[subject].discard(attempt)
            if not self._about[subject]:
                del self._about[subject]


def _subjects(compensation: Compensation) -> set[str]:
    """What a correction is about: a request, and keys."""
    return {compensation.idempotency_key, *compensation.starts}


def _checked(result: AcquireResult, request: AcquireRequest) -> AcquireResult:
    """The answer of a store, which may be a user's own.

    Raises:
        QuotaStoreError: It does not say of each call whether it is admitted, and what refuses it.
    """
    if {len(result.admitted), len(result.refused)} != {len(request.hits)}:
        raise QuotaStoreError("the store's answer does not say of each call what refuses it")
    return result


def _addition(key: str, name: str, start: int) -> AcquireRequest:
    """A request to add one to a count."""
    counters = {key: Counter(key, used=start, mirrored=True)}
    return AcquireRequest(name, uuid4().hex, counters, (Hits({key: 1}),))


def _about(keys: Sequence[str]) -> AcquireRequest:
    """A request for nothing, before which the corrections of keys are made."""
    return AcquireRequest("", "", {key: Counter(key, used=1) for key in keys})


def _callers(request: AcquireRequest) -> set[str]:
    """The keys of which the caller has a count, or has something to correct."""
    keys = {each.key for each in request.counters.values() if each.key is not None and each.used}
    return keys.union(*(each.amounts for each in request.compensations))
