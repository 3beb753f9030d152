"""The hooks' access to the shared store: it times answers, records failures, keeps corrections.

While the store does not answer:

- `on_store_error="deny"` refuses every call that a shared limit matches. A call still runs if only
  limits on trial refuse it.
- `on_store_error="allow"` judges by the counts of the state, without quotas.
- A run that is resumed with the answer of a person fails, and can be resumed again.
- A correction waits in this process. It undoes the request, in case the store has received it, and
  adds the calls that ran nevertheless. The next requests of this client take it along; if there are
  none, it is sent alone.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Counter, Hits
from langchain_quota.errors import QuotaStoreError
from langchain_quota.features.ask.answers import KEPT, is_answered
from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._calls import Request
from langchain_quota.middleware._corrections import MAX_PENDING, PendingCompensations, send_later
from langchain_quota.middleware._form import Form, ask, forms
from langchain_quota.resolved import Outage
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry.recorder import Recorder


class StoreClient:
    """Asks a store, and says so when it cannot be asked."""

    def __init__(self, store: QuotaStore, outage: Outage, recorder: Recorder) -> None:
        self.store = store
        self.prefix: object = getattr(store, "prefix", None)
        self.forms: Collection[str] = getattr(store, "forms", ("sync", "async"))
        self._outage: Outage = outage
        self._recorder = recorder
        self._lock = fork_safe_lock()
        self._down = False
        self._pending = PendingCompensations()
        self._fills = recorder.watch_store(store)
        """Whether it can be full, and has not been nearly so yet."""

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware asks the same store."""
        return self

    async def _acquire(self, form: Form, request: Request) -> AcquireResult:
        """The store's answer or, without one, the answer from the state's counts."""
        sent = request.to_store()
        result: AcquireResult | None = None
        with self._asking("acquire", sent):
            result = _checked(await self._send(form, sent), sent)
            # A request that is answered again holds nothing more.
            again = request.to_store_again(sent) if result.replayed else None
            if again is not None:
                result = _joined(result, await ask(form, self.store, "acquire", again))
        return self._or_fallback(request, sent, result)

    acquire, aacquire = forms(_acquire)

    async def _settle(self, form: Form, sent: AcquireRequest) -> AcquireResult | None:
        """Charge what was used in place of what was held: now, or later if it cannot be sent."""
        result: AcquireResult | None = None
        try:
            result = await self._ask(form, sent)
        finally:
            if result is None:
                self._make_later(sent.compensations)
        return result

    settle, asettle = forms(_settle)

    def settle_soon(self, sent: AcquireRequest) -> None:
        """Charge where nobody can wait what was used: at once in memory, or with a next request."""
        if isinstance(self.store, MemoryStore):
            # Without counters, for nobody reads what is newly granted there.
            self.settle(replace(sent, counters={}))
        else:
            self._make_later(sent.compensations)

    async def _ask(self, form: Form, sent: AcquireRequest) -> AcquireResult | None:
        """The store's answer; `None` if there is none: then nothing is corrected later."""
        result: AcquireResult | None = None
        with self._asking("acquire"):
            result = _checked(await self._send(form, sent), sent)
        return result  # noqa: RET504 - without an answer it is None

    ask, aask = forms(_ask)

    async def _peek(self, form: Form, keys: Sequence[str]) -> dict[str, QuotaUsage] | None:
        """What is kept under each key that the store has; `None` if it does not answer."""
        if not keys:
            return {}
        uses: dict[str, QuotaUsage] | None = None
        with self._asking("peek"):
            found = await ask(form, self.store, "peek", keys)
            uses = {each.key: each for each in found if each is not None}
        return uses  # noqa: RET504 - the same

    peek, apeek = forms(_peek)

    async def _reset(self, form: Form, keys: Sequence[str]) -> None:
        """Set what is used of keys to 0. Corrections of them that wait are made first."""
        with self._timing("reset"):
            last = False
            while not last:
                last, _ = await self._correct(form, [Counter(key, used=1) for key in keys])
            await ask(form, self.store, "reset", keys)

    reset, areset = forms(_reset)

    def _or_fallback(
        self, request: Request, sent: AcquireRequest, result: AcquireResult | None
    ) -> AcquireResult:
        if result is not None:
            request.answered = True
            request.raise_limits(sent.keyed(result.granted))
            new = request.limits.newly_raised(sent.keyed(result.newly_granted))
            self._recorder.record_granted(request.context.agent, new)
            request.mirror_root_run(result)
            return result
        if request.answer is not None or (request.limits.asking and is_answered()):
            # Nothing is undone: a store that has received it answers the same when asked again.
            raise QuotaStoreError(KEPT)
        calls = sum(asked.shared for asked in request.asked)
        result = request.without_store(self._outage)
        # Even with "deny" a call runs if only limits on trial refuse it.
        ran: dict[str, int] = {}
        for hits, admitted in zip(sent.hits, result.admitted, strict=True):
            if admitted and not result.stopped:
                # What would only be held is charged later, when it is known what was used.
                for key, amount in sent.keyed(_charged(hits, sent)).items():
                    ran[key] = ran.get(key, 0) + amount
        self.compensate_later(sent, ran)
        self._recorder.record_fallback(request.context.agent, self._outage, calls)
        return result

    def compensate_later(
        self, request: AcquireRequest, amounts: Mapping[str, int] | None = None
    ) -> None:
        """Undo a request that the store may have received, and add the calls that ran without."""
        attempt = request.attempt_id
        compensation = Compensation(
            attempt,
            amounts or {},
            attempt,
            request.idempotency_key,
            {each.key: each.used for each in request.counters.values() if each.key is not None},
        )
        self._make_later([compensation])

    def _make_later(self, compensations: Sequence[Compensation]) -> None:
        with self._lock:
            lost = sum([self._pending.add(each) for each in compensations])
        if lost:
            error = QuotaStoreError(f"more than {MAX_PENDING} corrections wait for the store")
            self._recorder.record_error("store", error, log=False)
        if len(self._pending):
            send_later(self)

    def waits(self) -> bool:
        """Whether a correction waits for the store."""
        return bool(self._pending)

    async def _send_waiting(self, form: Form) -> None:
        """Send the corrections that wait."""
        for prefix in self._pending.prefixes():
            with self._asking("acquire"):
                sent = True
                while sent:
                    _, sent = await self._correct(form, [Counter(f"{prefix}/")])

    send_waiting, asend_waiting = forms(_send_waiting)

    async def _correct(self, form: Form, about: Sequence[Counter]) -> tuple[bool, bool]:
        """Send the next corrections; whether the counts need no more, and whether any was sent."""
        counters = {str(number): each for number, each in enumerate(about)}
        with self._carrying(AcquireRequest("", "", counters)) as (asked, last):
            if asked.compensations:
                await ask(form, self.store, "acquire", replace(asked, counters={}))
        return last, bool(asked.compensations)

    async def _send(self, form: Form, sent: AcquireRequest) -> AcquireResult:
        """The answer to a request, ahead of which the corrections go that it needs."""
        last = False
        while not last:
            with self._carrying(sent) as (asked, last):
                answer: AcquireResult = await ask(form, self.store, "acquire", asked)
        return answer

    @contextmanager
    def _carrying(self, request: AcquireRequest) -> Iterator[tuple[AcquireRequest, bool]]:
        """What to send next, and whether it is the request itself: corrections may come first."""
        # If the store answers, the corrections that were sent are done.
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
            if carried:
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
            # Cancelled: the call will not run, but the store may have received the request.
            if request is not None:
                self.compensate_later(request)
            raise
        else:
            if self._down:
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


def _checked(result: AcquireResult, request: AcquireRequest) -> AcquireResult:
    """The answer of a store, which may be a user's own."""
    if {len(result.admitted), len(result.refused)} != {len(request.hits)}:
        raise QuotaStoreError("the store's answer does not say of each call what refuses it")
    return result


def _charged(hits: Hits, request: AcquireRequest) -> dict[str, int]:
    """What hits add to counts that a request charges at once, and does not only hold."""
    counters = request.counters
    return {name: each for name, each in hits.amounts.items() if counters[name].lease is None}


def _joined(first: AcquireResult, again: AcquireResult) -> AcquireResult:
    """The answer to a request that was answered before, with what it holds anew."""
    return replace(
        first,
        used={**first.used, **again.used},
        refused=tuple(
            {**each, **other} for each, other in zip(first.refused, again.refused, strict=True)
        ),
        admitted=tuple(map(all, zip(first.admitted, again.admitted, strict=True))),
        stopped=first.stopped or again.stopped,
        granted={**first.granted, **again.granted},
        newly_granted=again.newly_granted,
    )
