"""Turns a decision into counters, a span, a row in the table of threads, and logs.

No failure in here reaches the agent. Each part of the work has a `try` of its own, whose
`except Exception` gives the failure to `Failures` with the component's name: so the other parts go
on. A cancellation or an interrupt is no `Exception`, and passes.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from opentelemetry.trace import Span

from langchain_quota.decision import Answer, Decision, LimitStatus, Outcome
from langchain_quota.limits import Limit, named_tools
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.captures import captures
from langchain_quota.telemetry.charges import ChargeRecorder
from langchain_quota.telemetry.instruments import Instruments
from langchain_quota.telemetry.labels import OTHER, agent_name
from langchain_quota.telemetry.logs import log_answer, log_question
from langchain_quota.telemetry.metrics import ended_by
from langchain_quota.telemetry.stores import NEARLY_FULL
from langchain_quota.telemetry.tracing import NOWHERE, Tracing, carried
from langchain_quota.telemetry.unjudged import UnjudgedCalls

logger = logging.getLogger("langchain_quota")

_outcome = attrgetter("outcome")


@dataclass(slots=True)
class Recorded:
    """The result of recording decisions."""

    is_new: bool
    trace: Mapping[str, str] | None


class Recorder(ChargeRecorder):
    """Turns what middlewares report into metrics, spans and logs."""

    def __init__(
        self, instruments: Instruments, tracing: Tracing, *, count_unjudged_calls: bool = False
    ) -> None:
        super().__init__(instruments)
        self._tools = instruments.tools
        self._stores = instruments.stores
        self._tracing = tracing
        self.unjudged: UnjudgedCalls | None = None
        if count_unjudged_calls:
            self.unjudged = UnjudgedCalls(instruments)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: all copies share its metrics."""
        return self

    def watch_limits(self, limits: Iterable[Limit]) -> None:
        """Learn the limits of a middleware: the tools that they name keep their names."""
        for limit in limits:
            self._tools.keep(named_tools(limit))

    def watch_store(self, store: object) -> bool:
        """Show how full a store is, if it has a property `occupancy`; whether it has."""
        try:
            return self._stores.add(store)
        except Exception as error:
            self._failed("threads", error)
            return False

    def store_nearly_full(self, store: Any) -> bool:
        """Log that a watched store is nearly full, if it is; whether nothing is left to log."""
        try:
            occupancy = Occupancy(*store.occupancy)
            is_full = occupancy.share >= NEARLY_FULL
            if is_full:
                logger.warning(
                    "the store is nearly full: %d counts of at most %d make no room for others",
                    occupancy.keys - occupancy.droppable,
                    occupancy.max_keys,
                )
        except Exception as error:
            self._failed("threads", error)
            return True
        return is_full

    def learn_tools(self, agent: str | None, names: Iterable[str]) -> None:
        """Learn an agent's tools: they get labels before names that its model invents."""
        with self._guard("metrics"):
            group = self._agents.label(agent)
            for name in names:
                self._tools.label(name, group)

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
        """Turn the decisions about a batch of one agent's calls into metrics, spans and logs."""
        took = time.time_ns() - started
        trace = trace or self._tasks.begun(task_id)
        outcomes = list(map(_outcome, decisions))
        if not decisions or self._tasks.seen(task_id, outcomes):
            return Recorded(False, trace)
        for captured in captures.get():
            captured.extend(decisions)
        agent, thread = self._labels(decisions[0].call.agent, decisions[0].call.thread_id)
        place = NOWHERE
        with self._guard("tracing"):
            place = self._tracing.place(trace)
        for decision in decisions:
            tool, span = OTHER, None
            with self._guard("metrics"):
                tool = self._tools.label(decision.call.tool, agent)
            with self._guard("tracing"):
                span = self._tracing.record(
                    decision,
                    tool=tool,
                    thread=thread,
                    started=started,
                    error=error,
                    place=place,
                )
                if span is not None and place.is_root and (begun := carried(span)):
                    # The run's later spans become its children if no span is active.
                    trace = begun
                    self._tasks.begin(task_id, begun)
                    place = self._tracing.place(begun)
            self._count(decision, agent, thread, tool, span, after_refusal=after_refusal)
        with self._guard("threads"):
            self._usage.record(agent, thread, decisions)
        self._count_batch(decisions, agent, took)
        return Recorded(True, trace)

    def record_run(self, agent: str | None, task_id: str | None) -> None:
        """Count a run of an agent that begins in a task."""
        if self._tasks.seen(task_id):
            return
        with self._guard("metrics"):
            self._metrics.run_begun(self._agents.label(agent))

    def record_lost_root_run(self, agent: str | None, cause: str) -> None:
        """Count a run with a budget of its own that may belong to another root run."""
        with self._guard("metrics"):
            self._metrics.lost_root_run(self._agents.label(agent), cause)

    def record_error(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of a user's function or store, and log it."""
        self._failed(component, error, log=log)

    def record_recovery(self, component: str) -> None:
        """Log that a component which failed works again."""
        with self._guard("observer"):
            # A warning, so that it is seen where the failure was.
            logger.warning("%s of langchain-quota works again", component)

    def observe_store(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store."""
        with self._guard("metrics"):
            self._metrics.observe_store(operation, outcome, seconds)

    def record_wait(self, agent: str | None, limit: str, decision: str, seconds: float) -> None:
        """Time how long a call has waited for others to end."""
        with self._guard("metrics"):
            self._metrics.waited(self._agents.label(agent), limit, decision, seconds)

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
        agent, thread = self._labels(call.agent, call.thread_id)
        for status in decision.refused_by:
            with self._guard("metrics"):
                self._metrics.refused_at_once(agent, status, self._exemplar(None))
            self._tell(status, call, agent, thread)

    def record_fallback(self, agent: str | None, action: str, calls: int) -> None:
        """Count the calls that were judged without the shared store: `"deny"` or `"allow"`."""
        with self._guard("metrics"):
            self._metrics.fallback(self._agents.label(agent), action, calls)

    def warn_misspelt(self, agent: str | None, meant: Mapping[str, str]) -> None:
        """Log the tools that limits name and the agent does not have, each with one like it."""
        with self._guard("observer"):
            hints = (f"{name!r} (did you mean {tool!r}?)" for name, tool in meant.items())
            logger.warning(
                "limits name tools that agent %r does not have: %s",
                agent_name(agent),
                ", ".join(hints),
            )

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
        name, _ = self._labels(agent, None)
        with self._guard("metrics"):
            self._metrics.asked(name, limits)
            log_question(agent_name(agent), limits)

    def record_answer(
        self, agent: str | None, limits: Sequence[str], answer: Answer, task_id: str | None
    ) -> bool:
        """Count and log a person's answer; whether it is new."""
        if self._tasks.seen(task_id, answer):
            return False
        name, _ = self._labels(agent, None)
        with self._guard("metrics"):
            self._metrics.answered(name, limits, answer.type)
            log_answer(agent_name(agent), limits, answer)
        return True

    def record_reset(
        self, agent: str | None, thread_id: object, limits: Sequence[LimitStatus]
    ) -> None:
        """Show that a thread, if there is one, has used nothing."""
        name, thread = self._labels(agent, thread_id)
        with self._guard("threads"):
            if thread is not None:
                self._usage.reset(name, thread, limits)

    def _count(  # noqa: PLR0913 - what a decision is counted by
        self,
        decision: Decision,
        agent: str,
        thread: str | None,
        tool: str,
        span: Span | None,
        *,
        after_refusal: bool,
    ) -> None:
        shown = self._exemplar(span)
        with self._guard("metrics"):
            self._metrics.record(decision, agent, tool, shown, after_refusal=after_refusal)
        for status in decision.limits:
            self._tell(status, decision.call, agent, thread)

    def _count_batch(self, decisions: Sequence[Decision], agent: str, took: int) -> None:
        """Time how long judging took, in nanoseconds, and count a run that is ended by it."""
        with self._guard("metrics"):
            shared = refused = False
            for decision in decisions:
                for status in decision.limits:
                    shared = shared or status.shared
                    refused = refused or status.reason is not None
            # The system's clock may have been set back since.
            seconds = took / 1e9 if took > 0 else 0.0
            self._metrics.judged(decisions[0].call.kind, seconds, shared=shared)
            limit = ended_by(decisions) if refused else None
            if limit is not None:
                self._metrics.run_ended(agent, limit)
