"""The events that sinks receive: verdicts about calls, with what their signals share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from opentelemetry.util.types import AttributeValue

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Decision, LimitStatus
from langchain_quota.limits.call import Scope
from langchain_quota.runtime.units import Level, Unit

Exemplar = dict[str, str] | None

LimitSpend = tuple[str, Unit, int]
"""The name of a limit, its unit, and how much a run of a model or an agent has used, from 0."""

Notice = tuple[Verdict, LimitStatus, Scope, Level | None]
"""A verdict, a limit, a scope, and the level that a call has reached there; `None` if it was
refused."""


class CallerLabels(NamedTuple):
    """The labels of the agent and, if there is one, the thread that make a call."""

    agent: str
    """The agent's label in metrics, where the number of names is bounded."""
    name: str
    """The agent's name in logs and spans, where the number has no bound."""
    thread: str | None


@dataclass(slots=True)
class DecisionEvent:
    """Verdicts about calls of one agent and thread."""

    verdicts: Sequence[Verdict]
    caller: CallerLabels
    tools: Sequence[str] = ()
    """The labels of the calls' tools."""
    started: int = 0
    """When the check began, in nanoseconds since the Unix epoch."""
    duration: int = 0
    """How long the check took, in nanoseconds."""
    error: BaseException | None = None
    """The exception that the verdicts raise into the agent."""
    model: Callable[[], str | None] | None = None
    """Returns the name of the model that a model call is to reach, if that is known."""
    charged_calls: int = 0
    """The number of calls that a charge counts, if this event is a charge and no check."""
    exemplars: dict[int, Exemplar] = field(default_factory=dict)
    """The exemplars of the calls, by their indexes; none if tracing fails."""
    subjects: dict[tuple[str, Scope], str] = field(default_factory=dict)
    """The labels of subjects, by the name of the limit and the quota's name."""
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    """What its spans say in place of what the verdicts say."""
    notices: list[Notice] = field(default_factory=list)
    """The refusals and crossed thresholds, which are logged."""


captures: ContextVar[tuple[list[Decision], ...]] = ContextVar("captures", default=())
"""The lists that get every decision of a context."""


@contextmanager
def capturing(decisions: list[Decision]) -> Iterator[None]:
    """Append every decision made in this context, and in tasks started from it, to the list."""
    token = captures.set((*captures.get(), decisions))
    try:
        yield
    finally:
        captures.reset(token)
