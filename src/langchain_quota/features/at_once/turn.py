"""One tool call that is to run: its places under the caps on calls at once, and its status."""

import asyncio
import sys
import time
from collections.abc import Mapping
from copy import copy
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from langchain.agents.middleware.types import ToolCallRequest

from langchain_quota.concurrency import Form, now
from langchain_quota.decision import AT_ONCE, Call, Decision, LimitStatus, Outcome, QuotaStatus
from langchain_quota.features.at_once.leases import Lease
from langchain_quota.features.at_once.semaphores import Slot, semaphore_of
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.middleware.history import newest_name
from langchain_quota.rule import OnStoreError, stored_as
from langchain_quota.state import ledger
from langchain_quota.stores.client import StoreClient

_RUNS = ("invoke", "ainvoke", "run", "arun", "_arun")
"""The methods by which LangChain runs a tool; without an async form of its own, in a thread."""

_tried: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The runtimes of the calls that have run, each by its `id`, as long as they are used."""


class Turn:
    """One call, until its task and the threads of its tool have ended."""

    def __init__(self, request: ToolCallRequest, limits: Mapping[str, ToolCallLimit]) -> None:
        made, state = request.tool_call, request.state
        state = state if isinstance(state, Mapping) else {}
        name = newest_name(state.get("messages") or ())
        context = call_context(running_runtime(), model_name=name)
        self.call = Call("tool", made["name"], made["id"], 1, context.agent, context.thread_id)
        self.limits = limits
        # What the calls of its message were charged; `None` if the tool's state has none.
        self.batch = ledger(state).get("batch")
        # The same each time the call is tried, as a middleware around this one may do.
        self._runtime = request.runtime
        self.tried = _tried.get(id(self._runtime)) is self._runtime
        self._began = time.monotonic()
        self._waits = False
        self.waited_for = next(
            (name for name, each in limits.items() if each.enforce), next(iter(limits))
        )
        # How many are in each count, without this call; and the limits that refuse it, or would.
        self._running: Mapping[str, int] = {}
        self._refused: list[str] = []
        self.unchecked = False
        self._slots: list[Slot] = []
        self._lease: Lease | None = None
        self._task_over = False
        self._threads: list[None] = []

    @property
    def waited(self) -> float:
        """How long it has waited, in seconds; 0 if it did not have to."""
        return self.age if self._waits else 0.0

    @property
    def age(self) -> float:
        """How long ago it began, in seconds."""
        return time.monotonic() - self._began

    async def wait(self, form: Form, store: StoreClient | None, tool: Any) -> None:
        """Wait for its places: in this process, and in a store that keeps leases."""
        # The shortest wait of its limits holds.
        waits = [each.wait or 0 for each in self.limits.values() if each.enforce]
        until = self._began + min(waits, default=0)
        for count, most in self._needs():
            semaphore = semaphore_of(store and store.store, count)
            slot = await semaphore.take(form, most, until - time.monotonic())
            self._slots.append(slot)
            self._met(count, slot)
            if not slot.taken:
                return
        if store is None:
            return
        lease = Lease(store, self.limits.values())
        result = await lease.take(form, until)
        self._waits |= lease.waits
        if result is None:
            self.unchecked = True
            return
        self._running, self._refused = result.used, [*result.refused[0]]
        enforced = (each for each in self._refused if self.limits[each].enforce)
        self.waited_for = next(enforced, self.waited_for)
        if result.admitted[0]:
            self._lease = lease
            # A thread may outlive the event loop.
            in_thread = "sync" in store.forms and _runs_in_thread(tool)
            lease.keep("" if in_thread else form)

    def _needs(self) -> list[tuple[str, int | None]]:
        """The counts that it is in while it runs, with the most for each that is enforced."""
        # Every call takes its slots in this order, so no two calls wait for each other. Counts of
        # few tools come first: who waits for one of them keeps other tools waiting as little as it
        # can.
        enforced: dict[tuple[int, str], int] = {}
        counted = set()
        for limit in self.limits.values():
            count = len(limit.tools) or sys.maxsize, stored_as(limit)
            counted.add(count)
            if limit.enforce and limit.at_once is not None:
                enforced[count] = min(limit.at_once, enforced.get(count, limit.at_once))
        needs = [*sorted(enforced), *sorted(counted - enforced.keys())]
        return [(count[1], enforced.get(count)) for count in needs]

    def _met(self, count: str, slot: Slot) -> None:
        """Note what it has found in a count of this process, and which limits refuse it."""
        self._running = {**self._running, count: slot.found}
        for name, limit in self.limits.items():
            if stored_as(limit) != count:
                continue
            if not limit.enforce and slot.found >= (limit.at_once or 0):
                self._refused.append(name)
            if limit.enforce and slot.waits and limit.at_once == slot.most:
                self._waits, self.waited_for = True, name
                self._refused += [] if slot.taken else [name]

    def decision(self, outage: OnStoreError) -> Decision:
        """What is decided about the call, also while the store cannot be asked."""
        refused = self._refused
        if self.unchecked:
            refused = [*self.limits] if outage == "deny" else []
        outcome = Outcome.ALLOWED
        if refused:
            enforced = any(self.limits[each].enforce for each in refused)
            outcome = Outcome.BLOCKED if enforced else Outcome.WOULD_BLOCK
        statuses = (self._status(each, refused=each in refused) for each in self.limits)
        return Decision(self.call, outcome, tuple(statuses))

    def _status(self, name: str, *, refused: bool) -> LimitStatus:
        """The status of a cap at the call: how many run, with this call, and how many may."""
        limit = self.limits[name]
        running = self._running.get(stored_as(limit), 0)
        most = limit.at_once or 0
        return LimitStatus(
            limit=name,
            exit_behavior="continue",
            thread_before=0,
            thread_used=0,
            thread_limit=None,
            run_before=0,
            run_used=0,
            run_limit=None,
            reason=("store" if self.unchecked else "exhausted") if refused else None,
            scope=AT_ONCE if refused and not self.unchecked else None,
            enforced=limit.enforce,
            alert=limit.alert,
            quotas=(QuotaStatus(AT_ONCE, "", running, running + 1, most, per=AT_ONCE),),
        )

    def runs(self, form: Form, request: ToolCallRequest) -> ToolCallRequest:
        """The request for the tool; if that runs in a thread, the thread keeps the places, too."""
        _tried[id(self._runtime)] = self._runtime
        if not form or not _runs_in_thread(request.tool):
            return request
        # A cancelled run does not end the thread. The tool is a copy, with the original's `_run`.
        loop = asyncio.get_running_loop()
        tool: Any = request.tool
        tool, run = copy(tool), tool._run  # noqa: SLF001 - what all its sync forms call

        @wraps(run)
        def watched(*args: Any, **options: Any) -> Any:
            self._threads.append(None)
            try:
                if self._task_over:
                    raise asyncio.CancelledError("the run was cancelled before its tool began")
                return run(*args, **options)
            finally:
                self._threads.pop()
                if (self._task_over or loop.is_closed()) and not self._threads:
                    now(self.end(""))

        vars(tool)["_run"] = watched
        return request.override(tool=tool)

    def task_over(self) -> bool:
        """Note that the task has ended; whether the whole call has."""
        # A thread looks at this after it has added itself: so one of both sees the other.
        self._task_over = True
        return not self._threads

    async def end(self, form: Form) -> None:
        """Give back the lease and the slots."""
        try:
            if self._lease is not None:
                await self._lease.end(form)
        finally:
            for slot in self._slots:
                slot.give_back()


def _runs_in_thread(tool: Any) -> bool:
    """Whether LangChain runs a tool in a thread, in the async form."""
    own = (getattr(getattr(type(tool), each, None), "__module__", "") for each in _RUNS)
    return not getattr(tool, "coroutine", None) and all(
        each.startswith("langchain_core.") for each in own
    )
