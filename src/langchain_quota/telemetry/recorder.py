"""The one face to which middlewares report: it gives what they report to the sinks.

The sinks are metrics, spans, the usage of threads and other subjects, and logs. All are called by
`Instruments.tell`, which guards them: no failure in here reaches the agent.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Self

from prometheus_client import Counter

from langchain_quota.arguments import UserLine
from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import Answer, Call, Decision, LimitStatus, Outcome, Refund, Scope
from langchain_quota.errors import QuotaWarning
from langchain_quota.limits import Limit, named_tools
from langchain_quota.telemetry import logs
from langchain_quota.telemetry.instruments import Instruments
from langchain_quota.telemetry.labels import UNNAMED, Who, label, limit_label, own_label
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.metrics import Series
from langchain_quota.telemetry.tracing import Judged, Tracing, exemplar
from langchain_quota.telemetry.usage_rows import Spent
from langchain_quota.units import Unit

Granted = tuple[str, Scope, Unit, int]
"""The name of a limit, the scope of its threshold, its unit, and how much was added to it."""

_JUDGE_IT = (
    "give the agent that makes it a QuotaMiddleware with the same store (deepagents: "
    "with_limits(create_deep_agent, quota); a supervisor: GraphQuota(…).model(…)). Others of "
    "this kind are only counted, in langchain_quota_unjudged_calls_total"
)

_MOST_LOGGED = 1000
"""How many kinds of unjudged calls are logged; the metric counts all."""

_captures: ContextVar[tuple[list[Decision], ...]] = ContextVar("captures", default=())


@contextmanager
def capturing(decisions: list[Decision]) -> Iterator[None]:
    """Append every decision made in this context, and in tasks started from it, to the list."""
    token = _captures.set((*_captures.get(), decisions))
    try:
        yield
    finally:
        _captures.reset(token)


class Recorded(NamedTuple):
    """The result of recording decisions."""

    is_new: bool
    trace: Mapping[str, str] | None


class _RecentTasks:
    """The newest tasks: LangGraph runs a failed task anew when the run is resumed."""

    MOST = 10_000

    def __init__(self) -> None:
        # What was last recorded for a task, and the trace that it began, if it began one.
        self._known: OrderedDict[str, tuple[object, Mapping[str, str] | None]] = OrderedDict()
        self._lock = fork_safe_lock()

    def seen(self, task_id: str | None, what: object = None) -> bool:
        """Whether the id was last given with the same `what`; it is remembered."""
        if task_id is None:
            return False
        with self._lock:
            known = self._known.get(task_id)
            if known is not None and known[0] == what:
                return True
            self._known[task_id] = what, None if known is None else known[1]
            self._known.move_to_end(task_id)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
        return False

    def begin(self, task_id: str | None, trace: Mapping[str, str]) -> None:
        """Remember the trace that a task began: if it runs again, its state does not have it."""
        with self._lock:
            if task_id is not None and task_id in self._known:
                self._known[task_id] = self._known[task_id][0], trace

    def begun(self, task_id: str | None) -> Mapping[str, str] | None:
        """The trace that a task began when it ran before."""
        with self._lock:
            return self._known.get(task_id or "", (None, None))[1]


class UnjudgedCalls:
    """Counts calls that no limit judged in runs with limits, and logs the first of a kind."""

    # They are logged and cause no `QuotaWarning`: they are found in a callback, where LangChain
    # would swallow a warning that is an error.

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._logged: set[tuple[str, str]] = set()

    def record(self, agent: str | None, kind: str, count: int) -> None:
        """Count an agent's calls of a kind, and log them if they are the first."""
        self._instruments.tell(agent, kind, count, metrics=self._count, observer=self._log)

    def _count(self, agent: str | None, kind: str, count: int) -> None:
        metrics, agents = self._instruments.metrics, self._instruments.agents
        metrics.add(metrics.unjudged, agents["", agent], kind, amount=count)

    def _log(self, agent: str | None, kind: str, _count: int) -> None:
        known = limit_label(agent) if agent else UNNAMED, kind
        if known not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(known)
            logger.warning(
                "no limit judged a %s call of agent %r, and its run has limits: %s",
                kind,
                known[0],
                _JUDGE_IT,
            )


class Recorder:
    """Gives what middlewares report to the sinks."""

    def __init__(
        self, instruments: Instruments, tracing: Tracing, *, count_unjudged_calls: bool = False
    ) -> None:
        make = instruments.settings.thread_label
        self._thread_label: Callable[[object], str] = label
        if make is not None:
            self._thread_label = partial(own_label, make, argument="thread_label")
        self.near = instruments.settings.near
        self.record_error = instruments.failed
        self._tell = instruments.tell
        self._metrics = instruments.metrics
        self._usage = instruments.usage
        self._tracing = tracing
        self._agents = instruments.agents
        self._tools = instruments.tools
        self._models = instruments.models
        self._tasks = _RecentTasks()
        # By agent and model; labels of models are bounded.
        self._warned: set[tuple[str, ...]] = set()
        self.unjudged = UnjudgedCalls(instruments) if count_unjudged_calls else None

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: all copies share its metrics."""
        return self

    def watch_limits(self, limits: Iterable[Limit]) -> None:
        """Learn the limits of a middleware: the tools that they name keep their names."""
        for limit in limits:
            self._tools.keep(named_tools(limit))

    def watch_store(self, store: object) -> bool:
        """Show how full a store is, if it has a property `occupancy`; whether it has."""
        return bool(self._tell(store, threads=self._usage.watch))

    def store_nearly_full(self, store: Any) -> bool:
        """Log that a watched store is nearly full, if it is; whether nothing is left to log."""
        return self._tell(store, threads=logs.nearly_full) is not False

    def learn_tools(self, agent: str | None, names: Iterable[str]) -> None:
        """Learn an agent's tools: they get labels before names that its model invents."""
        self._tell(metrics=lambda: [self._tools[self._agents["", agent], each] for each in names])

    def record(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        decisions: Sequence[Decision],
        *,
        started: int,
        error: BaseException | None = None,
        task_id: str | None = None,
        trace: Mapping[str, str] | None = None,
        after_refusal: bool = False,
    ) -> Recorded:
        """Make the decisions about a batch of one agent's calls visible."""
        took = time.time_ns() - started
        trace = trace or self._tasks.begun(task_id)
        outcomes = [decision.outcome for decision in decisions]
        if not decisions or self._tasks.seen(task_id, outcomes):
            return Recorded(False, trace)
        for captured in _captures.get():
            captured.extend(decisions)
        who = self._who(decisions[0].call.agent, decisions[0].call.thread_id)
        for decision in decisions:
            tool = self._tools[who.agent, decision.call.tool]
            raised = error if decision.outcome is Outcome.BLOCKED else None
            told = Judged(decision, who, tool, started, raised, after_refusal, trace)
            self._tell(told, tracing=self._tracing.judged, metrics=self._metrics.judged)
            if told.trace is not None and told.trace is not trace:
                trace = told.trace
                self._tasks.begin(task_id, trace)
            for status in decision.limits:
                self._notice(who, status)
        self._tell(who, decisions, took, threads=self._usage.record, metrics=self._metrics.batch)
        return Recorded(True, trace)

    def record_charge(
        self,
        call: Call,
        status: LimitStatus,
        *,
        is_call: bool = True,
        task_id: str | None = None,
    ) -> None:
        """Make visible that a call which was let through before is charged to a limit now."""
        if self._tasks.seen(task_id):
            return
        who = self._who(call.agent, call.thread_id)
        # A limit on trial counts a call when it judges it: it may let it run and would refuse it.
        counted = call.amount if is_call and status.enforced else 0
        shown = self._tell(None, tracing=exemplar)
        self._tell(who, status, counted, shown, metrics=self._metrics.charged)
        self._notice(who, status)
        charged = Decision(call, Outcome.ALLOWED, (status,))
        self._tell(who, [charged], threads=self._usage.record)

    def record_refunds(self, refunds: Sequence[Refund]) -> None:
        """Subtract the charges of one agent's calls on one thread from what was counted."""
        if refunds:
            who = self._who(refunds[0].call.agent, refunds[0].call.thread_id)
            for each in refunds:
                self._tell(who, each, metrics=self._metrics.refunded, threads=self._usage.refund)

    def record_spent(
        self,
        agent: str | None,
        thread_id: object,
        spent: Sequence[Spent],
        *,
        model: str | None,
        estimated: bool = False,
    ) -> None:
        """Count what a model run has spent, once for each run."""
        # `record_charge` shows the counts of the limits after it.
        who, shown = self._who(agent, thread_id), self._model(model)
        self._tell(who, shown, spent, estimated, metrics=self._metrics.spend)
        self._tell(who, spent, threads=self._usage.spend)

    def record_granted(self, agent: str | None, granted: Sequence[Granted]) -> None:
        """Count what was granted on top of limits."""
        who = self._who(agent)
        for each in granted:
            self._tell(who, *each, metrics=self._metrics.grant)

    def record_unknown_price(self, agent: str | None, model: str | None) -> None:
        """Count a model call that has no price; the first of a model is logged."""
        who, shown = self._who(agent), self._model(model)
        self._count(self._metrics.unknown_prices, agent, shown)
        if self._is_first("price", who.agent, shown):
            self._tell(who, shown, observer=logs.no_price)

    def warn_of_estimate(self, model: str, made_at: UserLine) -> None:
        """Warn, once for each model, that its tokens are estimated: its provider reports none."""
        # Estimates for a run that was cut off are counted without a warning. Where warnings are
        # errors, it is logged instead: the answer is paid, and an error would lose it.
        shown = self._model(model)
        if self._is_first("usage", "", shown):
            try:
                made_at.warn(
                    f"model {shown!r} reports no usage: its tokens are estimated. {logs.REPORT_IT}"
                )
            except QuotaWarning:
                self._tell(shown, observer=logs.estimated)

    def record_run(self, agent: str | None, task_id: str | None) -> None:
        """Count a run of an agent that begins in a task."""
        if not self._tasks.seen(task_id):
            self._count(self._metrics.runs, agent)

    def record_lost_root_run(self, agent: str | None, cause: str) -> None:
        """Count a run with a budget of its own that may belong to another root run."""
        self._count(self._metrics.lost_root_runs, agent, cause)

    def record_recovery(self, component: str) -> None:
        """Log that a component which failed works again."""
        self._tell(component, observer=logs.recovery)

    def observe_store(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store."""
        self._tell(operation, outcome, seconds, metrics=self._metrics.observe_store)

    def record_wait(self, agent: str | None, limit: str, decision: str, seconds: float) -> None:
        """Time how long a call has waited for others to end."""
        self._tell(self._who(agent), limit, decision, seconds, metrics=self._metrics.waited)

    def record_turn(self, decision: Decision, waited_for: str, seconds: float) -> None:
        """Make visible that a call runs after it has waited, or that it has waited in vain."""
        call = decision.call
        for status in decision.limits:
            mine = status.limit == waited_for
            # After a refusal on trial the call runs: the other limits have let it through.
            outcome = (decision.outcome if status.refused else Outcome.ALLOWED).value
            if decision.outcome is Outcome.BLOCKED and not status.refused:
                continue
            self.record_wait(call.agent, status.limit, outcome, seconds if mine else 0.0)
        who = self._who(call.agent, call.thread_id)
        for status in decision.refused_by:
            shown = self._tell(None, tracing=exemplar)
            self._tell(who, status, shown, metrics=self._metrics.refused_at_once)
            self._notice(who, status)

    def record_fallback(self, agent: str | None, action: str, calls: int) -> None:
        """Count the calls that were judged without the shared store: `"deny"` or `"allow"`."""
        self._count(self._metrics.fallbacks, agent, action, amount=calls)

    def warn_misspelt(self, agent: str | None, meant: Mapping[str, str]) -> None:
        """Log the tools that limits name and the agent does not have, each with one like it."""
        self._tell(self._who(agent), meant, observer=logs.misspelt)

    def record_question(
        self,
        agent: str | None,
        limits: Sequence[str],
        problem: str = "",
        task_id: str | None = None,
    ) -> None:
        """Count and log that a person is asked whether a run may go on at limits."""
        if self._tasks.seen(task_id, problem):
            return
        for limit in limits:
            self._count(self._metrics.questions, agent, limit_label(limit))
        self._tell(self._who(agent), limits, observer=logs.question)

    def record_answer(
        self, agent: str | None, limits: Sequence[str], answer: Answer, task_id: str | None
    ) -> bool:
        """Count and log a person's answer; whether it is new."""
        if self._tasks.seen(task_id, answer):
            return False
        for limit in limits:
            self._count(self._metrics.answers, agent, limit_label(limit), answer.type)
        self._tell(self._who(agent), limits, answer, observer=logs.answer)
        return True

    def record_reset(
        self, agent: str | None, thread_id: object, limits: Sequence[LimitStatus]
    ) -> None:
        """Show that a thread, if there is one, has used nothing."""
        self._tell(self._who(agent, thread_id), limits, threads=self._usage.reset)

    def _count(
        self, series: Series[Counter], agent: str | None, *labels: str, amount: int = 1
    ) -> None:
        """Count something of an agent."""
        add = self._metrics.add
        self._tell(metrics=lambda: add(series, self._agents["", agent], *labels, amount=amount))

    def _who(self, agent: str | None, thread_id: object = None) -> Who:
        """The labels of an agent and, if there is one, a thread."""
        name = self._tell(("", agent), metrics=self._agents.__getitem__)
        thread = None
        if thread_id is not None:
            thread = self._tell(thread_id, thread_label=self._thread_label)
        return Who(name or UNNAMED, limit_label(agent) if name and agent else UNNAMED, thread)

    def _model(self, model: str | None) -> str:
        """The label of a model."""
        return self._tell(("", model), metrics=self._models.__getitem__) or UNNAMED

    def _is_first(self, *what: str) -> bool:
        """Whether it is to be logged: once for each agent and model."""
        if what in self._warned:
            return False
        self._warned.add(what)
        return True

    def _notice(self, who: Who, status: LimitStatus) -> None:
        """Log a refusal; count and log the thresholds that a charge has crossed."""
        if status.reason is not None and status.refusal_scope is not None:
            self._tell(who, status, status.refusal_scope, observer=logs.refusal)
        for scope, reached in self._tell(self.near, metrics=status.threshold_events) or ():
            crossing = who, status, scope, reached
            self._tell(*crossing, metrics=self._metrics.crossed, observer=logs.crossing)
