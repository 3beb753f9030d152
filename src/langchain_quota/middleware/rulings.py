"""What a hook decided, and what becomes of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from langchain_quota.decision import Decision, Refund
from langchain_quota.state import LEDGER

Update = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a hook decided, and what becomes of it.

    Attributes:
        decisions: The decisions, in the order of the calls.
        started: When judging began, in nanoseconds since the Unix epoch.
        task_id: The hook's task, if it runs in a graph.
        update: What is written to the state; `None` for nothing.
        refunds: Charges of other limiters that were taken back.
        error: Raised instead of writing the update.
        trace: The first span of the run, where none was active.
    """

    decisions: tuple[Decision, ...]
    started: int
    task_id: str | None
    update: Update | None = None
    refunds: tuple[Refund, ...] = ()
    error: Exception | None = None
    trace: Mapping[str, str] | None = None

    def traced(self, trace: Mapping[str, str] | None) -> "Ruling":
        """The same ruling, writing down the trace that later steps of the run belong to."""
        if trace is None or trace == self.trace:
            return self
        update = self.update or {}
        written = {**update, LEDGER: {**update.get(LEDGER, {}), "trace": dict(trace)}}
        return replace(self, update=written, trace=trace)
