"""The one face to which middlewares report: it gives what they report to the sinks.

The sinks are metrics, spans, the usage of threads and other subjects, and logs. `Instruments.guard`
calls them: no failure in here reaches the agent.
"""

import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from langchain_quota.core.decision import Decision, LimitStatus, Outcome, Refund
from langchain_quota.errors import UNREADABLE, QuotaStoreError, QuotaWarning, UnknownPriceError
from langchain_quota.limits import Limit
from langchain_quota.limits.call import CONCURRENCY, Call, Scope
from langchain_quota.runtime.arguments import UserLine
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.telemetry import logs, names
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, Granted, Spent
from langchain_quota.telemetry.labels import (
    NONE,
    TOOL,
    UNNAMED,
    BoundedLabels,
    Label,
    described,
    label,
    limit_label,
    own_label,
)
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.metrics import Metrics
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.tracing import Tracing
from langchain_quota.telemetry.usage import UsageTable
from langchain_quota.telemetry.workers import Snapshot, checked_directory

_MAX_MODELS = 100
"""How many distinct names of models there may be: gateways pass on what a caller invents."""

_MOST_LOGGED = 1000
"""How often a line is logged that is logged once for each agent; metrics count all."""

_captures: ContextVar[tuple[list[Decision], ...]] = ContextVar("captures", default=())


@contextmanager
def capturing(decisions: list[Decision]) -> Iterator[None]:
    """Append every decision made in this context, and in tasks started from it, to the list."""
    token = _captures.set((*_captures.get(), decisions))
    try:
        yield
    finally:
        _captures.reset(token)


@dataclass(slots=True)
class TaskRecord:
    """What was told of a task."""

    what: object = None
    notified: int = 0
    """How many observers have been given a decision."""
    is_new: bool = True
    """Whether it is told for the first time."""


class RecentTasks:
    """The newest tasks: LangGraph runs a failed task anew when the run is resumed."""

    MOST = 10_000

    def __init__(self) -> None:
        self._known: OrderedDict[str, TaskRecord] = OrderedDict()
        self._lock = fork_safe_lock()

    def told(self, task_id: str | None, what: object = None) -> TaskRecord:
        """What was told of a task; new if it is not the same `what` that was told last."""
        if task_id is None:
            return TaskRecord(what)
        with self._lock:
            known = self._known.get(task_id)
            if known is not None and known.what == what:
                known.is_new = False
                return known
            told = self._known[task_id] = TaskRecord(what)
            if known is not None:
                self._known.move_to_end(task_id)
            if len(self._known) > self.MOST:
                self._known.popitem(last=False)
        return told


@dataclass(frozen=True, slots=True)
class Settings:
    """What every `Telemetry` of one registry must agree on."""

    near: float
    thread_label: Label | None
    subject_label: Mapping[str, Label]
    max_exported_threads: int
    max_exported_subjects: int
    thread_ttl: timedelta
    max_tools: int
    max_agents: int


class Instruments:
    """The sinks of a registry, the bounded labels that they share, and the guard around sinks."""

    def __init__(self, registry: CollectorRegistry, settings: Settings) -> None:
        self.settings = settings
        self.directory = checked_directory()
        self.metrics = Metrics(registry, settings.near)
        self.agents = BoundedLabels(settings.max_agents)
        self.tools = BoundedLabels(settings.max_tools, nameless=NONE, allowed=TOOL)
        self.models = BoundedLabels(_MAX_MODELS)
        self.quotas: set[str] = set()
        """The names of the quotas of all middlewares."""
        self.usage = UsageTable(
            Snapshot(
                time.time(),
                settings.max_exported_threads,
                settings.max_exported_subjects,
                settings.thread_ttl.total_seconds(),
            ),
            self.directory,
            partial(self.failed, "threads"),
            near=settings.near,
            subject_label=self._subject_label,
        )
        # What is logged once, by line; and kinds of failures.
        self.logged: defaultdict[object, set[tuple[object, ...]]] = defaultdict(set)
        registry.register(self.usage)

    def guard(self, component: str, sink: Callable[..., Any], *event: Any) -> Any:
        """Give an event to a sink of a component; what it answers, `None` if it failed.

        A failure is counted, and does not reach the agent.
        """
        try:
            return sink(*event)
        # A cancellation or an interrupt is no `Exception`, and passes.
        except Exception as error:
            self.failed(component, error)
            return None

    def failed(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of a component; log it if `log` is true, by default once per kind."""
        error_type = label(type(error).__name__)
        # A label function hides ids, so its exception must not show them in the log. An outage is
        # no fault in code: its error says all in one line. An unreadable reply may be one.
        hides = component in {"thread_label", "subject_label"}
        is_code = not isinstance(error, QuotaStoreError) or isinstance(error.__cause__, UNREADABLE)
        shown = error if is_code and not hides else None
        # If counting or logging fails, there is no place left to report it.
        with suppress(Exception):
            self.metrics.count(names.ERRORS, 1, component, error_type)
        with suppress(Exception):
            known = self.logged[component]
            is_first = (error_type,) not in known
            known.add((error_type,))
            if is_first if log is None else log:
                logger.error(
                    "%s of langchain-quota failed with %s%s; %s are only "
                    "counted in langchain_quota_errors_total",
                    component,
                    error_type,
                    f" ({described(error)})" if component == "store" else "",
                    "further failures of this kind"
                    if log is None
                    else "until it recovers, further failures",
                    exc_info=shown,
                )

    def _subject_label(self, quota: str, subject: str) -> str | None:
        """The label of a quota's subject; `None` if it is not to be shown."""
        make = self.settings.subject_label.get(quota)
        if make is None:
            return None
        made: str | None = self.guard("subject_label", own_label, make, subject, "subject_label")
        return made


_instruments: WeakKeyDictionary[CollectorRegistry, Instruments] = WeakKeyDictionary()
_lock = fork_safe_lock()


def instruments_of(registry: CollectorRegistry, settings: Settings) -> Instruments:
    """The instruments of a registry, made if it has none."""
    with _lock:
        found = _instruments.get(registry)
        if found is None:
            found = _instruments[registry] = Instruments(registry, settings)
    for name in Settings.__slots__:
        ours, theirs = getattr(settings, name), getattr(found.settings, name)
        if ours != theirs:
            raise ValueError(
                f"{name}={ours!r} conflicts with {name}={theirs!r} of another Telemetry on the "
                "same registry: make one Telemetry, and give it to all middlewares (one without "
                "telemetry= makes the default). It holds until the process ends. To change it "
                "before, in a notebook, give the new one a registry of its own: "
                "Telemetry(registry=CollectorRegistry(), …)"
            )
    return found


def usage_of(registry: CollectorRegistry) -> UsageTable | None:
    """The usage table of this process for a registry; `None` if it has none."""
    found = _instruments.get(registry)
    return None if found is None else found.usage


class Recorder:
    """Gives what middlewares report to the sinks."""

    def __init__(
        self,
        instruments: Instruments,
        tracing: Tracing,
        *,
        made_at: UserLine,
        count_unchecked_calls: bool = False,
    ) -> None:
        make = instruments.settings.thread_label
        self._thread_label: Callable[[object], str] = label
        if make is not None:
            self._thread_label = partial(own_label, make, argument="thread_label")
        self.near = instruments.settings.near
        self.record_error = instruments.failed
        self.counts_unchecked_calls = count_unchecked_calls
        self._shared = instruments
        self._guard = instruments.guard
        self._metrics = metrics = instruments.metrics
        self._usage = usage = instruments.usage
        self.created_at = made_at
        self._begun = 0
        self._estimated: set[str] = set()
        self._seen = RecentTasks()
        # The table goes before spans and logs: it knows the labels of subjects.
        self._of_decisions = (
            ("threads", usage.judged),
            ("tracing", tracing.judged),
            ("metrics", metrics.judged),
        )
        self._of_charges = (
            ("threads", usage.judged),
            ("tracing", tracing.exemplify),
            ("metrics", metrics.charged),
        )
        self._of_turns = (("tracing", tracing.exemplify), ("metrics", metrics.refused))

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: all copies share its metrics."""
        return self

    def watch_limits(self, limits: Iterable[Limit]) -> None:
        """Learn the limits of a middleware: the tools that they name keep their names."""
        for limit in limits:
            self._shared.tools.keep(limit.named_tools)
            self._shared.quotas.update(each.name for each in limit.quotas)

    def store_nearly_full(self, store: object) -> bool:
        """Log that a store is nearly full; return False as long as it may still become so."""
        return self._guard("store", logs.nearly_full, store) is not False

    def learn_tools(self, agent: str | None, offered: Iterable[str]) -> None:
        """Learn an agent's tools: they get labels before names that its model invents."""
        shown = self._who(agent).agent
        for name in offered:
            self._guard("metrics", self._shared.tools.__getitem__, (shown, name))

    def record(
        self,
        decisions: Sequence[Decision],
        *,
        started: int,
        error: BaseException | None = None,
        task_id: str | None = None,
    ) -> TaskRecord:
        """Make the decisions about a batch of one agent's calls visible, unless they were told."""
        took = time.time_ns() - started
        if not decisions:
            return TaskRecord(is_new=False)
        told = self._seen.told(task_id, [decision.outcome for decision in decisions])
        if told.is_new:
            for captured in _captures.get():
                captured.extend(decisions)
            if self._begun != os.getpid():
                self._begun = os.getpid()
                self._guard("metrics", self._begin)
            who = self._who(decisions[0].call.agent, decisions[0].call.thread_id)
            tools = [self._shared.tools[who.agent, each.call.tool] for each in decisions]
            self._dispatch(
                DecisionEvent(decisions, who, tools, started, took, error), self._of_decisions
            )
        return told

    def record_charge(
        self, call: Call, status: LimitStatus, *, is_call: bool = True, task_id: str | None = None
    ) -> None:
        """Make visible that a call which was let through before is charged to a limit now."""
        if not self.is_new(task_id):
            return
        # A limit on trial counts a call when it judges it: it may let it run and would refuse it.
        counted = call.amount if is_call and status.enforced else 0
        decision = Decision(call, Outcome.ALLOWED, (status,))
        who = self._who(call.agent, call.thread_id)
        self._dispatch(DecisionEvent([decision], who, charged=counted), self._of_charges)

    def record_refunds(self, refunds: Sequence[Refund]) -> None:
        """Subtract the charges of one agent's calls on one thread from what was counted."""
        for each in refunds:
            who = self._who(each.call.agent, each.call.thread_id)
            tool = self._shared.tools[who.agent, each.call.tool]
            self._guard("metrics", self._metrics.refunded, who, tool, each)
            self._guard("threads", self._usage.refund, who, each)

    def record_spent(
        self,
        call: Call,
        spent: Sequence[Spent],
        *,
        model: str | None,
        estimated: bool = False,
        price: str = NONE,
    ) -> None:
        """Count what a model run has spent, once for each run."""
        # `record_charge` shows the counts of the limits after it.
        who = self._who(call.agent, call.thread_id)
        of = self._model(model), price, "estimated" if estimated else "reported"
        self._guard("metrics", self._metrics.spend, who, spent, *of)
        self._guard("threads", self._usage.spend, who, spent)

    def record_granted(self, agent: str | None, granted: Sequence[Granted]) -> None:
        """Count what was granted on top of limits."""
        if granted:
            self._guard("metrics", self._metrics.granted, self._who(agent), granted)

    def record_unknown_price(
        self, agent: str | None, error: UnknownPriceError, *, is_made: bool = True
    ) -> None:
        """Log the first call of a model without a price; count one that is therefore not made."""
        if not is_made:
            self.count(names.MODEL_RUNS, agent, self._model(error.model), "unknown", NONE)
        self.log_first(logs.no_price, agent, str(error))

    def warn_of_estimate(self, model: str, made_at: UserLine) -> None:
        """Warn, once for each model, that its tokens are estimated: its provider reports none."""
        # Estimates for a run that was cut off are counted without a warning. Where warnings are
        # errors, it is logged instead: the answer is paid, and an error would lose it.
        shown = self._model(model)
        if shown not in self._estimated:
            self._estimated.add(shown)
            try:
                made_at.warn(
                    f"model {shown!r} reports no usage: its tokens are estimated. {logs.REPORT_IT}"
                )
            except QuotaWarning:
                self.log(logs.estimated, shown)

    def record_wait(
        self,
        agent: str | None,
        limit: str,
        decision: str,
        seconds: float,
        scope: Scope = CONCURRENCY,
    ) -> None:
        """Time how long a call has waited: for others to end, or for room in a quota."""
        told = self._who(agent), limit, decision, seconds, scope
        self._guard("metrics", self._metrics.waited, *told)

    @contextmanager
    def waiting(self, agent: str | None, limit: str) -> Iterator[None]:
        """Count a call that waits now."""
        who = self._who(agent)
        self._guard("metrics", self._metrics.wait, who, limit, 1)
        try:
            yield
        finally:
            self._guard("metrics", self._metrics.wait, who, limit, -1)

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
        refusals = Decision(call, decision.outcome, decision.refused_by)
        self._dispatch(
            DecisionEvent([refusals], self._who(call.agent, call.thread_id)), self._of_turns
        )

    def record_reset(
        self, agent: str | None, thread_id: object, limits: Sequence[LimitStatus]
    ) -> None:
        """Show that a thread, if there is one, has used nothing."""
        self._guard("threads", self._usage.reset, self._who(agent, thread_id), limits)

    def is_new(self, task_id: str | None, what: object = None) -> bool:
        """Whether it is told of a task for the first time; a task may run again."""
        return self._seen.told(task_id, what).is_new

    def count(self, spec: MetricSpec, agent: str | None, *labels: str, amount: int = 1) -> None:
        """Count something of an agent."""
        shown = self._who(agent).agent
        self._guard("metrics", self._metrics.count, spec, amount, shown, *labels)

    def count_error(self, component: str, error_type: str) -> None:
        """Count a failure that is no exception."""
        self._guard("metrics", self._metrics.count, names.ERRORS, 1, component, error_type)

    def observe(self, spec: MetricSpec, seconds: float, *labels: str) -> None:
        """Time something."""
        self._guard("metrics", self._metrics.observe, spec, seconds, *labels)

    def log(self, line: Callable[..., None], *event: object) -> None:
        """Write a line of the log."""
        self._guard("observer", line, *event)

    def log_first(self, line: Callable[..., None], *event: object) -> None:
        """Write a line of the log once for each event, and at most 1,000 times."""
        known = self._shared.logged[line]
        if event not in known and len(known) < _MOST_LOGGED:
            known.add(event)
            self.log(line, *event)

    def _dispatch(
        self, event: DecisionEvent, sinks: Sequence[tuple[str, Callable[[DecisionEvent], None]]]
    ) -> None:
        """Give an event to sinks, in their order, and its notices to metrics and the log."""
        for component, sink in sinks:
            self._guard(component, sink, event)
        self._guard("metrics", event.notice, self.near)
        if event.notices:
            self._guard("metrics", self._metrics.crossed, event)
            self._guard("observer", logs.noticed, event)

    def _begin(self) -> None:
        """Warn of settings that cannot work, at the first decision: by then all limits are made."""
        shared = self._shared
        for quota in sorted(shared.settings.subject_label.keys() - shared.quotas):
            known = ", ".join(map(repr, sorted(shared.quotas))) or "none"
            self.created_at.warn(
                f"subject_label has {quota!r}, and no quota has this name: they are {known}"
            )

    def _who(self, agent: str | None, thread_id: object = None) -> CallerLabels:
        """The labels of an agent and, if there is one, a thread."""
        component, bounded, shown, thread = "metrics", UNNAMED, UNNAMED, None
        try:
            bounded, shown = (
                self._shared.agents["", agent],
                limit_label(agent) if agent else UNNAMED,
            )
            component = "thread_label"
            if thread_id is not None:
                thread = self._thread_label(thread_id)
        except Exception as error:
            self.record_error(component, error)
        return CallerLabels(bounded, shown, thread)

    def _model(self, model: str | None) -> str:
        """The label of a model."""
        return self._guard("metrics", self._shared.models.__getitem__, ("", model)) or UNNAMED
