"""One tool call that is to run, and its status under the caps on calls at once."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AIMessage

from langchain_quota.admission import AcquireResult
from langchain_quota.decision import AT_ONCE, Call, Decision, LimitStatus, Outcome, QuotaStatus
from langchain_quota.features.at_once.semaphores import Slot
from langchain_quota.limits.calls import ToolCallLimit
from langchain_quota.middleware.context import call_context, running_runtime
from langchain_quota.rule import Outage, stored_as
from langchain_quota.state import ToolBatch, ledger

_tried: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The runtimes of the calls that have run, each by its `id`, as long as they are used."""


@dataclass(slots=True)
class Turn:
    """One call that is to run, and its status under its caps."""

    call: Call
    limits: Mapping[str, ToolCallLimit]
    # The same each time the call is tried.
    runtime: object
    # What the calls of its message were charged; `None` if the tool's state has none.
    batch: ToolBatch | None
    waited_for: str
    began: float = field(default_factory=time.monotonic)
    # How many are in each count, without this call.
    running: dict[str, int] = field(default_factory=dict)
    # The limits that refuse it, or would.
    refused: list[str] = field(default_factory=list)
    # Whether the store could not be asked.
    unchecked: bool = False
    waits: bool = False

    @property
    def tried(self) -> bool:
        """Whether it has run before: then a middleware around this one tries it again."""
        return _tried.get(id(self.runtime)) is self.runtime

    def runs(self) -> None:
        """Note that it runs."""
        _tried[id(self.runtime)] = self.runtime

    @property
    def needs(self) -> list[tuple[str, int | None]]:
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

    @property
    def waited(self) -> float:
        """How long it has waited, in seconds; 0 if it did not have to."""
        return time.monotonic() - self.began if self.waits else 0.0

    @property
    def until(self) -> float:
        """When its wait ends, by `time.monotonic`: the shortest wait of its limits holds."""
        waits = [each.wait or 0 for each in self.limits.values() if each.enforce]
        return self.began + min(waits, default=0)

    def met(self, count: str, slot: Slot) -> None:
        """Note what it has found in a count of this process, and which limits refuse it."""
        self.running[count] = slot.found
        for name, limit in self.limits.items():
            if stored_as(limit) != count:
                continue
            if not limit.enforce and slot.found >= (limit.at_once or 0):
                self.refused.append(name)
            if limit.enforce and slot.waits and limit.at_once == slot.most:
                self.waits, self.waited_for = True, name
                self.refused += [] if slot.taken else [name]

    def learned(self, result: AcquireResult | None) -> None:
        """Note a store's answer; `None` if it does not answer."""
        if result is None:
            self.unchecked = True
            return
        self.running = {**result.used}
        self.refused = [*result.refused[0]]
        self.waited_for = next(
            (each for each in self.refused if self.limits[each].enforce), self.waited_for
        )

    def decision(self, outage: Outage) -> Decision:
        """What is decided about the call, also while the store cannot be asked."""
        refused: Sequence[str] = self.refused
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
        running = self.running.get(stored_as(limit), 0)
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


def turn_of(request: ToolCallRequest, capped: Sequence[ToolCallLimit]) -> Turn | None:
    """The call of a request, if limits with a cap match it."""
    made = request.tool_call
    bare = Call("tool", made["name"], made["id"])
    limits = {each.name: each for each in capped if each.matches(bare)}
    if not limits:
        return None
    state: Any = request.state if isinstance(request.state, Mapping) else {}
    history = state.get("messages") or ()
    newest = next((each for each in reversed(history) if isinstance(each, AIMessage)), None)
    name = None if newest is None else newest.name
    context = call_context(running_runtime(), model_name=name)
    call = Call("tool", bare.tool, bare.id, 1, context.agent, context.thread_id)
    waited_for = next((name for name, each in limits.items() if each.enforce), "")
    return Turn(call, limits, request.runtime, ledger(state).get("batch"), waited_for)
