"""What becomes of a decision: counters, a span, the thread table, logs. It never raises."""

import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Self
from weakref import WeakKeyDictionary

from opentelemetry.trace import Span, TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from langchain_quota.decision import Call, Decision, Level, Outcome, Refund, Standing
from langchain_quota.limits import (
    STORE,
    Limit,
    Scope,
    check_choice,
    check_share,
    named_tools,
)
from langchain_quota.locks import fork_safe_lock
from langchain_quota.stores import Occupancy
from langchain_quota.telemetry.labels import (
    OTHER,
    UNNAMED,
    ToolLabels,
    agent_label,
    described,
    hmac_label,
    label,
)
from langchain_quota.telemetry.metrics import Exemplar, Metrics
from langchain_quota.telemetry.multiprocess import FILE, checked_directory
from langchain_quota.telemetry.stores import NEARLY_FULL, StoreTable
from langchain_quota.telemetry.tracing import Place, Spans, Tracing, carried, exemplar
from langchain_quota.telemetry.usage import UsageTable

__all__ = ["Telemetry", "capturing", "default_telemetry", "hmac_label"]

ThreadLabel = Callable[[object], str]

logger = logging.getLogger("langchain_quota")


@dataclass(frozen=True, slots=True)
class _Options:
    """What all `Telemetry` of one registry must agree on."""

    near: float
    thread_label: ThreadLabel | None
    max_exported_threads: int
    thread_ttl: timedelta
    max_tools: int


class _Errors:
    """The one place where failures end: counted, and logged once per kind if nobody says when."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

    def failed(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        error_type = label(type(error).__name__)
        # What hides thread ids must not have them logged.
        shown = None if component == "thread_label" else error
        # Nobody is left to tell that counting or logging a failure failed.
        with suppress(Exception):
            self._metrics.failed(component, error_type)
        with suppress(Exception):
            if log is None:
                log = (component, error_type) not in self._logged
                what = "further failures of this kind"
            else:
                what = "until it recovers, further failures"
            if log:
                self._logged.add((component, error_type))
                logger.error(
                    "%s of langchain-quota failed with %s%s; %s are only counted in "
                    "langchain_quota_errors_total",
                    component,
                    error_type,
                    f" ({described(error)})" if component == "store" else "",
                    what,
                    exc_info=shown,
                )


class _RecentTasks:
    """The newest ids of tasks, to know a task that runs again, and the traces that they began."""

    MOST = 10_000

    def __init__(self) -> None:
        self._ids: OrderedDict[str, object] = OrderedDict()
        self._traces: dict[str, Mapping[str, str]] = {}
        self._lock = fork_safe_lock()

    def seen(self, task_id: str | None, what: object = None) -> bool:
        """Whether the id was given before, and last with the same; it is remembered."""
        if task_id is None:
            return False
        with self._lock:
            if task_id in self._ids and self._ids[task_id] == what:
                return True
            self._ids[task_id] = what
            if len(self._ids) > self.MOST:
                oldest, _ = self._ids.popitem(last=False)
                self._traces.pop(oldest, None)
            return False

    def begin(self, task_id: str | None, trace: Mapping[str, str]) -> None:
        """Remember the trace that a task began: if it runs again, its state does not know it."""
        with self._lock:
            if task_id is not None and task_id in self._ids:
                self._traces[task_id] = trace

    def begun(self, task_id: str | None) -> Mapping[str, str] | None:
        """The trace that a task began when it ran before."""
        return None if task_id is None else self._traces.get(task_id)


class _Signals:
    """What is made once per registry."""

    def __init__(self, registry: CollectorRegistry, options: _Options) -> None:
        self.options = options
        directory = checked_directory()
        self.metrics = Metrics(registry)
        self.errors = _Errors(self.metrics)
        self.tools = ToolLabels(options.max_tools)
        self.stores = StoreTable()
        self.usage = UsageTable(
            near=options.near,
            max_exported=options.max_exported_threads,
            ttl=options.thread_ttl.total_seconds(),
            fullest_store=self.stores.fullest,
            on_error=self._table_failed,
            path=None if directory is None else directory / FILE,
        )
        registry.register(self.usage)

    def _table_failed(self, error: Exception) -> None:
        self.errors.failed("threads", error)


_signals: WeakKeyDictionary[CollectorRegistry, _Signals] = WeakKeyDictionary()
_signals_lock = fork_safe_lock()


def _signals_of(registry: CollectorRegistry, options: _Options) -> _Signals:
    with _signals_lock:
        signals = _signals.get(registry)
        if signals is None:
            signals = _signals[registry] = _Signals(registry, options)
    for name in _Options.__slots__:
        ours, theirs = getattr(options, name), getattr(signals.options, name)
        if ours != theirs:
            raise ValueError(
                f"{name}={ours!r} conflicts with {name}={theirs!r} of another Telemetry on the "
                "same registry: make one Telemetry, and give it to all middlewares"
            )
    return signals


def usage_of(registry: CollectorRegistry) -> UsageTable | None:
    """What this process decides for the metrics of a registry, if it does."""
    signals = _signals.get(registry)
    return None if signals is None else signals.usage


@dataclass(frozen=True, slots=True)
class Emitted:
    """What became of decisions.

    Attributes:
        is_new: Whether they are new; not those of a re-run.
        trace: The first span of the run, where there is no active one to be a child of.
    """

    is_new: bool
    trace: Mapping[str, str] | None = None


class Telemetry:
    """Makes every judged call visible: Prometheus metrics, an OpenTelemetry span, logs.

    It never raises into the agent: what fails is counted in `langchain_quota_errors_total` and
    logged once; only a cancellation or an interrupt passes through. Several on one registry share
    its metrics. Attributes of spans that are not ours alone have the names of OpenTelemetry's
    semantic conventions (`gen_ai.*`, `error.type`).

    Args:
        registry: Where the metrics are registered.
        tracer_provider: Makes the spans; `None` for OpenTelemetry's global provider.
        near: The used share, above 0 and at most 1, from which a limit counts as near.
        spans: Which calls get a span: `"all"`, only those `"refused"` (blocked, skipped, would
            block), or none (`"off"`).
        thread_label: Makes the label of a thread from its id, for ids that must not be seen in
            metrics and spans; see `hmac_label`. By default the id itself.
        max_exported_threads: The most threads that have series of their own, from 0 (none); the
            nearest to their limits come first, then the most recently refused, then the most
            recent.
        thread_ttl: How long a thread without calls keeps its series, and a user or another subject
            of a quota is counted; above 0.
        max_tools: The most tool names per agent that are labels, beside those that limits name,
            from 0; further ones are labelled `_other`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds, or conflicts with another `Telemetry` on the
            same registry: the message names the argument and the value. Or, in prometheus_client's
            multi-process mode, its directory cannot be written to, or has less than 4 MiB free.

    Examples:
        >>> from langchain_quota import ModelCallLimit, QuotaMiddleware, Telemetry, hmac_label
        >>> from prometheus_client import CollectorRegistry
        >>> telemetry = Telemetry(
        ...     registry=CollectorRegistry(),
        ...     near=0.9,
        ...     thread_label=hmac_label("a secret of 16 bytes or more"),
        ... )
        >>> quota = QuotaMiddleware([ModelCallLimit(run_limit=10)], telemetry=telemetry)
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings with defaults
        self,
        *,
        registry: CollectorRegistry = REGISTRY,
        tracer_provider: TracerProvider | None = None,
        near: float = 0.8,
        spans: Spans = "all",
        thread_label: ThreadLabel | None = None,
        max_exported_threads: int = 500,
        thread_ttl: timedelta = timedelta(hours=1),
        max_tools: int = 100,
    ) -> None:
        if not isinstance(registry, CollectorRegistry):
            raise TypeError(f"registry must be a CollectorRegistry, not {registry!r}")
        if tracer_provider is not None and not isinstance(tracer_provider, TracerProvider):
            raise TypeError(f"tracer_provider must be a TracerProvider, not {tracer_provider!r}")
        check_share("near", near)
        check_choice("spans", spans, ("all", "refused", "off"))
        if thread_label is not None and not callable(thread_label):
            raise TypeError(f"thread_label must be a function or None, not {thread_label!r}")
        if not isinstance(thread_ttl, timedelta):
            raise TypeError(f"thread_ttl must be a timedelta, not {thread_ttl!r}")
        if thread_ttl <= timedelta(0):
            raise ValueError(f"thread_ttl must be positive, not {thread_ttl!r}")
        for argument, value in (
            ("max_exported_threads", max_exported_threads),
            ("max_tools", max_tools),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{argument} must be a whole number, not {value!r}")
            if value < 0:
                raise ValueError(f"{argument} must be 0 or more, not {value!r}")
        options = _Options(near, thread_label, max_exported_threads, thread_ttl, max_tools)
        self._signals = _signals_of(registry, options)
        self.near = near
        self._thread_label = thread_label
        self._reruns = _RecentTasks()
        self._tracing = Tracing(tracer_provider, spans, hashed_threads=thread_label is not None)

    def watch(self, limits: Sequence[Limit]) -> None:
        """Learn the limits of a middleware: the tools that they name keep their names.

        Args:
            limits: The limits.
        """
        for limit in limits:
            self._signals.tools.keep(named_tools(limit))

    def watch_store(self, store: object) -> bool:
        """Show how full a store is, if it says so.

        Args:
            store: The store; one that has a property `occupancy`, as `MemoryStore` has.

        Returns:
            Whether it says so.
        """
        with self._guarded("threads"):
            return self._signals.stores.add(store)
        return False

    def nearly_full(self, store: Any) -> bool:
        """Log that a store which is watched is nearly full, if it is.

        Args:
            store: The store.

        Returns:
            Whether there is nothing more to log of it.
        """
        told = True
        with self._guarded("threads"):
            occupancy = Occupancy(*store.occupancy)
            told = occupancy.share >= NEARLY_FULL
            if told:
                logger.warning(
                    "the store is nearly full: %d counts of at most %d make no room for others",
                    occupancy.keys - occupancy.droppable,
                    occupancy.max_keys,
                )
        return told

    def offered(self, agent: str | None, tools: Iterable[str]) -> None:
        """Learn the tools that an agent has: they are labels before any that its model invents.

        Args:
            agent: The name of the agent, if it has one.
            tools: The names of the tools.
        """
        with self._guarded("metrics"):
            self._signals.tools.offer(agent_label(agent), tools)

    def emit(
        self,
        decisions: Sequence[Decision],
        *,
        started: int,
        error: BaseException | None = None,
        task_id: str | None = None,
        trace: Mapping[str, str] | None = None,
    ) -> "Emitted":
        """Turn the decisions about a batch of one agent's calls into all signals.

        Args:
            decisions: In the order in which they were made.
            started: When judging began, in nanoseconds since the Unix epoch.
            error: The exception by which a refusal is about to reach the caller, if it is.
            task_id: The task that judged. One that is seen again is a re-run (a failed node
                that was resumed): its decisions were emitted before.
            trace: What an earlier call for this run gave as its trace.
        """
        outcomes = [decision.outcome for decision in decisions]
        trace = trace or self._reruns.begun(task_id)
        if not decisions or self._reruns.seen(task_id, outcomes):
            return Emitted(is_new=False, trace=trace)
        for captured in _captures.get():
            captured.extend(decisions)
        agent, thread = self._labels(decisions[0].call)
        place = self._place(trace)
        for decision in decisions:
            tool = self._tool(agent, decision.call)
            span = self._span(decision, tool, thread, started, error, place)
            if span is not None and place.is_root:
                trace = self._begin(task_id, span)
                place = self._place(trace)
            self._count(decision, agent, tool, span)
            for standing in decision.standings:
                if standing.scope is not None:
                    self._log_refusal(standing, agent, thread)
                self._watch_thresholds(standing, agent, thread)
        self._remember(agent, thread, decisions)
        return Emitted(is_new=True, trace=trace)

    # What every call goes through catches what fails itself: the guard costs more than some of it.

    def _place(self, trace: Mapping[str, str] | None) -> Place:
        try:
            return self._tracing.place(trace)
        except Exception as failure:  # noqa: BLE001 - telemetry must not break the agent
            self._signals.errors.failed("tracing", failure)
            return Place(None, is_root=False)

    def _tool(self, agent: str, call: Call) -> str:
        try:
            return self._signals.tools.label(agent, call.tool)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("metrics", failure)
            return OTHER

    def _span(  # noqa: PLR0913, PLR0917 - what a span tells
        self,
        decision: Decision,
        tool: str,
        thread: str | None,
        started: int,
        error: BaseException | None,
        place: Place,
    ) -> Span | None:
        try:
            return self._tracing.record(
                decision, tool=tool, thread=thread, started=started, error=error, place=place
            )
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("tracing", failure)
            return None

    def _begin(self, task_id: str | None, span: Span) -> Mapping[str, str] | None:
        """Begin a trace for those spans of the run that find no active one."""
        with self._guarded("tracing"):
            carrier = carried(span)
            if carrier:
                self._reruns.begin(task_id, carrier)
                return carrier
        return None

    def _exemplar(self, span: Span | None) -> Exemplar:
        try:
            return exemplar(span)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("tracing", failure)
            return None

    def _count(self, decision: Decision, agent: str, tool: str, span: Span | None) -> None:
        shown = self._exemplar(span)
        try:
            self._signals.metrics.record(decision, agent, tool, shown)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("metrics", failure)

    def charge(self, call: Call, standing: Standing, *, task_id: str | None = None) -> None:
        """Make visible that a call which was let through before is charged now.

        Args:
            call: The call.
            standing: How the limit that it is charged to stands.
            task_id: As for `emit`.
        """
        if self._reruns.seen(task_id):
            return
        agent, thread = self._labels(call)
        shown = self._exemplar(None)
        with self._guarded("metrics"):
            self._signals.metrics.charged(agent, standing, call.amount, shown)
        self._watch_thresholds(standing, agent, thread)
        self._remember(agent, thread, [Decision(call, Outcome.ALLOWED, (standing,))])

    def forget(self, agent: str | None, thread_id: object) -> None:
        """Forget what a thread has used: its series end until its next call.

        Args:
            agent: The name of the agent, if it has one.
            thread_id: The thread's id as the caller gave it; `None` does nothing.
        """
        name, thread = self._labels(Call("model", agent=agent, thread_id=thread_id))
        if thread is not None:
            with self._guarded("threads"):
                self._signals.usage.forget(name, thread)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: what it counts in is shared by all."""
        return self

    def failed(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of what a user hung in, and log it.

        Args:
            component: What failed, as the metric's label has it: `"observer"`, `"store"` or
                `"dynamic_limit"`.
            error: What it raised.
            log: Whether it is logged now, for who tells when it has `recovered`; by default once
                per kind.
        """
        self._signals.errors.failed(component, error, log=log)

    def missed(self, agent: str | None, limit: str, tool: str, hint: str) -> None:
        """Log that a limit names a tool that an agent does not have.

        Args:
            agent: The name of the agent, if it has one.
            limit: The limit's name.
            tool: The tool that it names.
            hint: What to do.
        """
        with self._guarded("observer"):
            logger.warning(
                "limit %r names the tool %r, which agent %r does not offer its model: %s",
                limit,
                tool,
                agent_label(agent),
                hint,
            )

    def recovered(self, component: str) -> None:
        """Log that what failed works again.

        Args:
            component: As for `failed`.
        """
        with self._guarded("observer"):
            # As loud as is needed to be seen where the failure was.
            logger.warning("%s of langchain-quota works again", component)

    def stored(self, operation: str, outcome: str, seconds: float) -> None:
        """Time a request to the shared store.

        Args:
            operation: `"reserve"`, `"peek"` or `"reset"`.
            outcome: `"ok"`, `"error"` or `"timeout"`.
            seconds: How long it took.
        """
        with self._guarded("metrics"):
            self._signals.metrics.stored(operation, outcome, seconds)

    def fell_back(self, agent: str | None, action: str, calls: int) -> None:
        """Count decisions that were taken without the shared store.

        Args:
            agent: The name of the agent, if it has one.
            action: `"deny"` or `"allow"`.
            calls: How many calls were judged.
        """
        with self._guarded("metrics"):
            self._signals.metrics.fell_back(agent_label(agent), action, calls)

    def refund(self, refunds: Sequence[Refund]) -> None:
        """Take charges back from what was counted.

        Args:
            refunds: The charges of one agent's calls, on one thread.
        """
        if not refunds:
            return
        agent, thread = self._labels(refunds[0].call)
        for refund in refunds:
            call = refund.call
            with self._guarded("metrics"):
                self._signals.metrics.refunded(agent, refund.limit, call.amount)
            if thread is not None:
                with self._guarded("threads"):
                    self._signals.usage.refund(agent, thread, refund.limit, call.amount)

    def _remember(self, agent: str, thread: str | None, decisions: Sequence[Decision]) -> None:
        try:
            self._signals.usage.record(agent, thread, decisions)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("threads", failure)

    def _labels(self, call: Call) -> tuple[str, str | None]:
        """The labels of the call's agent and, if there is one, thread."""
        agent, thread = UNNAMED, None
        try:
            agent = agent_label(call.agent)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("metrics", failure)
        try:
            if call.thread_id is not None:
                thread = label(self._shown(call.thread_id))
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("thread_label", failure)
        return agent, thread

    def _shown(self, thread_id: object) -> object:
        """What is shown of a thread's id.

        Raises:
            TypeError: `thread_label` returns no string.
        """
        if self._thread_label is None:
            return thread_id
        made: object = self._thread_label(thread_id)
        if inspect.iscoroutine(made):
            made.close()
        if not isinstance(made, str):
            raise TypeError(f"thread_label must return a string, not a {type(made).__name__}")
        return made

    def _log_refusal(self, standing: Standing, agent: str, thread: str | None) -> None:
        event = "refused" if standing.enforced else "would refuse"
        with self._guarded("observer"):
            resets = standing.resets_at
            _log(
                logging.DEBUG,
                event,
                standing,
                str(standing.scope),
                (agent, thread),
                quota_resets_at=None if resets is None else resets.isoformat(),
            )

    def _watch_thresholds(self, standing: Standing, agent: str, thread: str | None) -> None:
        crossings: Sequence[tuple[Scope, Level]] = ()
        try:
            crossings = standing.crossings(self.near)
        except Exception as failure:  # noqa: BLE001 - the same
            self._signals.errors.failed("metrics", failure)
        for scope, reached in crossings:
            with self._guarded("metrics"):
                self._signals.metrics.crossed(agent, standing, scope, reached)
            severity = logging.WARNING if reached is Level.EXHAUSTED else logging.INFO
            # A handler or filter that raises is somebody who looks on.
            with self._guarded("observer"):
                _log(severity, reached, standing, scope, (agent, thread))

    def _guarded(self, component: str) -> "_Guard":
        return _Guard(self._signals.errors, component)


class _Guard:
    """What fails within is counted and goes no further: telemetry must not break the agent."""

    __slots__ = ("_component", "_errors")

    def __init__(self, errors: _Errors, component: str) -> None:
        self._errors = errors
        self._component = component

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._errors.failed(self._component, error)
        return True


@cache
def default_telemetry() -> Telemetry:
    """The `Telemetry` of middlewares that are given none: global registry and tracer provider."""
    return Telemetry()


_captures: ContextVar[tuple[list[Decision], ...]] = ContextVar("captures", default=())


@contextmanager
def capturing(decisions: list[Decision]) -> Iterator[None]:
    """Append every decision made in this context, and in tasks started from it, to the list."""
    token = _captures.set((*_captures.get(), decisions))
    try:
        yield
    finally:
        _captures.reset(token)


def _log(
    severity: int,
    event: str,
    standing: Standing,
    scope: Scope,
    where: tuple[str, str | None],
    **more: str | None,
) -> None:
    agent, thread = where
    # Where the store could not be asked there is no count.
    used = None if scope == STORE else standing.used(scope)
    threshold = standing.threshold(scope)
    logger.log(
        severity,
        "limit %r %s: agent %r, thread %r, %s",
        standing.limit,
        event,
        agent,
        thread,
        "store unavailable" if scope == STORE else f"{scope} {used} of {threshold}",
        extra={
            "quota_event": str(event),
            "quota_limit": standing.limit,
            "quota_scope": scope,
            "quota_agent": agent,
            "quota_thread": thread,
            "quota_used": used,
            "quota_threshold": threshold,
            **more,
        },
    )
