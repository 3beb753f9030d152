"""Telemetry of charges that are no decisions: what is charged later, given back, or spent."""

import logging
from collections.abc import Sequence

from opentelemetry.trace import Span

from langchain_quota.decision import (
    Call,
    Decision,
    LimitStatus,
    Outcome,
    Refund,
    Scope,
    Unit,
)
from langchain_quota.errors import QuotaWarning
from langchain_quota.levels import Level
from langchain_quota.telemetry.instruments import Instruments
from langchain_quota.telemetry.labels import UNNAMED, agent_name, label, own_label
from langchain_quota.telemetry.logs import log_crossing, log_refusal
from langchain_quota.telemetry.metrics import Exemplar
from langchain_quota.telemetry.reruns import RecentTasks
from langchain_quota.telemetry.tracing import exemplar
from langchain_quota.user_line import UserLine

logger = logging.getLogger("langchain_quota")

Spent = tuple[str, Unit, int]
"""The name of a limit, its unit, and how much a model run has spent of it, from 0."""

Granted = tuple[str, Scope, Unit, int]
"""The name of a limit, the scope of its threshold, its unit, and how much was added to it."""

_REPORT_IT = (
    "ChatOpenAI with a base_url, or with an HTTP client of your own, reports it while it streams "
    "with stream_usage=True"
)
_PRICE_IT = (
    "name the model with model=, or give its price with prices=. Others are only counted, "
    "in langchain_quota_unknown_prices_total"
)


class ChargeRecorder:
    """Makes charges visible that are no part of a decision."""

    def __init__(self, instruments: Instruments) -> None:
        self.near = instruments.settings.near
        self._thread_label = instruments.settings.thread_label
        self._metrics = instruments.metrics
        self._agents = instruments.agents
        self._models = instruments.models
        self._usage = instruments.usage
        self._failed = instruments.failures.record
        self._guard = instruments.failures.guard
        self._tasks = RecentTasks()
        # By agent and model; labels of models are bounded.
        self._warned: set[tuple[str, str, str]] = set()

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
        agent, thread = self._labels(call.agent, call.thread_id)
        shown = self._exemplar(None)
        # A limit on trial counts a call when it judges it: it may let it run and would refuse it.
        counted = call.amount if is_call and status.enforced else 0
        with self._guard("metrics"):
            self._metrics.charged(agent, status, counted, shown)
        self._tell(status, call, agent, thread)
        with self._guard("threads"):
            charged = Decision(call, Outcome.ALLOWED, (status,))
            self._usage.record(agent, thread, [charged])

    def record_refunds(self, refunds: Sequence[Refund]) -> None:
        """Subtract the charges of one agent's calls on one thread from what was counted."""
        if not refunds:
            return
        agent, thread = self._labels(refunds[0].call.agent, refunds[0].call.thread_id)
        for refund in refunds:
            with self._guard("metrics"):
                self._metrics.refunded(agent, refund.limit, refund.call.amount)
            with self._guard("threads"):
                if thread is not None:
                    self._usage.refund(agent, thread, refund.limit, refund.call.amount)

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
        name, thread = self._labels(agent, thread_id)
        with self._guard("metrics"):
            shown = self._models.label(model)
            self._metrics.model_run(name, shown, estimated=estimated)
            for limit, unit, amount in spent:
                self._metrics.spend(name, limit, unit, shown, amount)
        with self._guard("threads"):
            if thread is not None:
                self._usage.spend(name, thread, spent)

    def record_granted(self, agent: str | None, granted: Sequence[Granted]) -> None:
        """Count what was granted on top of limits."""
        name, _ = self._labels(agent, None)
        for each in granted:
            with self._guard("metrics"):
                self._metrics.grant(name, *each)

    def record_unknown_price(self, agent: str | None, model: str | None) -> None:
        """Count a model call that has no price; the first of a model is logged."""
        name, _ = self._labels(agent, None)
        with self._guard("metrics"):
            shown = self._models.label(model)
            self._metrics.unknown_price(name, shown)
        with self._guard("observer"):
            shown = self._models.label(model)
            if self._is_first("price", name, shown):
                logger.warning(
                    "model %r in agent %r has no price: %s", shown, agent_name(agent), _PRICE_IT
                )

    def warn_of_estimate(self, model: str, made_at: UserLine) -> None:
        """Warn, once for each model, that its tokens are estimated: its provider reports none."""
        # Estimates for a run that was cut off are counted without a warning. Where warnings are
        # errors, it is logged instead: the answer is paid, and an error would lose it.
        shown = self._models.label(model)
        if self._is_first("usage", "", shown):
            try:
                made_at.warn(
                    f"model {shown!r} reports no usage: its tokens are estimated. {_REPORT_IT}"
                )
            except QuotaWarning:
                logger.warning(
                    "model %r reports no usage: its tokens are estimated. %s", shown, _REPORT_IT
                )

    def _is_first(self, what: str, agent: str, model: str) -> bool:
        """Whether it is to be logged: once for each agent and model."""
        known = (what, agent, model)
        if known in self._warned:
            return False
        self._warned.add(known)
        return True

    def _labels(self, agent: str | None, thread_id: object) -> tuple[str, str | None]:
        """The labels of an agent and, if there is one, a thread."""
        name, thread = UNNAMED, None
        with self._guard("metrics"):
            name = self._agents.label(agent)
        with self._guard("thread_label"):
            if thread_id is not None:
                own = self._thread_label
                thread = (
                    label(thread_id) if own is None else own_label(own, thread_id, "thread_label")
                )
        return name, thread

    def _exemplar(self, span: Span | None) -> Exemplar:
        try:
            return exemplar(span)
        except Exception as error:
            self._failed("tracing", error)
            return None

    def _tell(self, status: LimitStatus, call: Call, agent: str, thread: str | None) -> None:
        """Log a refusal; count and log the thresholds that a charge has crossed."""
        if status.reason is not None and status.refusal_scope is not None:
            with self._guard("observer"):
                log_refusal(status, status.refusal_scope, agent_name(call.agent), thread)
        threshold_events: Sequence[tuple[Scope, Level]] = ()
        with self._guard("metrics"):
            threshold_events = status.threshold_events(self.near)
        for scope, reached in threshold_events:
            with self._guard("metrics"):
                self._metrics.crossed(agent, status.limit, scope, reached)
            # A log handler or filter may raise: it must not disturb the agent.
            with self._guard("observer"):
                log_crossing(status, scope, reached, agent_name(call.agent), thread)
