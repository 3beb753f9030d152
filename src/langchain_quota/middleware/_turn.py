"""One tool call that is to run, and its status under the caps on calls at once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from langchain.agents.middleware.types import ToolCallRequest
from langchain_core.messages import AIMessage

from langchain_quota.admission import AcquireResult
from langchain_quota.decision import (
    AT_ONCE,
    Call,
    Decision,
    LimitStatus,
    Outcome,
    QuotaStatus,
    Reason,
)
from langchain_quota.limits import ToolCallLimit
from langchain_quota.middleware._context import call_context, running_runtime
from langchain_quota.middleware._slots import Slot
from langchain_quota.resolved import Outage, stored_as
from langchain_quota.state import Batch, ledger

_tried: WeakValueDictionary[int, object] = WeakValueDictionary()
"""The runtimes of the calls that have run, each by its `id`, as long as they are used."""


@dataclass(slots=True)
class Turn:
    """One call that is to run, and its status under its caps.

    Attributes:
        call: The call.
        limits: The limits that match it, each with its count.
        trace: The first span of the run, where none was active.
        runtime: The tool's runtime; the same each time the call is tried.
        batch: What the calls of its message were charged; `None` if the tool's state has none.
        running: How many are in each count, without this call.
        refused: The limits that refuse it, or would.
        unchecked: Whether the store could not be asked.
        waits: Whether it could not run when it came.
        waited_for: The limit because of which it waits, if it does.
    """

    call: Call
    limits: Mapping[str, ToolCallLimit]
    trace: Mapping[str, str] | None
    runtime: object
    batch: Batch | None
    began: float = field(default_factory=time.monotonic)
    running: Mapping[str, int] = field(default_factory=dict)
    refused: Sequence[str] = ()
    unchecked: bool = False
    waits: bool = False
    waited_for: str = ""

    @property
    def tried(self) -> bool:
        """Whether it has run before: then a middleware around this one tries it again."""
        return _tried.get(id(self.runtime)) is self.runtime

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Note that it has run, when the block ends."""
        try:
            yield
        finally:
            _tried[id(self.runtime)] = self.runtime

    @property
    def counts(self) -> tuple[str, ...]:
        """The counts that it is in while it runs."""
        return tuple({stored_as(limit): None for limit in self.limits.values()})

    @property
    def caps(self) -> dict[str, int]:
        """How many may be in a count, by the limits that are enforced."""
        caps: dict[str, int] = {}
        for limit in self.limits.values():
            if limit.enforce and limit.at_once is not None:
                count = stored_as(limit)
                caps[count] = min(limit.at_once, caps.get(count, limit.at_once))
        return caps

    @property
    def waited(self) -> float:
        """How long it has waited, in seconds; 0 if it did not have to."""
        return time.monotonic() - self.began if self.waits else 0.0

    @property
    def until(self) -> float:
        """When its wait ends, by `time.monotonic`: the shortest wait of its limits holds."""
        waits = [each.wait or 0 for each in self.limits.values() if each.enforce]
        return self.began + min(waits, default=0)

    def met(self, slot: Slot) -> None:
        """Note the counts in this process: which limits would refuse it at once, and which do."""
        self.running, self.waits = slot.found, slot.waits
        full = [
            name
            for name, limit in self.limits.items()
            if slot.found[stored_as(limit)] >= (limit.at_once or 0)
        ]
        enforced = [name for name, limit in self.limits.items() if limit.enforce]
        # A call that finds room and waits nevertheless is queued after others.
        found = [*(each for each in full if each in enforced), *enforced]
        self.waited_for = found[0] if found else ""
        self.refused = [each for each in full if each not in enforced]
        if not slot.taken:
            self.refused = [self.waited_for, *self.refused]

    def learned(self, result: AcquireResult | None) -> None:
        """Note a store's answer; `None` if it does not answer."""
        if result is None:
            self.unchecked = True
            return
        self.running = result.used
        self.refused = [*result.refused[0]]
        self.waited_for = next(
            (each for each in self.refused if self.limits[each].enforce), self.waited_for
        )

    def decision(self, outage: Outage) -> Decision:
        """What is decided about the call.

        Args:
            outage: What happens to calls when the store cannot be asked.
        """
        refused = self.refused
        if self.unchecked:
            refused = [*self.limits] if outage == "deny" else []
        reason: Reason = "store" if self.unchecked else "exhausted"
        outcome = Outcome.ALLOWED
        if refused:
            enforced = any(self.limits[each].enforce for each in refused)
            outcome = Outcome.BLOCKED if enforced else Outcome.WOULD_BLOCK
        statuses = (self._status(each, reason if each in refused else None) for each in self.limits)
        return Decision(self.call, outcome, tuple(statuses))

    def _status(self, name: str, reason: Reason | None) -> LimitStatus:
        """The status of a cap at the call: how many run, with this call, and how many may.

        Args:
            name: The limit's name.
            reason: Why it refuses the call; `None` if it does not.
        """
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
            reason=reason,
            scope=AT_ONCE if reason == "exhausted" else None,
            enforced=limit.enforce,
            alert=limit.alert,
            quotas=(QuotaStatus(AT_ONCE, "", running, running + 1, most, per=AT_ONCE),),
        )


def turn_of(request: ToolCallRequest, capped: Sequence[ToolCallLimit]) -> Turn | None:
    """The call of a request, if limits match it.

    Args:
        request: The request.
        capped: The limits with a cap.
    """
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
    known = ledger(state)
    return Turn(call, limits, known.get("trace"), request.runtime, known.get("batch"))
