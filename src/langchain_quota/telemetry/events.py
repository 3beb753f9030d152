"""What sinks are told: decisions about calls, with what their signals share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.limits.call import Scope
from langchain_quota.runtime.units import Level, Unit

Exemplar = dict[str, str] | None

Spent = tuple[str, Unit, int]
"""The name of a limit, its unit, and how much a model run has spent of it, from 0."""

Granted = tuple[str, Scope, Unit, int]
"""The name of a limit, the scope of its threshold, its unit, and how much was added to it."""

Notice = tuple[LimitStatus, Scope, Level | None]
"""A limit, and the level that a call has reached there; `None` if the call is refused."""


class CallerLabels(NamedTuple):
    """The labels of the agent and, if there is one, the thread that make a call."""

    agent: str
    """In metrics, where the number of names is bounded."""
    name: str
    """In logs and spans, where it has no bound."""
    thread: str | None


@dataclass(slots=True)
class DecisionEvent:
    """Decisions about calls of one agent and thread."""

    decisions: Sequence[Decision]
    who: CallerLabels
    tools: Sequence[str] = ()
    """The labels of the calls' tools."""
    started: int = 0
    """When judging began, in nanoseconds since the Unix epoch."""
    took: int = 0
    """How long it took, in nanoseconds."""
    error: BaseException | None = None
    """What the decisions raise into the agent."""
    charged: int = 0
    """The calls that a charge counts, if this is no decision."""
    exemplars: list[Exemplar] = field(init=False)
    """Those of the calls."""
    subjects: dict[tuple[str, Scope], str] = field(default_factory=dict)
    """The labels of subjects, by the name of the limit and the quota's name."""
    notices: list[Notice] = field(default_factory=list)
    """What is worth a line in the log."""

    def __post_init__(self) -> None:
        # If tracing fails, there are none.
        self.exemplars = [None] * len(self.decisions)

    def notice(self, near: float) -> None:
        """Find refusals, and the thresholds that charges have crossed."""
        for decision in self.decisions:
            for status in decision.limits:
                if status.reason is not None and status.refusal_scope is not None:
                    self.notices.append((status, status.refusal_scope, None))
                elif status.charged:
                    self.notices += [(status, *each) for each in status.threshold_events(near)]
