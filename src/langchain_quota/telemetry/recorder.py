"""The one face to which middlewares report: it gives what they report to the sinks.

The sinks are metrics, spans, the usage of threads and other subjects, and logs. All are called by
`Instruments.tell`, which guards them: no failure in here reaches the agent.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter

from langchain_quota.arguments import UserLine
from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import Answer, Call, Decision, LimitStatus, Outcome, Refund
from langchain_quota.errors import QuotaWarning
from langchain_quota.limits import Limit
from langchain_quota.telemetry import logs
from langchain_quota.telemetry.labels import (
    NONE,
    TOOL,
    UNNAMED,
    BoundedLabels,
    Label,
    Who,
    described,
    label,
    limit_label,
    own_label,
)
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.metrics import Granted, Metrics, Series
from langchain_quota.telemetry.tracing import Judged, Tracing, active_exemplar
from langchain_quota.telemetry.usage import UsageTable
from langchain_quota.telemetry.workers import Snapshot, Spent, checked_directory

_MAX_MODELS = 100
"""How many distinct names of models there may be: gateways pass on what a caller invents."""

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


@dataclass(slots=True)
class Told:
    """What was told of a task."""

    what: object = None
    trace: Mapping[str, str] | None = None
    """The span that begins the run's trace: if the task runs again, its state does not have it."""
    notified: int = 0
    """How many observers have been given a decision."""
    is_new: bool = True
    """Whether it is told for the first time."""


class Seen:
    """The newest tasks: LangGraph runs a failed task anew when the run is resumed."""

    MOST = 10_000

    def __init__(self) -> None:
        self._known: OrderedDict[str, Told] = OrderedDict()
        self._lock = fork_safe_lock()

    def told(self, task_id: str | None, what: object = None) -> Told:
        """What was told of a task; new if it is not the same `what` that was told last."""
        if task_id is None:
            return Told(what)
        with self._lock:
            known = self._known.get(task_id)
            if known is not None and known.what == what:
                known.is_new = False
                return known
            told = self._known[task_id] = Told(what, None if known is None else known.trace)
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
        directory = checked_directory()
        self.metrics = Metrics(registry, settings.near)
        self.agents = BoundedLabels(settings.max_agents)
        self.tools = BoundedLabels(settings.max_tools, nameless=NONE, allowed=TOOL)
        self.models = BoundedLabels(_MAX_MODELS)
        self.usage = UsageTable(
            settings.near,
            Snapshot(
                time.time(),
                settings.max_exported_threads,
                settings.max_exported_subjects,
                settings.thread_ttl.total_seconds(),
            ),
            subject_label=self._subject_label,
            on_error=partial(self.failed, "threads"),
            directory=directory,
        )
        self._logged: set[tuple[str, str]] = set()
        registry.register(self.usage)

    def tell(self, *event: Any, **sinks: Callable[..., Any]) -> Any:
        """Give an event to sinks, by component; what the last one answers, `None` if it failed.

        One that fails is counted, and the others go on: no failure in here reaches the agent.
        """
        answer = None
        for component, sink in sinks.items():
            try:
                answer = sink(*event)
            # A cancellation or an interrupt is no `Exception`, and passes.
            except Exception as error:
                answer = None
                self.failed(component, error)
        return answer

    def failed(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of a component; log it if `log` is true, by default once per kind."""
        error_type = label(type(error).__name__)
        # A label function hides ids, so its exception must not show them in the log.
        shown = None if component in {"thread_label", "subject_label"} else error
        # If counting or logging fails, there is no place left to report it.
        with suppress(Exception):
            self.metrics.add(self.metrics.errors, 1, component, error_type)
        with suppress(Exception):
            if log is None:
                log = (component, error_type) not in self._logged
                what = "further failures of this kind"
            else:
                what = "until it recovers, further failures"
            if log:
                self._logged.add((component, error_type))
                logger.error(
                    "%s of langchain-quota failed with %s%s; %s are only "
                    "counted in langchain_quota_errors_total",
                    component,
                    error_type,
                    f" ({described(error)})" if component == "store" else "",
                    what,
                    exc_info=shown,
                )

    def _subject_label(self, quota: str, subject: str) -> str | None:
        """The label of a quota's subject; `None` if it is not to be shown."""
        make = self.settings.subject_label.get(quota)
        if make is None:
            return None
        made: str | None = self.tell(make, subject, "subject_label", subject_label=own_label)
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
        self, instruments: Instruments, tracing: Tracing, *, count_unjudged_calls: bool = False
    ) -> None:
        make = instruments.settings.thread_label
        self._thread_label: Callable[[object], str] = label
        if make is not None:
            self._thread_label = partial(own_label, make, argument="thread_label")
        self.near = instruments.settings.near
        self.record_error = instruments.failed
        self.counts_unjudged_calls = count_unjudged_calls
        self._tell = instruments.tell
        self._metrics = instruments.metrics
        self._usage = instruments.usage
        self._tracing = tracing
        self._agents = instruments.agents
        self._tools = instruments.tools
        self._models = instruments.models
        self._seen = Seen()
        # By agent and model; labels of models are bounded.
        self._warned: set[tuple[str, ...]] = set()
        self._unjudged: set[tuple[str, str]] = set()

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: all copies share its metrics."""
        return self

    def watch_limits(self, limits: Iterable[Limit]) -> None:
        """Learn the limits of a middleware: the tools that they name keep their names."""
        for limit in limits:
            self._tools.keep(limit.named_tools)

    def watch_store(self, store: object) -> bool:
        """Show how full a store is, if it has a property `occupancy`; whether it has."""
        return bool(self._tell(store, threads=self._usage.watch))

    def store_nearly_full(self, store: Any) -> bool:
        """Log that a watched store is nearly full, if it is; whether nothing is left to log."""
        return self._tell(store, threads=logs.nearly_full) is not False

    def learn_tools(self, agent: str | None, names: Iterable[str]) -> None:
        """Learn an agent's tools: they get labels before names that its model invents."""
        self._tell(metrics=lambda: [self._tools[self._agents["", agent], each] for each in names])

    def record(
        self,
        decisions: Sequence[Decision],
        *,
        started: int,
        error: BaseException | None = None,
        task_id: str | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> Told:
        """Make the decisions about a batch of one agent's calls visible, unless they were told."""
        took = time.time_ns() - started
        if not decisions:
            return Told(trace=trace, is_new=False)
        told = self._seen.told(task_id, [decision.outcome for decision in decisions])
        told.trace = trace or told.trace
        if told.is_new:
            for captured in _captures.get():
                captured.extend(decisions)
            who = self._who(decisions[0].call.agent, decisions[0].call.thread_id)
            tools = [self._tools[who.agent, decision.call.tool] for decision in decisions]
            judged = Judged(
                decisions,
                who,
                tools,
                started,
                took,
                error,
                told.trace,
                # If tracing fails, there are none.
                exemplars=[None] * len(decisions),
            )
            self._tell(
                judged,
                tracing=self._tracing.judged,
                metrics=self._metrics.judged,
                threads=self._usage.judged,
            )
            self._notice(judged)
            told.trace = judged.trace
        return told

    def record_charge(
        self,
        call: Call,
        status: LimitStatus,
        *,
        is_call: bool = True,
        task_id: str | None = None,
    ) -> None:
        """Make visible that a call which was let through before is charged to a limit now."""
        if not self._seen.told(task_id).is_new:
            return
        who = self._who(call.agent, call.thread_id)
        # A limit on trial counts a call when it judges it: it may let it run and would refuse it.
        counted = call.amount if is_call and status.enforced else 0
        charged = Judged([Decision(call, Outcome.ALLOWED, (status,))], who)
        shown = self._tell(tracing=active_exemplar)
        self._tell(charged, counted, shown, metrics=self._metrics.charged)
        self._tell(charged, threads=self._usage.judged)
        self._notice(charged)

    def record_refunds(self, refunds: Sequence[Refund]) -> None:
        """Subtract the charges of one agent's calls on one thread from what was counted."""
        if refunds:
            who = self._who(refunds[0].call.agent, refunds[0].call.thread_id)
            for each in refunds:
                self._tell(who, each, metrics=self._metrics.refunded, threads=self._usage.refund)

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
        who, shown = self._who(call.agent, call.thread_id), self._model(model)
        usage = "estimated" if estimated else "reported"
        self._tell(who, shown, spent, usage, price, metrics=self._metrics.spend)
        self._tell(who, spent, threads=self._usage.spend)

    def record_granted(self, agent: str | None, granted: Sequence[Granted]) -> None:
        """Count what was granted on top of limits."""
        who = self._who(agent)
        for each in granted:
            self._tell(who, *each, metrics=self._metrics.grant)

    def record_unknown_price(
        self, agent: str | None, model: str | None, *, is_made: bool = True
    ) -> None:
        """Log the first call of a model without a price; count one that is therefore not made."""
        who, shown = self._who(agent), self._model(model)
        if not is_made:
            self._count(self._metrics.model_runs, agent, shown, "unknown", NONE)
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

    def record_unjudged(self, agent: str | None, kind: str, count: int) -> None:
        """Count calls that no limit judged in a run with limits; the first of a kind are logged."""
        self._count(self._metrics.unjudged, agent, kind, amount=count)
        known = self._who(agent).name, kind
        # It causes no `QuotaWarning`: it is found in a callback, where LangChain would swallow a
        # warning that is an error.
        if known not in self._unjudged and len(self._unjudged) < _MOST_LOGGED:
            self._unjudged.add(known)
            self._tell(*known, observer=logs.unjudged)

    def record_run(self, agent: str | None, task_id: str | None) -> None:
        """Count a run of an agent that begins in a task."""
        if self._seen.told(task_id).is_new:
            self._count(self._metrics.runs, agent)

    def record_lost_root_run(self, cause: str) -> None:
        """Count a run with a budget of its own that may belong to another root run."""
        self._tell(*(self._metrics.errors, 1, "root_run", cause), metrics=self._metrics.add)

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
            shown = self._tell(tracing=active_exemplar)
            self._tell(who, status, shown, metrics=self._metrics.refused_at_once)
        turn = Judged([Decision(call, decision.outcome, decision.refused_by)], who)
        turn.notice(self.near)
        self._notice(turn)

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
        if not self._seen.told(task_id, problem).is_new:
            return
        for limit in limits:
            self._count(self._metrics.questions, agent, limit_label(limit), "asked")
        self._tell(self._who(agent), limits, observer=logs.question)

    def record_answer(
        self, agent: str | None, limits: Sequence[str], answer: Answer, task_id: str | None
    ) -> bool:
        """Count and log a person's answer; whether it is new."""
        if not self._seen.told(task_id, answer).is_new:
            return False
        for limit in limits:
            self._count(self._metrics.questions, agent, limit_label(limit), answer.type)
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
        self._tell(series, amount, self._who(agent).agent, *labels, metrics=self._metrics.add)

    def _who(self, agent: str | None, thread_id: object = None) -> Who:
        """The labels of an agent and, if there is one, a thread."""
        component, name, shown, thread = "metrics", UNNAMED, UNNAMED, None
        try:
            name, shown = self._agents["", agent], limit_label(agent) if agent else UNNAMED
            component = "thread_label"
            if thread_id is not None:
                thread = self._thread_label(thread_id)
        except Exception as error:
            self.record_error(component, error)
        return Who(name, shown, thread)

    def _model(self, model: str | None) -> str:
        """The label of a model."""
        return self._tell(("", model), metrics=self._models.__getitem__) or UNNAMED

    def _is_first(self, *what: str) -> bool:
        """Whether it is to be logged: once for each agent and model."""
        if what in self._warned:
            return False
        self._warned.add(what)
        return True

    def _notice(self, judged: Judged) -> None:
        """Log refusals; count and log the thresholds that charges have crossed."""
        if judged.notices:
            self._tell(judged, metrics=self._metrics.crossed, observer=logs.noticed)
