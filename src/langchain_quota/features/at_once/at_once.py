"""Caps on calls at once: a tool call waits for its turn, runs, and makes room for the next one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial, wraps
from types import MethodType
from typing import Any, Self

from langchain.agents.middleware.types import AgentMiddleware, ToolCallRequest
from langchain_core.messages import ToolMessage
from langgraph.types import Command
from langsmith.utils import tracing_is_enabled

from langchain_quota import messages
from langchain_quota.admission import AcquireRequest, Compensation, Counter
from langchain_quota.decision import Decision, Outcome, Refund
from langchain_quota.features.at_once.leases import Lease, pauses
from langchain_quota.features.at_once.semaphores import Slot, semaphores_of
from langchain_quota.features.at_once.turn import Turn, turn_of
from langchain_quota.features.root_run.run import in_tool
from langchain_quota.limits import ToolCallLimit
from langchain_quota.middleware._form import Form, ask, now
from langchain_quota.middleware._history import answer, answer_of_refused
from langchain_quota.middleware._observers import Observers
from langchain_quota.middleware._store import StoreClient
from langchain_quota.middleware._tool_counts import charged_for
from langchain_quota.resolved import Outage
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry.recorder import Recorder

Answer = ToolMessage | Command[Any]
Handler = Callable[[ToolCallRequest], Answer]
AsyncHandler = Callable[[ToolCallRequest], Awaitable[Answer]]

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


class AtOnce:
    """Holds tool calls to the number that may run at the same time, in this process or a store."""

    def __init__(
        self,
        limits: Sequence[ToolCallLimit],
        store: StoreClient | None,
        outage: Outage,
        recorder: Recorder,
        observers: Observers,
    ) -> None:
        self._limits = limits
        self._store = store
        # The store that keeps the places; `None` if this process keeps them.
        self._leases = None if store is None or isinstance(store.store, MemoryStore) else store
        self._outage = outage
        self._recorder = recorder
        self._observers = observers
        # Before a store is asked, the calls of this process wait in line. So they keep their order,
        # and the store gets few questions.
        self._semaphores = semaphores_of(self._leases and self._leases.store)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: copies of the middleware count their calls together."""
        return self

    def make(self, request: ToolCallRequest, handler: Handler) -> Answer:
        """Make a tool call when it may run; if its wait is over first, answer it instead."""
        turn = turn_of(request, self._limits)
        if turn is None:
            return handler(request)
        place = Place()
        try:
            answered = now(self._begin("", turn, place))
            if answered is not None:
                return answered
            return handler(request)
        finally:
            now(place.end(""))

    async def amake(self, request: ToolCallRequest, handler: AsyncHandler) -> Answer:
        """Make a tool call when it may run; if its wait is over first, answer it instead."""
        turn = turn_of(request, self._limits)
        if turn is None:
            return await handler(request)
        place = Place()
        try:
            answered = await self._begin("a", turn, place)
            if answered is not None:
                return answered
            return await handler(place.watching(request))
        finally:
            if place.task_over():
                await place.end("a")

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
                await ask(form, self._store, "settle", refund)
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
        charges = batch["charges"].get(call_id, {})
        self._recorder.record_refunds(
            [
                Refund(replace(turn.call, amount=amount), name)
                for by_middleware in charges.values()
                for by_limit in by_middleware.values()
                for name, amount in by_limit.items()
                if name
            ]
        )
        charged = charged_for(batch, call_id)
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


def caps_of(middleware: Any, outage: Outage) -> AtOnce | None:
    """The caps of a middleware on calls at once; with caps or root runs it gets tool hooks."""
    # LangChain looks for such hooks in the class. On `QuotaMiddleware` they would give every agent
    # with limits a wrapper around each tool call, and an agent without tools a node for tools.
    known = vars(middleware)
    capped = [each for each in known["limits"] if getattr(each, "at_once", None) is not None]
    if not capped and not known["_counts_root_runs"]:
        return None
    # `__new__` is too early: it does not see the limits that a subclass's `__init__` gives.
    own: Any = type(middleware)
    middleware.__class__ = _with_hooks(own)
    if not tracing_is_enabled():
        # As with the hook around the model: without `async`, LangSmith's wrapper is not added.
        known["awrap_tool_call"] = MethodType(_untraced, middleware)
    if not capped:
        return None
    return AtOnce(capped, known["_store"], outage, known["_recorder"], known["_observers"])


def _untraced(
    middleware: Any, request: ToolCallRequest, handler: AsyncHandler
) -> Awaitable[Answer]:
    made: Awaitable[Answer] = type(middleware).awrap_tool_call(middleware, request, handler)
    return made


@cache
def _with_hooks(cls: Any) -> type:
    """The same class with hooks around tool calls; those that it has run inside."""
    hooks = {cls.wrap_tool_call, cls.awrap_tool_call}
    has_own = hooks != {AgentMiddleware.wrap_tool_call, AgentMiddleware.awrap_tool_call}

    def wrap_tool_call(self: Any, request: ToolCallRequest, handler: Handler) -> Answer:
        inner = partial(cls.wrap_tool_call, self, handler=handler) if has_own else handler
        caps = self._at_once
        with in_tool(request):
            made: Answer = inner(request) if caps is None else caps.make(request, inner)
        return made

    async def awrap_tool_call(self: Any, request: ToolCallRequest, handler: AsyncHandler) -> Answer:
        inner = partial(cls.awrap_tool_call, self, handler=handler) if has_own else handler
        caps = self._at_once
        with in_tool(request):
            made: Answer = await (inner(request) if caps is None else caps.amake(request, inner))
        return made

    own: dict[str, object] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # An object can change its class only to one that is laid out like its own.
        "__slots__": (),
        "wrap_tool_call": wrap_tool_call,
        "awrap_tool_call": awrap_tool_call,
    }
    made: type = type(cls)(cls.__name__, (cls,), own)
    return made
