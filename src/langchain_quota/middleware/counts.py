"""The counts of tool calls, and what is charged to each call."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any
from uuid import uuid4

from langchain_quota.middleware.history import not_run
from langchain_quota.state import Amounts, Charge, Ledger, run_tools, thread_tools


class ToolCounts:
    """The counts of tool calls as one hook reads and rewrites them."""

    def __init__(
        self,
        thread: dict[str, int],
        run: dict[str, int],
        calls: dict[str, Charge],
        owed: dict[str, Amounts],
    ) -> None:
        self.thread = thread
        self.run = run
        self.calls = calls
        self.owed = owed

    @classmethod
    def of(cls, state: Mapping[str, Any], known: Ledger, message: str | None) -> "ToolCounts":
        """The counts in a state, with what is charged to the calls of a message."""
        batch = known.get("batch")
        counts = cls(thread_tools(state), run_tools(state), {}, dict(known.get("owed") or {}))
        if batch is not None:
            # A thread that an older version has saved does not say what calls were charged.
            counts.calls = deepcopy(batch.get("calls", {}))
            if message is None or batch["message"] != message:
                # Calls that were let through and then did not run are uncounted.
                left = not_run(state.get("messages") or (), batch["message"])
                for call_id, returned in left.items():
                    owed = owed_for(batch["message"], call_id, counts.calls.get(call_id))
                    counts.take_back(call_id)
                    if not returned:
                        counts.owed |= owed
                if message is not None:
                    counts.calls = {}
        return counts

    def used(self, counter: str, ids: Collection[str]) -> tuple[int, int]:
        """The thread's and the run's count of a counter, without the charges of these calls."""
        charges = [self.calls[each]["counters"] for each in ids if each in self.calls]
        own = sum(each.get(counter, 0) for each in charges)
        # Never below zero, even where someone else reset the counts.
        return max(0, self.thread.get(counter, 0) - own), max(0, self.run.get(counter, 0) - own)

    def of_call(self, call_id: str) -> Charge:
        """What is charged to a call."""
        return self.calls.setdefault(call_id, {"counters": {}, "limits": {}, "keys": {}})

    def charge(self, call_id: str, counter: str, amount: int) -> None:
        """Charge a call to a counter, which counts it once, however many limits it has."""
        counters = self.of_call(call_id)["counters"]
        before = counters.get(counter, 0)
        counters[counter] = max(before, amount)
        self._add(counter, counters[counter] - before)

    def take_back(self, call_id: str) -> list[tuple[str, int]]:
        """Take all charges of a call back; each limit's name and amount."""
        charge = self.calls.pop(call_id, None)
        if charge is None:
            return []
        for counter, amount in charge["counters"].items():
            self._add(counter, -amount)
        return [one for by_limit in charge["limits"].values() for one in by_limit.items()]

    def refund_later(self, call_id: str) -> None:
        """Have a store take back, with the next request, what it charged for a call."""
        keys = self.calls[call_id]["keys"] if call_id in self.calls else {}
        if keys:
            self.owed[uuid4().hex] = keys

    def forget_keys(self, call_id: str, keys: Collection[str]) -> Amounts:
        """Forget, and return, what a store charged for a call under keys: it charges it anew."""
        charged = self.calls[call_id]["keys"] if call_id in self.calls else {}
        return {key: charged.pop(key) for key in sorted(charged.keys() & set(keys))}

    def _add(self, counter: str, amount: int) -> None:
        self.thread[counter] = max(0, self.thread.get(counter, 0) + amount)
        self.run[counter] = max(0, self.run.get(counter, 0) + amount)


def owed_for(message: str, call_id: str, charge: Charge | None) -> dict[str, Amounts]:
    """What a store charged for a call, by the name of the refund, which it makes once."""
    if charge is None or not charge["keys"]:
        return {}
    return {f"{message or uuid4().hex}/{call_id}": charge["keys"]}
