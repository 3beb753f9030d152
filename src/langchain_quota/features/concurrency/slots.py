"""Slots of a concurrency limit: a tool call waits for one, runs, and releases it."""

import asyncio
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolMessage

from langchain_quota.core import messages
from langchain_quota.core.checks import OnStoreError, store_counter
from langchain_quota.core.decision import CountStatus, Decision, LimitStatus, Outcome
from langchain_quota.features.concurrency.slot_leases import Lease
from langchain_quota.limits import Limit
from langchain_quota.limits.call import CONCURRENCY, Call
from langchain_quota.limits.concurrency import ConcurrencyLimit
from langchain_quota.middleware.calls import refunded_limits
from langchain_quota.middleware.conclude import refunds_of
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import answer, answer_of_blocked, newest_name
from langchain_quota.middleware.state import ledger
from langchain_quota.runtime import compat
from langchain_quota.runtime.semaphores import Slot, semaphore_of
from langchain_quota.runtime.sync_async import Mode, run_sync
from langchain_quota.stores.client import StoreClient
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.telemetry import names
from langchain_quota.telemetry.observers import Observers

_tried: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The runtimes of the calls that have run, each by its `id`, as long as they are used."""


class ConcurrencySlots(Feature):
    """Holds tool calls to the number that may run at the same time, in this process or a store."""

    @classmethod
    def create(cls, kernel: Kernel) -> "ConcurrencySlots | None":
        """Return the feature if a limit caps concurrency."""
        return cls(kernel) if cls.needed_hooks(kernel.limits) else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools if a limit caps concurrency."""
        return ("wrap_tool_call",) if _caps(limits) else ()

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._limits = _caps(kernel.limits)
        self.on_store_error: OnStoreError = kernel.on_store_error
        self.observers: Observers = kernel.observers
        # The store that keeps the places; `None` if this process keeps them. Before it is asked,
        # the calls of this process wait in line. So they keep their order, and it gets few
        # questions.
        in_process = self.store is None or isinstance(self.store.store, MemoryStore)
        self._leases = None if in_process else self.store

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call when it may run; if its wait is over first, answer it instead."""
        made = Call("tool", request.tool_call["name"])
        limits = {limit.name: limit for limit in self._limits if limit.matches(made)}
        if not limits:
            return await call(request)
        turn = _SlotRequest(request, limits)
        try:
            answered = await self._begin(mode, turn, request.tool)
            return answered or await call(turn.runs(mode, request))
        finally:
            if turn.task_over():
                await turn.end(mode)

    async def _begin(self, mode: Mode, turn: "_SlotRequest", tool: Any) -> ToolMessage | None:
        """Wait for a call's places, visibly; the answer to a call that may not run."""
        try:
            with self.recorder.waiting(turn.call.agent, turn.waited_for):
                await turn.wait(mode, self._leases, tool)
        except BaseException:
            self.recorder.record_wait(turn.call.agent, turn.waited_for, "cancelled", turn.age)
            raise
        if turn.store_unavailable:
            self.recorder.count(names.STORE_FALLBACKS, turn.call.agent, self.on_store_error)
        decision = turn.decision(self.on_store_error)
        self.recorder.record_slot_decision(
            decision, turn.waited_for, turn.age if turn.waits else 0.0
        )
        if decision.outcome is not Outcome.ALLOWED:
            await self.observers.notify(mode, [decision])
        if decision.outcome is not Outcome.BLOCKED:
            return None
        text, call_id = messages.refusal(decision, turn.limits), str(turn.call.id)
        if turn.tried:
            return answer(call_id, turn.call.tool, text)
        await self._refund(mode, turn, call_id)
        return answer_of_blocked(call_id, turn.call.tool, text)

    async def _refund(self, mode: Mode, turn: "_SlotRequest", call_id: str) -> None:
        """Give back what a store was charged for the call: it does not run."""
        # The state learns it with the store's next answer. What the state alone counts stays.
        batch = turn.known.get("batch")
        charge = None if batch is None else batch["calls"].get(call_id)
        if charge is not None and charge["keys"]:
            self.recorder.record_refunds(refunds_of(turn.call, refunded_limits(charge)))
            refunds = {call_id: charge["keys"]}
            await self._kernel.release(mode, turn.known, turn.context.step("waited"), refunds)


class _SlotRequest:
    """One call, until its task and the threads of its tool have ended."""

    def __init__(self, request: ToolCallRequest, limits: Mapping[str, ConcurrencyLimit]) -> None:
        tool_call, state = request.tool_call, request.state
        state = state if isinstance(state, Mapping) else {}
        name = newest_name(state.get("messages") or ())
        self.context = context = call_context(running_runtime(), model_name=name)
        self.call = Call(
            "tool", tool_call["name"], tool_call["id"], 1, context.agent, context.thread_id
        )
        self.limits = limits
        # Empty if the tool's state has none.
        self.known = ledger(state)
        # The same each time the call is tried, as a middleware around this one may do.
        self._runtime = request.runtime
        self.tried = _tried.get(id(self._runtime)) is self._runtime
        self._began = time.monotonic()
        self.waits = False
        self.waited_for = next(
            (limit for limit in limits if limits[limit].enforce), next(iter(limits))
        )
        # How many are in each count, without this call; and the limits that refuse it, or would.
        self._running: Mapping[str, int] = {}
        self._refused: list[str] = []
        self.store_unavailable = False
        self._slots: list[Slot] = []
        self._lease: Lease | None = None
        self._task_over = False
        self._threads: list[None] = []

    @property
    def age(self) -> float:
        """How long ago it began, in seconds."""
        return time.monotonic() - self._began

    async def wait(self, mode: Mode, store: StoreClient | None, tool: Any) -> None:
        """Wait for its places: in this process, and in a store that keeps leases."""
        # The shortest wait of its limits holds.
        waits = [limit.seconds for limit in self.limits.values() if limit.enforce]
        until = self._began + min(waits, default=0)
        for count, maximum in self._needs().items():
            semaphore = semaphore_of(store and store.store, count)
            slot = await semaphore.acquire(mode, maximum, until - time.monotonic())
            self._slots.append(slot)
            self._met(count, slot)
            if not slot.acquired:
                return
        if store is None:
            return
        lease = Lease(store, self.limits.values())
        result = await lease.take(mode, until)
        self.waits |= lease.waits
        if result is None:
            self.store_unavailable = True
            return
        self._running, self._refused = result.used, [*result.refused[0]]
        enforced = (name for name in self._refused if self.limits[name].enforce)
        self.waited_for = next(enforced, self.waited_for)
        if result.admitted[0]:
            self._lease = lease
            # A thread may outlive the event loop.
            in_thread = "sync" in store.forms and compat.runs_in_thread(tool)
            lease.keep("" if in_thread else mode)

    def _needs(self) -> Mapping[str, int | None]:
        """Return the counts that the call is in while it runs, with each enforced maximum."""
        # Every call takes its slots in this order, so no two calls wait for each other. Counts of
        # few tools come first: who waits for one of them keeps other tools waiting as little as it
        # can. Counts of limits on trial come last.
        needs: dict[str, int | None] = {}
        for limit in sorted(self.limits.values(), key=_rank):
            count, maximum = store_counter(limit), limit.max_concurrency
            if limit.enforce:
                needs[count] = min(maximum, needs.get(count) or maximum)
            else:
                needs.setdefault(count, None)
        return needs

    def _met(self, count: str, slot: Slot) -> None:
        """Note what it has found in a count of this process, and which limits refuse it."""
        self._running = {**self._running, count: slot.running}
        for name, limit in self.limits.items():
            if store_counter(limit) != count:
                continue
            if not limit.enforce and slot.running >= limit.max_concurrency:
                self._refused.append(name)
            if limit.enforce and slot.waits and limit.max_concurrency == slot.maximum:
                self.waits, self.waited_for = True, name
                self._refused += [] if slot.acquired else [name]

    def decision(self, outage: OnStoreError) -> Decision:
        """Return the decision about the call, even while the store is unavailable."""
        refused = self._refused
        if self.store_unavailable:
            refused = [*self.limits] if outage == "block" else []
        outcome = Outcome.ALLOWED
        if refused:
            enforced = any(self.limits[status].enforce for status in refused)
            outcome = Outcome.BLOCKED if enforced else Outcome.WOULD_BLOCK
        statuses = (self._status(limit, refused=limit in refused) for limit in self.limits)
        return Decision(self.call, outcome, tuple(statuses))

    def _status(self, name: str, *, refused: bool) -> LimitStatus:
        """Return the status of a cap at the call: how many run, including it, and how many may."""
        limit = self.limits[name]
        running = self._running.get(store_counter(limit), 0)
        return LimitStatus(
            name,
            "continue",
            (
                CountStatus(
                    CONCURRENCY, running, running + 1, limit.max_concurrency, per=CONCURRENCY
                ),
            ),
            reason=("store" if self.store_unavailable else "exhausted") if refused else None,
            scope=CONCURRENCY if refused and not self.store_unavailable else None,
            enforced=limit.enforce,
            alert=limit.alert,
        )

    def runs(self, mode: Mode, request: ToolCallRequest) -> ToolCallRequest:
        """Return the request for the tool; a tool in a thread keeps the slots until it ends."""
        _tried[id(self._runtime)] = self._runtime
        # In the sync form, too, a call that takes too long may be left running.
        if request.tool is None or not compat.runs_in_thread(request.tool, mode):
            return request
        # A cancelled run does not end the thread.
        loop = asyncio.get_running_loop() if mode else None

        def watched(run: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(run)
            def run_watched(*args: Any, **options: Any) -> Any:
                self._threads.append(None)
                try:
                    if self._task_over:
                        raise asyncio.CancelledError("the run was cancelled before its tool began")
                    return run(*args, **options)
                finally:
                    self._threads.pop()
                    over = self._task_over or (loop is not None and loop.is_closed())
                    if over and not self._threads:
                        run_sync(self.end(""))

            return run_watched

        return request.override(tool=compat.with_run(request.tool, watched))

    def task_over(self) -> bool:
        """Note that the task has ended; whether the whole call has."""
        # A thread looks at this after it has added itself: so one of both sees the other.
        self._task_over = True
        return not self._threads

    async def end(self, mode: Mode) -> None:
        """Give back the lease and the slots."""
        try:
            if self._lease is not None:
                await self._lease.end(mode)
        finally:
            for slot in self._slots:
                slot.release()


def _caps(limits: Sequence[Limit]) -> list[ConcurrencyLimit]:
    """Return the limits on concurrency."""
    return [limit for limit in limits if isinstance(limit, ConcurrencyLimit)]


def _rank(limit: ConcurrencyLimit) -> tuple[bool, int, str]:
    """Return a limit's position in the order in which calls take their slots."""
    return not limit.enforce, len(limit.tools) or sys.maxsize, store_counter(limit)
