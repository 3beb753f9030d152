"""The records of a checked call: the decision, its limits and counts, an answer, a refund."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, NamedTuple

from langchain_quota.limits.call import FROZEN, RUN, STORE, Call, Exit, Scope
from langchain_quota.runtime.units import Level, Unit, near_threshold

Reason = Literal["exhausted", "failing", "frozen", "store"]
"""Why a limit refuses a call: a threshold is exhausted, the tool keeps failing in the same way, the
subject is frozen, or the store is unavailable."""


class Outcome(StrEnum):
    """The decision about a call; outcomes exclude each other.

    The values are the label `decision` in metrics, and `langchain_quota.decision` in spans.

    Examples:
        >>> from langchain_quota.core.decision import Outcome
        >>> Outcome("blocked") is Outcome.BLOCKED
        True
    """

    ALLOWED = "allowed"
    """Every limit that matches the call admits it: it runs."""
    BLOCKED = "blocked"
    """A limit refuses the call: it does not run."""
    SKIPPED = "skipped"
    """No limit refuses the call, but its batch was stopped: it does not run."""
    WOULD_BLOCK = "would_block"
    """A limit with `enforce=False` would refuse the call: it runs."""


class CountStatus(NamedTuple):
    """One count of a limit at one call, in the limit's unit.

    Attributes:
        scope: `"thread"`, `"run"`, or the quota's name.
        before: The count before the call.
        used: The count after the call.
        limit: Its maximum; `None` for none. For a smooth quota, its burst.
        subject: Whose calls a quota counts; empty for all.
        resets_at: When a quota's window ends, in its zone; `None` if it lasts until it is reset.
            For a smooth quota: when the next call fits.
        per: What a quota counts by: `"thread"`, `"agent"`, `"global"`, `"root_run"`, or a name in
            `runtime.context`. If `per` is a function, the quota's name. Empty if it is no quota.
        smooth: Whether the count drains at an even rate.
        spacing: For a smooth quota, how many microseconds its rate has from one call, or token, to
            the next.
        granted: What grants and rollover have added to its maximum.
        window: For a smooth quota, its window in seconds: the time in which its limit drains.

    Examples:
        >>> from langchain_quota.core.decision import CountStatus
        >>> CountStatus("user_id", before=4, used=5, limit=5, subject="ada").share
        1.0
    """

    scope: Scope
    before: int
    used: int
    limit: int | None
    subject: str = ""
    resets_at: datetime | None = None
    per: str = ""
    smooth: bool = False
    spacing: float = 0
    granted: int = 0
    window: int = 0

    @property
    def share(self) -> float:
        """Used share, from 0; a limit of 0 counts as fully used."""
        return self.used / self.limit if self.limit else float(self.limit is not None)

    def crossed(self, near: float) -> Level | None:
        """Return the level that the count has newly reached with this call, or `None`."""
        if self.limit is None or self.smooth:  # the count of a smooth quota rises and falls
            return None
        if self.before < self.limit <= self.used:
            return Level.EXHAUSTED
        return Level.NEAR if self.before < near_threshold(self.limit, near) <= self.used else None


class LimitStatus(NamedTuple):
    """One limit at one call: its counts before the call and after it.

    Attributes:
        limit: The limit's name.
        exit_behavior: What a refusal by the limit does.
        counts: Its counts: the thread's, the run's, and those of its quotas.
        reason: Why it refuses the call: a threshold is `"exhausted"`, the tool is `"failing"` in
            the same way again and again, the subject is `"frozen"`, or the shared `"store"` is
            unavailable; `None` if it admits the call.
        scope: The scope that is exhausted or frozen; `None` for none. If several are exhausted,
            the first.
        charged: Whether the call is charged to this limit by this decision.
        deferred: Whether the call runs now and is counted when it has returned, as model calls are
            in budgets.
        enforced: Whether its refusals block calls. In a dry run a call that it refuses runs and is
            counted.
        near: The limit's own near share; `None` for that of the telemetry.
        alert: Whether its refusals are worth an alert.
        computed: The scopes whose limit was computed for this call.
        shared: Whether a store keeps one of the counts.
        unit: What is counted: `"calls"`, `"tokens"`, `"nanodollars"` or `"milliseconds"`.
        needs: How much of a budget the call may need, if the budget refuses it; else 0.

    Examples:
        >>> from langchain_quota.core.decision import CountStatus, LimitStatus
        >>> counts = CountStatus("thread", 11, 12, 20), CountStatus("run", 2, 3, 3)
        >>> third = LimitStatus("tool:search", "continue", counts)
        >>> third.scopes, third.count_of("thread").limit, third.share
        (('thread', 'run'), 20, 1.0)
    """

    limit: str
    exit_behavior: Exit
    counts: tuple[CountStatus, ...]
    reason: Reason | None = None
    scope: Scope | None = None
    charged: bool = False
    deferred: bool = False
    enforced: bool = True
    near: float | None = None
    alert: bool = True
    computed: tuple[Scope, ...] = ()
    shared: bool = False
    unit: Unit = "calls"
    needs: int = 0

    @property
    def cost(self) -> int:
        """Charge of the call to a limit in dollars, in nanodollars; else 0."""
        if self.unit != "nanodollars":
            return 0
        run = self.count_of(RUN)
        return run.used - run.before if run else 0

    @property
    def refused(self) -> bool:
        """Whether the limit refuses the call."""
        return self.reason is not None

    @property
    def refusal_scope(self) -> str | None:
        """Scope of a refusal, as in metrics and spans; `None` if it admits the call.

        It is the exhausted scope, `"frozen"`, or `"store"` if the store is unavailable.
        """
        return self.reason if self.reason in (FROZEN, STORE) else self.scope

    def count_of(self, scope: Scope | None) -> CountStatus | None:
        """Return the count of a scope, a quota's before the thread's own; `None` without one."""
        return next((count for count in reversed(self.counts) if count.scope == scope), None)

    @property
    def quotas(self) -> tuple[CountStatus, ...]:
        """Counts of quotas."""
        return tuple(count for count in self.counts if count.per)

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Scopes that have a limit: thread, run, and the quotas."""
        return tuple(count.scope for count in self.counts if count.limit is not None)

    @property
    def share(self) -> float:
        """Largest used share of a limit, from 0; a limit of 0 counts as fully used."""
        return max((count.share for count in self.counts), default=0.0)

    @property
    def resets_at(self) -> datetime | None:
        """End of the last window of all exhausted quotas; `None` if one has no end."""
        first = self.count_of(self.scope)
        if first is None or not first.per or self.reason == "frozen":
            return None
        exhausted = [
            quota
            for quota in self.quotas
            if quota is first or (quota.limit is not None and quota.before >= quota.limit)
        ]
        ends = [quota.resets_at for quota in exhausted if quota.resets_at is not None]
        return max(ends) if len(ends) == len(exhausted) else None

    def threshold_events(self, near: float) -> list[tuple[Scope, Level]]:
        """Return the scopes whose count has reached a new level with this call.

        Args:
            near: The share, above 0 and at most 1, from which a limit without a share of its own
                is near.
        """
        if not (self.charged and self.enforced):
            return []
        near = near if self.near is None else self.near
        return [(count.scope, level) for count in self.counts if (level := count.crossed(near))]


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's answer to the question whether a run may go on at a limit.

    Attributes:
        type: `"approve"` grants what was offered, or another amount; `"reject"` ends the run.
        granted: How much more is granted, by the name of the limit, in the limit's unit.
        by: Who has answered, if the answer or LangGraph's authentication names them; else empty.
        message: Their message; a rejected run ends with it.

    Examples:
        >>> from langchain_quota import Decision
        >>> from langchain_quota.core.decision import Answer
        >>> def audit(decision: Decision) -> None:
        ...     if decision.answer is not None:
        ...         print(decision.answer.by, decision.answer.type, decision.answer.granted)
    """

    type: Literal["approve", "reject"]
    granted: Mapping[str, int] = field(default_factory=dict, hash=False)
    by: str = ""
    message: str = ""


class Decision(NamedTuple):
    """The decision about one call, and the limits that made it.

    It is made of the verdict that enforcement and telemetry read.

    Attributes:
        call: The call.
        outcome: Whether the call runs.
        limits: One status for each limit that matches the call, in the order of the limits.
        answer: The answer of a person before the decision, if one was asked.
        waited: How long the call waited for room in a quota before, in seconds.
        downgraded_by: The limit that sends a model call to its `downgrade_to`; empty if none does.

    Examples:
        >>> from langchain_quota import Decision, ModelCallLimit, QuotaMiddleware
        >>> from langchain_quota.core.decision import Outcome
        >>> def audit(decision: Decision) -> None:
        ...     if decision.outcome is Outcome.BLOCKED:
        ...         limits = [status.limit for status in decision.refused_by]
        ...         print(f"{decision.call.kind} call refused by {limits}")
        >>> quota = QuotaMiddleware([ModelCallLimit(run_limit=0)], on_decision=audit)

        >>> from langchain.agents import create_agent
        >>> from langchain_quota.testing import ScriptedChatModel
        >>> agent = create_agent(ScriptedChatModel(script=[]), middleware=[quota])
        >>> result = agent.invoke({"messages": [("user", "Hi!")]})
        model call refused by ['model']
    """

    call: Call
    outcome: Outcome
    limits: tuple[LimitStatus, ...] = ()
    answer: Answer | None = None
    waited: float = 0.0
    downgraded_by: str = ""

    @property
    def refused_by(self) -> tuple[LimitStatus, ...]:
        """Limits that refuse the call, enforced ones first."""
        refusing = (status for status in self.limits if status.refused)
        return tuple(sorted(refusing, key=lambda status: not status.enforced))

    @property
    def resets_at(self) -> datetime | None:
        """Time when a blocked call could be allowed; `None` if no window's end helps."""
        resets = [status.resets_at for status in self.refused_by if status.enforced]
        times = [time for time in resets if time is not None]
        return max(times) if times and len(times) == len(resets) else None

    @property
    def leading(self) -> LimitStatus | None:
        """Limit to show: the first that refuses, else the one with the highest used share."""
        if len(self.limits) == 1:
            return self.limits[0]
        if refused_by := self.refused_by:
            return refused_by[0]
        return max(self.limits, key=lambda status: status.share, default=None)


class Refund(NamedTuple):
    """A refunded charge: the limit admitted the call, which then did not run."""

    call: Call
    limit: str
    nanodollars: int = 0
