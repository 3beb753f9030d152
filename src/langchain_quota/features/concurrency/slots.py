"""Make tool calls wait for a slot of each concurrency limit, run, and release the slots."""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import ToolCall, ToolMessage
from langgraph.errors import GraphInterrupt

from langchain_quota.core import messages
from langchain_quota.core.admission import AcquireResult
from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Outcome
from langchain_quota.core.plans import LimitSet, Meter, OnStoreError, Rule, store_counter
from langchain_quota.core.stops import make_reason
from langchain_quota.features.concurrency.slot_leases import Lease
from langchain_quota.limits import Limit
from langchain_quota.limits.call import CONCURRENCY, STORE, Call
from langchain_quota.limits.calls import ConcurrencyLimit
from langchain_quota.middleware.calls import Change, Step, refund_corrections
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.feature import Feature, ToolAnswer, ToolHandler
from langchain_quota.middleware.flow import Kernel
from langchain_quota.middleware.history import answer, answer_of_blocked, as_edited, newest_name
from langchain_quota.middleware.state import Charge, Ledger, State, ledger, refunds_of
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime import compat
from langchain_quota.runtime.queues import WaitContext, Waiter, queues_of
from langchain_quota.runtime.sync_async import Mode, P, T, newest_dicts, run_sync
from langchain_quota.stores.memory import MemoryStore


class ConcurrencySlots(Feature):
    """Limits how many tool calls run at the same time, in this process or by a store's count."""

    @classmethod
    def create(cls, kernel: Kernel) -> "ConcurrencySlots | None":
        """Return the feature if there is a concurrency limit."""
        return cls(kernel) if cls.needed_hooks(kernel.limits) else None

    @classmethod
    def needed_hooks(cls, limits: Sequence[Limit]) -> Collection[str]:
        """Return the hook around tools if there is a concurrency limit."""
        return ("wrap_tool_call",) if _concurrency_limits(limits) else ()

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._limits = LimitSet(
            Rule(limit, (Meter(CONCURRENCY, store_counter(limit), limit.max_concurrency),))
            for limit in _concurrency_limits(kernel.limits)
        )
        # The verdicts of the first checks of the newest calls.
        self._checked: Callable[[Hashable], dict[str, Verdict]] = newest_dicts(10_000)
        # Of the newest calls, the answer to one that was blocked, and whether one has run: a
        # middleware around this one may make a call again, or its node runs again. What was charged
        # to the blocked one is refunded, so its answer holds.
        self._notes: Callable[[Hashable], dict[str, Any]] = newest_dicts(10_000)
        # The store that leases slots; `None` if this process counts them. The calls of this
        # process queue here first, so that they keep their order and the store gets few requests.
        in_process = self.store is None or isinstance(self.store.store, MemoryStore)
        self._lease_store = None if in_process else self.store

    def conclude(self, step: Step, change: Change) -> Change:
        """Leave the verdicts about allowed calls that need slots to the hook around their tool."""
        if step.pending is None or not self._kernel.runs_tools:
            return change
        verdicts = [*change.verdicts]
        for index, verdict in enumerate(verdicts):
            needs_slot = bool(self._limits.plan_for(verdict.call).rules)
            if needs_slot and verdict.outcome in (Outcome.ALLOWED, Outcome.WOULD_BLOCK):
                self._checked(_name(step.ledger, verdict.call))["verdict"] = verdict
                verdicts[index] = replace(verdict, needs_slot=True)
        return change._replace(verdicts=verdicts)

    async def around_tool(
        self, mode: Mode, request: ToolCallRequest, call: ToolHandler
    ) -> ToolAnswer:
        """Make a tool call when it has its slots; if its wait is over first, answer it instead."""
        state = request.state if isinstance(request.state, Mapping) else {}
        tool_call = as_edited(request.tool_call, state)
        if not self._limits.plan_for(Call("tool", tool_call["name"])).rules:
            return await call(request)
        step = self._step(request.runtime, state, tool_call)
        notes = self._notes(step.context.step(step.task))
        if "answer" in notes:
            blocked: ToolMessage = notes["answer"]
            return blocked
        slots = _SlotRequest(mode, step, self._lease_store, notes)
        try:
            answered = await self._acquire(mode, slots)
            return answered or await call(slots.tracked(mode, request))
        except GraphInterrupt as question:
            if compat.asks_before_run(question, tool_call):
                notes.pop("ran", None)
            raise
        finally:
            if slots.end_task():
                await slots.release(mode)

    def _step(self, runtime: object, state: State, tool_call: ToolCall) -> Step:
        """Return the step in which a tool call gets its slots."""
        name, run_ledger = newest_name(state.get("messages") or ()), ledger(state)
        context = call_context(running_runtime()).answered_by(name)
        caller = context.agent, context.thread_id
        call = Call("tool", tool_call["name"], tool_call["id"], 1, *caller)
        # A node of a graph may call its tools in a loop, with the same ids in each message.
        batch = run_ledger.get("batch")
        message = batch["message"] if batch else ""
        task = f"{self._kernel.name}/{message}/{_name(run_ledger, call)}"
        plan = self._limits.plan_for(call)
        return Step(
            *(state, runtime, run_ledger, context, task, self._limits, {}, [call], [plan]),
            *([plan.demand], (0,), {}, self._limits.stops),
            started=time.time_ns(),
            original_limits=self._limits,
        )

    @contextmanager
    def _waiting(self, slots: "_SlotRequest") -> Iterator[None]:
        """Count a wait, and write an event to the run's stream before the first one of a call."""
        call, limit = slots.call, slots.waited_for
        if not slots.waiter.has_waited:
            maximum = slots.limits[limit].max_concurrency
            reason = make_reason("waiting", limit, CONCURRENCY, threshold=maximum)
            self.recorder.stream("waiting", reason)
        with self.recorder.waiting(call.agent, limit, call.thread_id):
            yield

    async def _acquire(self, mode: Mode, slots: "_SlotRequest") -> ToolMessage | None:
        """Wait for a call's slots, and record the decision; return the answer to a blocked call."""
        step, call, waiting = slots.step, slots.call, partial(self._waiting, slots)
        try:
            await slots.acquire(mode, waiting)
        except BaseException:
            waited = slots.waited_for, "cancelled", slots.waiter.waited
            self.recorder.record_wait(call.agent, *waited)
            raise
        if slots.store_unavailable and self._lease_store is not None:
            label, action = self._lease_store.label, self._kernel.on_store_error
            self.recorder.record_fallback(call.agent, label, action)
        unknown = Verdict(call, Outcome.ALLOWED)
        first = self._checked(_name(step.ledger, call)).get("verdict", unknown)
        verdict = slots.verdict(first, self._kernel.on_store_error)
        self.recorder.record_slot_waits(verdict, slots.waited_for)
        if verdict.outcome is not Outcome.BLOCKED:
            await self._kernel.record(mode, step, Change([verdict]))
            return None
        has_run = "ran" in slots.notes
        charge = None if has_run else _charge_of(step, call)
        refunds = () if charge is None else refunds_of(call, charge)
        change = Change([verdict], refunds=refunds)
        try:
            text = messages.refusal(verdict.decision, step.limits.by_name)
        except Exception as error:
            await self._record_blocked(mode, step, change._replace(error=error), charge)
            raise
        message = (answer if has_run else answer_of_blocked)(str(call.id), call.tool, text)
        if not has_run:
            slots.notes["answer"] = message
        change = change._replace(update={"messages": [message]})
        await self._record_blocked(mode, step, change, charge)
        return message

    async def _record_blocked(
        self, mode: Mode, step: Step, change: Change, charge: Charge | None
    ) -> None:
        """Record a blocked call, and refund what a store was charged for it."""
        refunds = {str(step.calls[0].id): charge["keys"]} if charge else {}
        corrections = refund_corrections(step.context.step(f"{step.task}/waited"), refunds)
        await self._kernel.record_and_correct(mode, step, change, corrections)


class _SlotRequest:
    """The slots of one call, until its task and the threads of its tool have ended."""

    def __init__(
        self, mode: Mode, step: Step, store: StoreClient | None, notes: dict[str, Any]
    ) -> None:
        self.step, (self.call,), (self._plan,) = step, step.calls, step.plans
        matching = _concurrency_limits([rule.limit for rule in self._plan.rules])
        self.limits = {limit.name: limit for limit in matching}
        self.notes = notes
        self._store, self._queues = store, queues_of(store and store.store)
        self.waiter = Waiter(mode)
        enforced = (limit.name for limit in matching if limit.enforce)
        self.waited_for = next(enforced, matching[0].name)
        # How many calls run in each count, without this one.
        self._running: dict[str, int] = {}
        # The limits that refuse the call, or would if they were enforced.
        self._refused: list[str] = []
        self.store_unavailable = False
        self._lease: Lease | None = None
        self._has_task_ended = False
        self._threads: list[None] = []

    async def acquire(self, mode: Mode, waiting: WaitContext) -> None:
        """Wait for the slots: in this process, and in a store that leases them."""
        # The shortest `wait` of the limits holds.
        waits = [limit.seconds for limit in self.limits.values() if limit.enforce]
        deadline = self.waiter.came_at + min(waits, default=0)
        for count, maximum in self._needs().items():
            take = partial(self._take, count, maximum)
            has_slot = await self.waiter.retry(take, deadline, waiting)
            self._refused = [
                limit
                for limit, _, counter, most, enforced in self._plan.demand.thresholds
                if not enforced and self._running.get(counter, 0) >= most
            ]
            if not has_slot:
                self._refused += self._enforced(count, maximum)
                self._queues.move(self.waiter)
                return
        if self._store is None:
            return
        self._lease = Lease(self._store, self._plan)
        self.store_unavailable = not await self._lease.acquire(
            mode, self.waiter, deadline, waiting, self._note_answer
        )

    def _note_answer(self, result: AcquireResult) -> None:
        """Note what a store has answered, before a call waits for its slot there."""
        self._running, self._refused = {**result.used}, [*result.refused[0]]
        enforced = (name for name in self._refused if self.limits[name].enforce)
        self.waited_for = next(enforced, self.waited_for)

    def _needs(self) -> Mapping[str, int | None]:
        """Return the counts in which the call needs a slot, with each enforced maximum."""

        # Every call acquires its slots in this order, so no two calls wait for each other. Counts
        # of few tools come first: a call that waits for one of them delays few other tools. Counts
        # of limits in a dry run come last.
        def rank(limit: ConcurrencyLimit) -> tuple[bool, int, str]:
            return not limit.enforce, len(limit.tools) or sys.maxsize, store_counter(limit)

        needs: dict[str, int | None] = {}
        for limit in sorted(self.limits.values(), key=rank):
            count, maximum = store_counter(limit), limit.max_concurrency
            if limit.enforce:
                needs[count] = min(maximum, needs.get(count) or maximum)
            else:
                needs.setdefault(count, None)
        return needs

    def _enforced(self, count: str, maximum: int | None) -> list[str]:
        """Return the enforced limits on a count that have this maximum."""
        thresholds = self._plan.demand.thresholds
        return [one.limit for one in thresholds if one[2:] == (count, maximum, True)]

    async def _take(self, count: str, maximum: int | None) -> float:
        """Take a slot of a count in this process; return 0 if the call has got it."""
        has_slot, running = self._queues.take(self.waiter, count, maximum)
        self._running.setdefault(count, running)
        if has_slot:
            return 0.0
        self.waited_for = self._enforced(count, maximum)[-1]
        return math.inf

    def verdict(self, first: Verdict, outage: OnStoreError) -> Verdict:
        """Return the verdict about the call after its first one, even without the store."""
        refused = self._refused
        if self.store_unavailable:
            refused = [*self.limits] if outage == "block" else []
        # A limit in a dry run may have refused the call before.
        outcome = first.outcome
        if refused:
            enforced = any(self.limits[name].enforce for name in refused)
            outcome = Outcome.BLOCKED if enforced else Outcome.WOULD_BLOCK
        counts = self._plan.demand.amounts
        return Verdict(
            self.call,
            outcome,
            self._plan,
            {count: self._running.get(count, 0) for count in counts},
            # The counts include this call.
            [1] * len(self._plan.rules),
            [False] * len(self._plan.rules),
            refused=dict.fromkeys(refused, STORE if self.store_unavailable else CONCURRENCY),
            waited=self.waiter.waited,
            before_slots=first,
        )

    def tracked(self, mode: Mode, request: ToolCallRequest) -> ToolCallRequest:
        """Return the request for the tool; a tool in a thread keeps the slots until it ends."""
        self.notes["ran"] = True
        # In sync mode, too, a call that takes too long may be left running.
        if request.tool is None or not compat.runs_in_thread(request.tool, mode):
            return request
        # A cancelled run does not end the thread.
        loop = asyncio.get_running_loop() if mode else None

        def track(run: Callable[P, T]) -> Callable[P, T]:
            @wraps(run)
            def run_tracked(*args: P.args, **options: P.kwargs) -> T:
                self._threads.append(None)
                try:
                    if self._has_task_ended:
                        raise asyncio.CancelledError("the run was cancelled before its tool began")
                    return run(*args, **options)
                finally:
                    self._threads.pop()
                    is_alone = self._has_task_ended or (loop is not None and loop.is_closed())
                    if is_alone and not self._threads:
                        run_sync(self.release(""))

            return run_tracked

        return request.override(tool=compat.with_run(request.tool, track))

    def end_task(self) -> bool:
        """Note that the task has ended; return whether all threads of the call have ended, too."""
        # A thread adds itself before it reads this flag. So either the thread sees that the task
        # has ended, or the task sees the thread.
        self._has_task_ended = True
        return not self._threads

    async def release(self, mode: Mode) -> None:
        """Release the lease and the slots."""
        try:
            if self._lease is not None:
                await self._lease.end(mode)
        finally:
            self._queues.leave(self.waiter)


def _charge_of(step: Step, call: Call) -> Charge | None:
    """Return what a store was charged for a call."""
    # The agent's state learns of the refund from the store's next answer. What the state alone
    # counts is not refunded.
    batch = step.ledger.get("batch")
    charge = None if batch is None else batch["calls"].get(str(call.id))
    return charge if charge and charge["keys"] else None


def _name(run_ledger: Ledger, call: Call) -> str:
    return f"{run_ledger.get('run')}/{call.tool}/{call.id}"


def _concurrency_limits(limits: Sequence[Limit]) -> list[ConcurrencyLimit]:
    return [limit for limit in limits if isinstance(limit, ConcurrencyLimit)]
