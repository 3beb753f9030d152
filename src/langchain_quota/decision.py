"""The frozen record of one judged call, with the limits that judged it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, NamedTuple

from langchain_quota.units import Level, Unit, near_threshold

Kind = Literal["model", "tool"]

Scope = str
"""What a count is kept for: `"thread"`, `"run"`, or the name of a quota."""

THREAD: Scope = "thread"
RUN: Scope = "run"

ROOT_RUN: Scope = "root_run"
"""A run that no other run encloses, with everything that it starts."""

STORE: Scope = "store"
"""In place of a scope, if a limit refuses because the store could not be asked."""

AT_ONCE: Scope = "at_once"
"""The scope of calls that run at the same time. Their count includes the refused call."""

Exit = Literal["continue", "error", "end", "finalize", "ask"]

Reason = Literal["exhausted", "failing", "store"]
"""Why a limit refuses a call: a threshold is exhausted, the tool keeps failing in the same way, or
the store could not be asked."""


class Outcome(StrEnum):
    """What was decided about a call; outcomes exclude each other.

    The values are the label `decision` in metrics, and `langchain_quota.decision` in spans.

    Examples:
        >>> from langchain_quota.decision import Outcome
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


class Call(NamedTuple):
    """A call that is to be judged.

    Attributes:
        kind: `"model"` or `"tool"`.
        tool: The tool's name as the model gave it; `None` for a model call.
        id: The tool call's id; `None` for a model call.
        amount: What the call costs, in calls; a whole number from 1.
        agent: The name of the agent that makes the call, if it has one.
        thread_id: The thread's id as the caller gave it. `None` if there is no thread. Also `None`
            if the agent runs inside another one, and what it uses cannot be separated from what the
            other uses.

    Examples:
        >>> from langchain_quota import ToolCallLimit
        >>> from langchain_quota.decision import Call
        >>> call = Call("tool", "search", id="call_1", agent="researcher", thread_id="7")
        >>> ToolCallLimit("search", run_limit=3).matches(call)
        True
    """

    kind: Kind
    tool: str | None = None
    id: str | None = None
    amount: int = 1
    agent: str | None = None
    thread_id: object = None


class QuotaStatus(NamedTuple):
    """A quota at one call: its count before the call and after it.

    Attributes:
        scope: The quota's name.
        subject: Whose calls are counted; empty for all.
        before: The count before the call, in the limit's unit.
        used: The count after the call.
        limit: The quota's number.
        resets_at: When its window ends, in its zone; `None` if it lasts until it is reset. If it
            is smooth: when the next call fits.
        per: What the quota counts by: `"thread"`, `"agent"`, `"global"`, or a name in
            `runtime.context`. If `per` is a function, the quota's name.
        smooth: Whether its count falls evenly; then `limit` is the quota's burst.

    Examples:
        >>> from langchain_quota.decision import QuotaStatus
        >>> use = QuotaStatus("user_id", "ada", before=4, used=5, limit=5)
        >>> use.limit - use.used
        0
    """

    scope: Scope
    subject: str
    before: int
    used: int
    limit: int
    resets_at: datetime | None = None
    per: str = ""
    smooth: bool = False


class LimitStatus(NamedTuple):
    """One limit at one call: its counts before the call and after it.

    All counts and numbers are in `unit`. A scope is `"thread"`, `"run"`, or a quota's name.

    Attributes:
        limit: The limit's name.
        exit_behavior: What a refusal by it does.
        reason: Why it refuses the call: a threshold is `"exhausted"`, the tool is `"failing"` in
            the same way again and again, or the shared `"store"` could not be asked; `None` if it
            admits the call.
        scope: The threshold that is exhausted; `None` for none. If there are several, the thread's
            comes before the run's, and the run's before those of quotas.
        charged: Whether the call is charged to this limit by this decision.
        deferred: Whether the call runs now and is counted when it has returned, as every call is
            in budgets of tokens and money.
        enforced: Whether its refusals hold; if not, a call that it refuses runs and is counted.
        near: The limit's own near share; `None` for that of the telemetry.
        alert: Whether its refusals are worth an alert.
        computed: The scopes whose limit was computed for this call, or raised by a grant.
        thread_before: The thread's count before the call.
        thread_used: The thread's count after the call.
        thread_limit: The thread's limit; `None` for none.
        run_before: The run's count before the call.
        run_used: The run's count after the call.
        run_limit: The run's limit; `None` for none.
        quotas: The same for each of the limit's quotas.
        shared: Whether a store keeps one of the counts.
        unit: What is counted: `"calls"`, `"tokens"`, `"nanodollars"` or `"milliseconds"`.
        needs: How much of a budget the call may need, if the budget refuses it; else 0.

    Examples:
        >>> from langchain_quota.decision import LimitStatus
        >>> third = LimitStatus("tool:search", "continue", 11, 12, 20, 2, 3, 3)
        >>> third.scopes, third.threshold("thread"), third.used("thread"), third.share
        (('thread', 'run'), 20, 12, 1.0)
    """

    limit: str
    exit_behavior: Exit
    thread_before: int
    thread_used: int
    thread_limit: int | None
    run_before: int
    run_used: int
    run_limit: int | None
    reason: Reason | None = None
    scope: Scope | None = None
    charged: bool = False
    deferred: bool = False
    enforced: bool = True
    near: float | None = None
    alert: bool = True
    computed: tuple[Scope, ...] = ()
    quotas: tuple[QuotaStatus, ...] = ()
    shared: bool = False
    unit: Unit = "calls"
    needs: int = 0

    @property
    def cost(self) -> int:
        """What the call is charged of a limit of dollars, in nanodollars; else 0."""
        return self.run_used - self.run_before if self.unit == "nanodollars" else 0

    @property
    def refused(self) -> bool:
        """Whether the limit refuses the call."""
        return self.reason is not None

    @property
    def refusal_scope(self) -> str | None:
        """The scope of a refusal, as in metrics and spans; `None` if it admits the call.

        It is the exhausted scope, or `"store"` if the store could not be asked.
        """
        return STORE if self.reason == "store" else self.scope

    def threshold(self, scope: Scope) -> int | None:
        """The limit of a scope; `None` for none."""
        return self._counts(scope)[2]

    def used(self, scope: Scope) -> int:
        """The count of a scope after the call; 0 for a scope that the limit does not have."""
        return self._counts(scope)[1]

    def before(self, scope: Scope) -> int:
        """The count of a scope before the call; 0 for a scope that the limit does not have."""
        return self._counts(scope)[0]

    def quota(self, scope: Scope | None) -> QuotaStatus | None:
        """The quota of a scope; `None` without one."""
        return next((each for each in self.quotas if each.scope == scope), None)

    def _counts(self, scope: Scope) -> tuple[int, int, int | None]:
        """A scope's count before the call, its count after it, and its limit."""
        if scope == RUN:
            return self.run_before, self.run_used, self.run_limit
        quota = self.quota(scope)
        if quota is not None:
            return quota.before, quota.used, quota.limit
        if scope == THREAD:
            return self.thread_before, self.thread_used, self.thread_limit
        return 0, 0, None

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that have a limit: thread, run, and the quotas."""
        numbers = ((THREAD, self.thread_limit), (RUN, self.run_limit))
        limited = [scope for scope, limit in numbers if limit is not None]
        return (*limited, *(quota.scope for quota in self.quotas))

    @property
    def share(self) -> float:
        """The largest used share of a limit, from 0; a limit of 0 counts as fully used."""
        shares = (
            self.used(scope) / limit if (limit := self.threshold(scope)) else 1.0
            for scope in self.scopes
        )
        return max(shares, default=0.0)

    @property
    def resets_at(self) -> datetime | None:
        """When the windows of all exhausted quotas have ended; `None` if one has no end."""
        first = self.quota(self.scope)
        if first is None:
            return None
        exhausted = [each for each in self.quotas if each is first or each.before >= each.limit]
        ends = [each.resets_at for each in exhausted if each.resets_at is not None]
        return max(ends) if len(ends) == len(exhausted) else None

    @property
    def thread_count(self) -> int:
        """The thread's count as it is kept after the decision."""
        return self.thread_before if self.deferred else self.thread_used

    def crossed(self, scope: Scope, near: float) -> Level | None:
        """The level that the count has newly reached with this call; `None` if it has not.

        Args:
            scope: The scope.
            near: The share, above 0 and at most 1, from which a limit without a share of its own
                is near.
        """
        return dict(self.threshold_events(near)).get(scope)

    def threshold_events(self, near: float) -> list[tuple[Scope, Level]]:
        """The scopes whose count has reached a new level with this call; `near` as in `crossed`."""
        if not (self.charged and self.enforced):
            return []
        near = near if self.near is None else self.near
        found = []
        numbers: list[tuple[Scope, int, int, int | None]] = [
            (THREAD, self.thread_before, self.thread_used, self.thread_limit),
            (RUN, self.run_before, self.run_used, self.run_limit),
            # The count of a smooth quota comes and goes with each call.
            *(
                (each.scope, each.before, each.used, each.limit)
                for each in self.quotas
                if not each.smooth
            ),
        ]
        for scope, before, used, limit in numbers:
            if limit is None:
                continue
            if before < limit <= used:
                found.append((scope, Level.EXHAUSTED))
            elif before < near_threshold(limit, near) <= used:
                found.append((scope, Level.NEAR))
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's answer to the question whether a run may go on at a limit.

    Attributes:
        type: `"approve"` grants what was offered, or another amount; `"reject"` ends the run.
        granted: How much more is granted, by the name of the limit, in the limit's unit.
        by: Who has answered, if the answer or LangGraph's authentication says it; else empty.
        message: What they say about it; a rejected run ends with it.

    Examples:
        >>> from langchain_quota import Decision
        >>> from langchain_quota.decision import Answer
        >>> def audit(decision: Decision) -> None:
        ...     if decision.answer is not None:
        ...         print(decision.answer.by, decision.answer.type, decision.answer.granted)
    """

    type: Literal["approve", "reject"]
    granted: Mapping[str, int] = field(default_factory=dict, hash=False)
    by: str = ""
    message: str = ""


class Decision(NamedTuple):
    """What was decided about one call, and by which limits.

    Enforcement and telemetry read the same decision.

    Attributes:
        call: The call.
        outcome: What was decided.
        limits: One status for each limit that matches the call, in the order of the limits.
        answer: What a person answered before the decision, if one was asked.
        waited: How long the call waited for room in a quota before, in seconds.
        downgraded_by: The limit that has a model call go to its `downgrade_to`; empty if none does.

    Examples:
        >>> from langchain_quota import Decision, ModelCallLimit, QuotaMiddleware
        >>> from langchain_quota.decision import Outcome
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
        """The limits that refuse the call. Those that are enforced come first."""
        refusing = (status for status in self.limits if status.refused)
        return tuple(sorted(refusing, key=lambda status: not status.enforced))

    @property
    def resets_at(self) -> datetime | None:
        """When a refused call could be admitted; `None` if no window's end helps."""
        resets = [each.resets_at for each in self.refused_by if each.enforced]
        times = [each for each in resets if each is not None]
        return max(times) if times and len(times) == len(resets) else None

    @property
    def leading(self) -> LimitStatus | None:
        """The limit to show: the first that refuses, else the one with the highest used share."""
        if len(self.limits) == 1:
            return self.limits[0]
        if refused_by := self.refused_by:
            return refused_by[0]
        return max(self.limits, key=lambda status: status.share, default=None)


class Refund(NamedTuple):
    """A charge taken back: the call was admitted by this limit, and then did not run."""

    call: Call
    limit: str
    nanodollars: int = 0
