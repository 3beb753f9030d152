"""The counts of tool calls, as one hook reads and rewrites them."""

from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any
from uuid import uuid4

from langchain_quota.middleware._history import not_run
from langchain_quota.state import (
    RUN_TOOLS,
    THREAD_TOOLS,
    Acquired,
    Amounts,
    Batch,
    Charges,
    ledger,
)


def charged_for(batch: Batch, call_id: str) -> dict[str, Amounts]:
    """What a store has charged for a call of a batch, by the name of the refund."""
    # A name is the same whenever the refund is made: a store takes it back once.
    message = batch["message"] or uuid4().hex
    acquired = batch.get("acquired", {}).get(call_id, {})
    return {f"{message}/{call_id}/{each}": amounts for each, amounts in acquired.items()}


class ToolCounts:
    """The counts of tool calls as one hook reads and rewrites them."""

    def __init__(
        self,
        thread: dict[str, int],
        run: dict[str, int],
        charges: Charges,
        acquired: Acquired | None = None,
        pending_refunds: dict[str, Amounts] | None = None,
    ) -> None:
        self.thread = thread
        self.run = run
        self.charges = charges
        self.acquired = {} if acquired is None else acquired
        self.pending_refunds = {} if pending_refunds is None else pending_refunds
        self.passed: list[str] = []
        """The names of the middlewares that have let the batch pass."""

    @classmethod
    def of(cls, state: Mapping[str, Any], message_id: str | None) -> "ToolCounts":
        """The counts in a state, with what is charged to the calls of an AIMessage."""
        # Calls of the previous message that were let through and then did not run are uncounted.
        known = ledger(state)
        run = known.get("run_tools")
        batch: Any = known.get("batch")
        thread = dict(state.get(THREAD_TOOLS) or {})
        run = dict(run if run is not None else state.get(RUN_TOOLS) or {})
        pending_refunds = dict(known.get("pending_refunds") or {})
        if batch is None or message_id is None or batch["message"] != message_id:
            if batch is not None:
                left = not_run(state.get("messages") or (), batch["message"])
                if left:
                    before = cls(thread, run, deepcopy(batch["charges"]))
                    for call_id, returned in left.items():
                        before.take_back(call_id)
                        if not returned:
                            pending_refunds |= charged_for(batch, call_id)
            return cls(thread, run, {}, None, pending_refunds)
        counts = cls(
            thread,
            run,
            deepcopy(batch.get("charges", {})),
            deepcopy(batch.get("acquired")),
            pending_refunds,
        )
        counts.passed = batch.get("passed", [])
        return counts

    def used(self, counter: str, ids: Collection[str]) -> tuple[int, int]:
        """The thread's and the run's count of a counter, without the charges of these calls."""
        own = 0
        if self.charges:
            own = sum(self._charged(call_id, counter) for call_id in ids)
        # Never below zero, even where someone else reset the counts.
        return max(0, self.thread.get(counter, 0) - own), max(0, self.run.get(counter, 0) - own)

    def charge(self, call_id: str, counter: str, limit: tuple[str, str], amount: int) -> None:
        """Charge a call to a limit, given by middleware and name; its counter counts it once."""
        before = self._charged(call_id, counter)
        middleware, name = limit
        by_middleware = self.charges.setdefault(call_id, {}).setdefault(counter, {})
        by_middleware.setdefault(middleware, {})[name] = amount
        self._add(counter, self._charged(call_id, counter) - before)

    def take_back(self, call_id: str) -> list[tuple[str, int]]:
        """Take all charges of a call back; each limit's name and amount."""
        self.refund_later(self.acquired.pop(call_id, {}).values())
        taken: list[tuple[str, int]] = []
        for counter in self.charges.get(call_id, {}):
            self._add(counter, -self._charged(call_id, counter))
        for by_middleware in self.charges.pop(call_id, {}).values():
            for by_limit in by_middleware.values():
                taken += by_limit.items()
        return taken

    def refund_later(self, charged: Iterable[Amounts]) -> None:
        """Have a store take back what it charged, with the next request."""
        self.pending_refunds |= {uuid4().hex: amounts for amounts in charged}

    def renew(self, call_id: str, middleware: str, keys: Collection[str]) -> Amounts:
        """Forget, and return, what a store charged for a call that a middleware judges (again)."""
        # What another middleware charged stays charged, except under the keys that this one
        # charges, too: a key counts a call once.
        by_middleware = self.acquired.get(call_id, {})
        amounts = by_middleware.pop(middleware, {})
        for others in by_middleware.values():
            for key in others.keys() & keys:
                amounts[key] = amounts.get(key, 0) + others.pop(key)
        return amounts

    def _charged(self, call_id: str, counter: str) -> int:
        by_middleware = self.charges.get(call_id, {}).get(counter)
        if not by_middleware:
            return 0
        amounts = (each for by_limit in by_middleware.values() for each in by_limit.values())
        return max(amounts, default=0)

    def _add(self, counter: str, amount: int) -> None:
        self.thread[counter] = max(0, self.thread.get(counter, 0) + amount)
        self.run[counter] = max(0, self.run.get(counter, 0) + amount)
