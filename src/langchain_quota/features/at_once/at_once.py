"""Caps on calls at once: a tool call waits for its turn, runs, and makes room for the next one."""

import asyncio
import time
from collections.abc import Sequence
from copy import copy
from functools import wraps
from typing import Any

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolMessage

from langchain_quota import messages
from langchain_quota.admission import AcquireRequest, Compensation, Counter
from langchain_quota.concurrency import Form, ask, now
from langchain_quota.decision import Decision, Outcome
from langchain_quota.features.at_once.leases import Lease, pauses
from langchain_quota.features.at_once.semaphores import Slot, semaphores_of
from langchain_quota.features.at_once.turn import Turn, turn_of
from langchain_quota.limits import Limit
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.conclude import refunds_of
from langchain_quota.middleware.counts import owed_for
from langchain_quota.middleware.feature import Answer, Feature, ToolHandler
from langchain_quota.middleware.history import answer, answer_of_refused
from langchain_quota.rule import Outage
from langchain_quota.stores.client import StoreClient
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry.observers import Observers
from langchain_quota.telemetry.recorder import Recorder

_RUNS = ("invoke", "ainvoke", "run", "arun", "_arun")
"""The methods by which LangChain runs a tool; without an async form of its own, in a thread."""


class Place:
    """The slots and the lease of a call, until its task and the threads of its tool have ended."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.lease: Lease | None = None
        self._task_over = False
        self._threads: list[None] = []

    def task_over(self) -> bool:
        """Note that the task has ended; whether the whole call has."""
        # A thread looks at this after it has added itself: so one of both sees the other.
        self._task_over = True
        return not self._threads

    async def end(self, form: Form) -> None:
        """Give back the lease and the slots."""
        try:
            if self.lease is not None:
                await ask(form, self.lease, "end")
        finally:
            for slot in self.slots:
                slot.give_back()

    def watching(self, request: ToolCallRequest) -> ToolCallRequest:
        """The request, with a tool whose thread keeps the place when its run is cancelled."""
        # The tool is a copy, whose `_run` is that of the original.
        tool: Any = request.tool
        own = (getattr(getattr(type(tool), each, None), "__module__", "") for each in _RUNS)
        if getattr(tool, "coroutine", None) or not all(
            each.startswith("langchain_core.") for each in own
        ):
            return request
        loop = asyncio.get_running_loop()
        run = tool._run  # noqa: SLF001 - what all its sync forms call

        @wraps(run)
        def watched(*args: Any, **options: Any) -> Any:
            self._threads.append(None)
            try:
                if self._task_over:
                    raise asyncio.CancelledError("the run was cancelled before its tool began")
                if self.lease is not None:
                    # The thread may outlive the event loop.
                    self.lease.keep()
                return run(*args, **options)
            finally:
                self._threads.pop()
                if (self._task_over or loop.is_closed()) and not self._threads:
                    now(self.end(""))

        watched_tool = copy(tool)
        vars(watched_tool)["_run"] = watched
        return request.override(tool=watched_tool)


class AtOnce(Feature):
    """Holds tool calls to the number that may run at the same time, in this process or a store."""

    @classmethod
    def of(cls, limiter: Any) -> "AtOnce | None":
        """The caps of a middleware; `None` if it has none."""
        return cls(limiter) if cls.wraps_tools(limiter.limits) else None

    @classmethod
    def wraps_tools(cls, limits: Sequence[Limit]) -> bool:
        """Whether a limit has a cap."""
        return any(map(_cap, limits))

    def __init__(self, limiter: Any) -> None:
        self._limits: Sequence[ToolCallLimit] = [*filter(_cap, limiter.limits)]
        self._store: StoreClient | None = limiter._store  # noqa: SLF001 - the kernel gives these
        self._outage: Outage = limiter._outage  # noqa: SLF001
        self._recorder: Recorder = limiter._recorder  # noqa: SLF001
        self._observers: Observers = limiter._observers  # noqa: SLF001
        # The store that keeps the places; `None` if this process keeps them.
        in_process = self._store is None or isinstance(self._store.store, MemoryStore)
        self._leases = None if in_process else self._store
        # Before a store is asked, the calls of this process wait in line. So they keep their order,
        # and the store gets few questions.
        self._semaphores = semaphores_of(self._leases and self._leases.store)

    async def around_tool(self, form: Form, request: ToolCallRequest, call: ToolHandler) -> Answer:
        """Make a tool call when it may run; if its wait is over first, answer it instead."""
        turn = turn_of(request, self._limits)
        if turn is None:
            return await call(request)
        place = Place()
        try:
            answered = await self._begin(form, turn, place)
            if answered is not None:
                return answered
            return await call(place.watching(request) if form else request)
        finally:
            if place.task_over():
                await place.end(form)

    async def _begin(self, form: Form, turn: Turn, place: Place) -> ToolMessage | None:
        """Wait for a call's place, visibly; the answer to a call that may not run."""
        try:
            for count, most in turn.needs:
                left = turn.until - time.monotonic()
                slot = await ask(form, self._semaphores.of(count), "take", most, left)
                place.slots.append(slot)
                turn.met(count, slot)
                if not slot.taken:
                    break
            else:
                place.lease = await self._lease(form, turn)
        except BaseException:
            name = turn.waited_for or next(iter(turn.limits))
            seconds = time.monotonic() - turn.began
            self._recorder.record_wait(turn.call.agent, name, "cancelled", seconds)
            raise
        if place.lease is not None:
            (place.lease.akeep if form else place.lease.keep)()
        decision = turn.decision(self._outage)
        self._recorder.record_turn(decision, turn.waited_for, turn.waited)
        if decision.outcome is not Outcome.ALLOWED:
            blocked = decision.outcome is Outcome.BLOCKED
            refund = self._refund(turn) if blocked else None
            await ask(form, self._observers, "notify", [decision], None)
            if refund is not None and self._store is not None:
                await self._store.settle(form, refund)
            if blocked:
                return self._answer(turn, decision)
        turn.runs()
        return None

    async def _lease(self, form: Form, turn: Turn) -> Lease | None:
        """Wait for a place in the store; `None` where it keeps none for this call."""
        if self._leases is None:
            return None
        lease = Lease(self._leases, turn.limits.values())
        try:
            result = await lease.ask(form)
            for pause in pauses(turn.until):
                if result is None or result.admitted[0]:
                    break
                turn.waits = True
                if form:
                    await asyncio.sleep(pause)
                else:
                    time.sleep(pause)  # noqa: ASYNC251 - in the sync form
                result = await lease.ask(form)
        except asyncio.CancelledError:
            await lease.give_back(form)
            raise
        except BaseException:
            lease.give_back_later()
            raise
        turn.learned(result)
        if result is None:
            # The store may have counted it.
            lease.give_back_later()
            self._recorder.record_fallback(turn.call.agent, self._outage, 1)
            return None
        return lease if result.admitted[0] else None

    def _refund(self, turn: Turn) -> AcquireRequest | None:
        """Give back what the call was charged: it does not run."""
        # The state's counts are corrected when the next calls are judged: the answer says so. The
        # store's counts are corrected now, if the tool's state names them: other runs use them.
        batch, call_id = turn.batch, str(turn.call.id)
        if batch is None or turn.tried:
            return None
        charge = batch["calls"].get(call_id)
        taken = [] if charge is None else [*charge["limits"].values()]
        names = [one for by_limit in taken for one in by_limit.items()]
        self._recorder.record_refunds(refunds_of(turn.call, names))
        charged = owed_for(batch["message"], call_id, charge)
        made = tuple(
            Compensation(refund, {key: -amount for key, amount in amounts.items()})
            for refund, amounts in charged.items()
        )
        counters = {key: Counter(key) for amounts in charged.values() for key in amounts}
        return AcquireRequest("", "", counters, compensations=made) if made else None

    def _answer(self, turn: Turn, refusal: Decision) -> ToolMessage:
        """What the model reads in place of the tool's answer."""
        text = messages.refusal(refusal, turn.limits)
        call_id, tool = str(turn.call.id), turn.call.tool
        if turn.tried:
            return answer(call_id, tool, text)
        return answer_of_refused(call_id, tool, text, returned=turn.batch is not None)


def _cap(limit: Any) -> int | None:
    """How many calls a limit lets run at the same time, if it says so."""
    cap: int | None = getattr(limit, "at_once", None)
    return cap
