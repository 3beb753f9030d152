"""The recorder, which passes what middlewares report to the sinks.

The sinks are metrics, spans, the usage of threads and other subjects, and logs.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Self

from langchain_quota.core.decide import Verdict
from langchain_quota.core.decision import Outcome, Refund
from langchain_quota.core.plans import Rule
from langchain_quota.core.stops import StopReason, reason_of
from langchain_quota.limits import Limit
from langchain_quota.limits.call import RUN, STORE, THREAD, Call, Scope
from langchain_quota.runtime import compat
from langchain_quota.runtime.arguments import QuotaWarning, UserLine
from langchain_quota.runtime.sync_async import P
from langchain_quota.runtime.units import UNIT_LABELS, Level, Unit, in_base_unit
from langchain_quota.telemetry import logs, names, stream
from langchain_quota.telemetry.events import CallerLabels, DecisionEvent, LimitSpend, captures
from langchain_quota.telemetry.instruments import Instruments
from langchain_quota.telemetry.labels import NONE, UNNAMED, custom_label, label, limit_label
from langchain_quota.telemetry.names import MetricSpec
from langchain_quota.telemetry.receipts import ALL_OPEN, open_receipts
from langchain_quota.telemetry.recent_tasks import RecentTasks, TaskRecord
from langchain_quota.telemetry.stream import QuotaEvent
from langchain_quota.telemetry.tracing import DECISION, LIMIT, Tracing
from langchain_quota.telemetry.workers import Freeze

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel

_MAX_FIRST_LINES = 1000
"""Maximum of lines that are logged once for each agent; metrics count all events."""

Sink = Callable[[DecisionEvent], None]
Sinks = Sequence[tuple[str, Sink]]


class Recorder:
    """The face of telemetry to middlewares: each report goes to the sinks that show it."""

    def __init__(
        self,
        instruments: Instruments,
        tracing: Tracing,
        *,
        created_at: UserLine,
        count_unchecked_calls: bool = False,
        run_histograms: bool = False,
    ) -> None:
        make = instruments.settings.thread_label
        self._thread_label: Callable[[object], str] = label
        if make is not None:
            self._thread_label = partial(custom_label, make, argument="thread_label")
        self.near = instruments.settings.near
        self._make_spans = tracing.make_spans
        self.record_error = instruments.failed
        self.outages = instruments.outages
        self.counts_unchecked_calls = count_unchecked_calls
        self.has_run_histograms = run_histograms
        self._shared = instruments
        self._guard = instruments.guard
        self._metrics = metrics = instruments.metrics
        self._usage = usage = instruments.usage
        self.created_at = created_at
        self._has_checked_settings = False
        self._estimated_models: set[str] = set()
        self._recent_tasks = RecentTasks()
        self._newest_model: tuple[object, object] = None, None
        self.streams = False

        def sinks(spans: Sink, count: Sink) -> Sinks:
            # The table comes before spans and logs, because it adds the labels of subjects.
            first = ("threads", usage.record_decisions), ("tracing", spans)
            return *first, ("metrics", count), ("metrics", metrics.count_crossings)

        self._decision_sinks = sinks(tracing.make_spans, metrics.count_decisions)
        self._charge_sinks = sinks(tracing.set_active_exemplar, metrics.count_charge)
        self._slot_sinks = sinks(tracing.make_spans, metrics.count_slot_decision)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Return itself, so that copies of a middleware share its metrics."""
        return self

    def streaming(self) -> Self:
        """Return the same recorder for a middleware that also writes events to a run's stream."""
        recorder = copy(self)
        recorder.streams = True
        return recorder

    def stream(self, name: stream.EventName, reason: StopReason) -> None:
        """Write an event to the stream of the running graph, if the middleware is to do so."""
        if self.streams:
            self._guard("observer", stream.write, name, reason)

    def subject_label(self, quota: str, subject: str) -> str | None:
        """Return the label of a quota's subject, or `None` if it must not be shown."""
        return self._shared.subject_label(quota, subject) if subject else None

    def watch_limits(self, limits: Iterable[Limit], *, in_memory: bool) -> None:
        """Learn the limits of a middleware: tools that they name always have their own labels."""
        for limit in limits:
            self._shared.tools.exempt(limit.named_tools)
            self._shared.quotas |= {quota.name: quota.dimension for quota in limit.quotas}
            self._usage.counts_in_memory |= in_memory and bool(limit.quotas)

    def store_nearly_full(self, store: object) -> bool:
        """Log that a store is nearly full; return False as long as it may still become so."""
        return self._guard("store", logs.nearly_full, store) is not False

    def record(  # noqa: PLR0913 - keyword-only, with defaults
        self,
        verdicts: Sequence[Verdict],
        *,
        started: int,
        error: BaseException | None = None,
        ended_by: str = "",
        task_id: str | None = None,
        model: "tuple[BaseChatModel, Mapping[str, object]] | None" = None,
        refunds: Sequence[Refund] = (),
        ending: StopReason | None = None,
    ) -> TaskRecord:
        """Record the verdicts about a batch of one agent's calls, unless the task is a re-run.

        With them go the refunds of other calls' charges, and why the run ends.
        """
        if not verdicts:
            return TaskRecord(is_new=False)
        record = self._recent_tasks.add(task_id, [verdict.outcome for verdict in verdicts])
        if not record.is_new:
            return record
        # Whatever fails between the sinks, which are guarded one by one, does not reach the agent.
        try:
            # The check began before the calls waited for room.
            duration = time.time_ns() - started - int(verdicts[0].waited * 10**9)
            for captured in captures.get():
                made = (one.whole_decision for one in verdicts if not one.needs_slot)
                self._guard("observer", captured.extend, made)
            receipts = self._guard("observer", open_receipts) if ALL_OPEN else None
            for receipt in receipts or ():
                self._guard("observer", receipt.add_verdicts, verdicts, ended_by=ended_by)
            if not self._has_checked_settings:
                self._has_checked_settings = True
                self._guard("metrics", self._check_settings)
            caller = self._labels_of(verdicts[0].call.agent, verdicts[0].call.thread_id)
            tools = [self._shared.tools[caller.agent, verdict.call.tool] for verdict in verdicts]
            event = DecisionEvent(verdicts, caller, tools, started, duration, error)
            if model is not None:
                event.model = partial(self._guard, "tracing", self._model_name, *model)
            is_about_slots = verdicts[0].before_slots is not None
            self._dispatch(event, self._slot_sinks if is_about_slots else self._decision_sinks)
            if refunds:
                self.record_refunds(refunds)
            if ending is not None:
                self.stream("ended", ending)
        except Exception as failure:
            self.record_error("metrics", failure)
        return record

    def record_charge(
        self, charge: Verdict, *, is_call: bool = True, task_id: str | None = None
    ) -> None:
        """Record that a call, which was allowed before, is charged to a limit now."""
        if not self.is_new(task_id):
            return
        call, (charged,) = charge.call, charge.plan.rules
        # A limit in dry run counts a call when it checks it, because it may refuse it then.
        charged_calls = call.amount if is_call and charged.limit.enforce else 0
        caller = self._labels_of(call.agent, call.thread_id)
        event = DecisionEvent([charge], caller, charged_calls=charged_calls)
        self._dispatch(event, self._charge_sinks)

    def record_refunds(self, refunds: Sequence[Refund]) -> None:
        """Record refunds of one agent's calls on one thread."""
        for receipt in self._guard("observer", open_receipts) or ():
            self._guard("observer", receipt.refund, refunds)
        if refunds:
            caller = self._labels_of(refunds[0].call.agent, refunds[0].call.thread_id)
            for refund in refunds:
                tool = self._shared.tools[caller.agent, refund.call.tool]
                self._guard("metrics", self._metrics.count_refund, caller, tool, refund)
            self._guard("threads", self._usage.refund, caller, refunds)

    def record_spend(
        self,
        call: Call,
        spent: Sequence[LimitSpend],
        *,
        model: str | None,
        estimated: bool = False,
        price: str = NONE,
    ) -> None:
        """Record what a model run has spent, once for each run."""
        # `record_charge` records the limits' counts after the run.
        caller = self._labels_of(call.agent, call.thread_id)
        labels = self.model_label(model), price, "estimated" if estimated else "reported"
        self._guard("metrics", self._metrics.count_spend, caller, spent, *labels)
        self._guard("threads", self._usage.spend, caller, spent)

    def record_near(
        self,
        verdict: Verdict,
        index: int,
        number: int,
        used: int,
        observer: Callable[[QuotaEvent], None] | None,
    ) -> None:
        """Record that a limit's count has newly used a share; `log` guards it."""
        call, status = verdict.call, verdict.decision.limits[index]
        count = status.counts[number]._replace(used=used)
        status, scope = status._replace(counts=(count,)), count.scope
        reason = partial(reason_of, verdict.outcome.value, status, scope)
        # A crossing of a single share is recorded with the decision.
        if isinstance(verdict.plan.rules[index].limit.near, tuple):
            subject = self.subject_label(scope, count.subject)
            event = DecisionEvent([verdict], self._labels_of(call.agent, call.thread_id))
            event.subjects |= {(status.limit, scope): subject} if subject else {}
            event.notices.append((verdict, status, scope, Level.NEAR))
            self.count(names.CROSSINGS, call.agent, limit_label(status.limit), scope, Level.NEAR)
            logs.log_notices(event)
            self.stream("near", reason(subject))
        if observer is not None:
            whose = {THREAD: call.thread_id, RUN: None}.get(scope, count.subject)
            reason = partial(reason, str(whose) if whose else None)
            observer(QuotaEvent(langchain_quota_event="near", **reason()))

    def begin_series(self, agent: str | None, limits: Sequence[Limit]) -> None:
        """Create the series of an agent's limits at 0."""
        label = self._labels_of(agent).agent
        self._guard("metrics", self._metrics.begin_series, label, limits, self._shared.tools)

    def record_run(
        self, agent: str | None, used: Sequence[LimitSpend], *, has_ended: bool = True
    ) -> None:
        """Record what a run has used of each limit when it ends, or that it begins."""
        caller = self._labels_of(agent)
        self._guard("metrics", self._metrics.observe_run, caller, used, has_ended=has_ended)

    def record_grants(
        self, agent: str | None, grants: Iterable[tuple[str, Scope, Unit, int]]
    ) -> None:
        """Record what was granted on top of limits: by limit, scope and unit, how much."""
        for limit, scope, unit, amount in grants:
            labels = limit_label(limit), scope, UNIT_LABELS[unit]
            self.count(names.GRANTED, agent, *labels, amount=in_base_unit(amount, unit))

    def record_freezes(self, source: str, frozen: Sequence[Freeze] | None) -> None:
        """Record that a store answered and, if it was read, who is frozen under one prefix."""
        self._guard("threads", self._shared.record_freezes, source, frozen)

    def warn_of_estimate(self, model: str, created_at: UserLine) -> None:
        """Warn, once for each model, that its tokens are estimated: its provider reports none."""
        # Estimates for a run that was cut off are counted without a warning. Where warnings are
        # errors, log it instead: the answer is paid, and an error would lose it.
        name = self.model_label(model)
        if name not in self._estimated_models:
            self._estimated_models.add(name)
            warning = f"model {name!r} reports no usage, or too little: its tokens are estimated. "
            try:
                created_at.warn(warning + logs.USAGE_REMEDY)
            except QuotaWarning:
                self.log(logs.estimated, name)

    def record_wait(self, agent: str | None, limit: str, decision: str, seconds: float) -> None:
        """Record how long a call has waited."""
        labels = self._labels_of(agent).agent, limit_label(limit), decision
        self.observe(names.WAIT_SECONDS, seconds, *labels)

    def record_start(self, call: Call, limit: str, outcome: str, *waits: float) -> None:
        """Record how long an allowed call has waited for its start time, and in its batch."""
        self.record_wait(call.agent, limit, outcome, sum(waits))
        if waits[0]:
            caller = self._labels_of(call.agent, call.thread_id)
            waited = Verdict(call, Outcome.ALLOWED, waited=waits[0])
            event = DecisionEvent([waited], caller, [self._shared.tools[caller.agent, call.tool]])
            event.started = time.time_ns() - int(waits[0] * 10**9)
            event.attributes = {DECISION: outcome, LIMIT: limit_label(limit)}
            self._guard("tracing", self._make_spans, event)

    def begin_waits(self, agent: str | None, limit: str) -> None:
        """Create the series of a limit's waiting calls at 0."""
        caller = self._labels_of(agent)
        self._guard("metrics", self._metrics.change_waiting, caller, limit, 0)

    @contextmanager
    def waiting(self, agent: str | None, limit: str, thread_id: object) -> Iterator[None]:
        """Count a waiting call while the context is open."""
        caller = self._labels_of(agent, thread_id)
        self._change_waiting(caller, limit, 1)
        try:
            yield
        finally:
            self._change_waiting(caller, limit, -1)

    def _change_waiting(self, caller: CallerLabels, limit: str, change: int) -> None:
        self._guard("metrics", self._metrics.change_waiting, caller, limit, change)
        self._guard("threads", self._usage.change_waiting, caller, limit, change)

    def record_slot_waits(self, verdict: Verdict, waited_for: str) -> None:
        """Record how long a call has waited for its slots, or in vain."""
        for name in (rule.limit.name for rule in verdict.plan.rules):
            # After a refusal in dry run the call runs, so the other limits have allowed it.
            refused_at = verdict.refused.get(name)
            outcome = verdict.outcome if refused_at else Outcome.ALLOWED
            is_other = verdict.outcome is Outcome.BLOCKED and not refused_at
            if not is_other and refused_at != STORE:
                waited = verdict.waited if name == waited_for else 0.0
                self.record_wait(verdict.call.agent, name, outcome.value, waited)

    def record_reset(self, agent: str | None, thread_id: object, rules: Sequence[Rule]) -> None:
        """Record that a thread, if there is one, has used nothing."""
        self._guard("threads", self._usage.reset, self._labels_of(agent, thread_id), rules)

    def is_new(self, task_id: str | None, event: object = None) -> bool:
        """Record an event of a task, and return False if it was recorded before, as in a re-run."""
        return self._recent_tasks.add(task_id, event).is_new

    def count(self, spec: MetricSpec, agent: str | None, *labels: str, amount: float = 1) -> None:
        """Add an amount to an agent's counter."""
        agent_label = self._labels_of(agent).agent
        self._guard("metrics", self._metrics.count, spec, amount, agent_label, *labels)

    def record_fallback(self, agent: str | None, store: str, action: str, calls: int = 1) -> None:
        """Add calls that were checked while the store was unavailable."""
        self.count(names.STORE_FALLBACKS, agent, store, action, amount=calls)
        self._guard("threads", self._usage.record_fallback, calls)

    def count_error(self, component: str, error_type: str) -> None:
        """Count a failure that is no exception."""
        self._guard("metrics", self._metrics.count, names.ERRORS, 1, component, error_type)

    def observe(self, spec: MetricSpec, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        self._guard("metrics", self._metrics.observe, spec, seconds, *labels)

    def log(self, line: Callable[P, None], *event: P.args, **options: P.kwargs) -> None:
        """Write a line to the log."""
        self._guard("observer", line, *event, **options)

    def log_first(self, line: Callable[P, None], *event: P.args, **options: P.kwargs) -> None:
        """Write a line to the log once for each event, and at most 1,000 times."""
        logged = self._shared.logged[line]
        if event not in logged and len(logged) < _MAX_FIRST_LINES:
            logged.add(event)
            self.log(line, *event, **options)

    def _dispatch(self, event: DecisionEvent, sinks: Sinks) -> None:
        """Pass an event to sinks, in their order, and its notices to the log."""
        for component, sink in sinks:
            # As `_guard` does, without its arguments: this runs several times for each call.
            try:
                sink(event)
            except Exception as error:
                self.record_error(component, error)
        if event.notices:
            self._guard("threads", self._usage.keep_refusals, event)
            self._guard("observer", logs.log_notices, event)
        if self.streams:
            self._guard("observer", stream.write_decisions, event)

    def _check_settings(self) -> None:
        """Warn of settings that cannot work, at the first decision, when all limits exist."""
        shared = self._shared
        for quota in sorted(shared.settings.subject_label.keys() - shared.quotas.keys()):
            quotas = ", ".join(map(repr, sorted(shared.quotas))) or "none"
            self.created_at.warn(
                f"subject_label has {quota!r}, and no quota has this name: they are {quotas}"
            )

    def _labels_of(self, agent: str | None, thread_id: object = None) -> CallerLabels:
        """Return the labels of an agent and, if there is one, a thread."""
        component, bounded, name, thread = "metrics", UNNAMED, UNNAMED, None
        try:
            bounded = self._shared.agents["", agent]
            name = limit_label(agent) if agent else UNNAMED
            component = "thread_label"
            if thread_id is not None:
                thread = self._thread_label(thread_id)
        except Exception as error:
            self.record_error(component, error)
        return CallerLabels(bounded, name, thread)

    def _model_name(self, model: "BaseChatModel", settings: Mapping[str, object]) -> str | None:
        """Return the name of the model that a call with these settings reaches."""
        newest, name = self._newest_model
        if settings or model is not newest:
            name = compat.model_parameters(model, settings).get("ls_model_name")
            if not settings:
                # To ask a model takes long, and an agent has one for all its calls.
                self._newest_model = model, name
        return None if name is None else str(name)

    def store_label(self, name: str) -> str:
        """Return the label of a shared store."""
        return self._guard("metrics", self._shared.stores.__getitem__, ("", name)) or UNNAMED

    def model_label(self, model: str | None) -> str:
        """Return the label of a model."""
        return self._guard("metrics", self._shared.models.__getitem__, ("", model)) or UNNAMED
