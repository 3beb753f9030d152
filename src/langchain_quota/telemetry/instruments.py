"""The sinks of a registry, and the guard around them.

No failure of telemetry reaches the agent, because `Instruments.guard` calls the sinks.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.store_errors import UNREADABLE, QuotaStoreError
from langchain_quota.runtime.sync_async import P, T, fork_safe_lock
from langchain_quota.telemetry import names
from langchain_quota.telemetry.labels import (
    NONE,
    TOOL,
    BoundedLabels,
    Label,
    custom_label,
    describe,
    label,
)
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.metrics import Metrics
from langchain_quota.telemetry.usage import UsageTable
from langchain_quota.telemetry.workers import Freeze, Snapshot, shared_directory

_MAX_MODELS = 100
"""Maximum of distinct names of models, which callers invent behind a gateway, and of stores."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in which all `Telemetry` of one registry must agree."""

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
        self.directory = shared_directory("write to")
        self.agents = BoundedLabels(settings.max_agents)
        self.tools = BoundedLabels(settings.max_tools, nameless=NONE, allowed=TOOL)
        self.models = BoundedLabels(_MAX_MODELS)
        self.stores = BoundedLabels(_MAX_MODELS)
        self.quotas: dict[str, str] = {}
        """By what the quotas of all middlewares count, by their names."""
        self.outages: dict[str, str] = {}
        """The stores that are unavailable, by label, with the names of the clients that log it."""
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
            subject_label=self.subject_label,
        )
        # The events that are logged once, by line, and the kinds of failures, by component.
        self.logged: defaultdict[object, set[tuple[object, ...]]] = defaultdict(set)
        # A scrape reads the table first. It must not have a subject's refusal that the counters do
        # not have yet: the alert LimitBreached would take it for a refusal of another subject.
        registry.register(self.usage)
        self.metrics = Metrics(registry, settings.near)

    def guard(
        self,
        component: str,
        sink: Callable[P, T],
        *event: P.args,
        **options: P.kwargs,
    ) -> T | None:
        """Call a component's sink with an event, and return its result, or `None` if it failed.

        A failure is counted, and does not reach the agent.
        """
        try:
            return sink(*event, **options)
        # A cancellation or an interrupt is no `Exception`, so it reaches the agent.
        except Exception as error:
            self.failed(component, error)
            return None

    def failed(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of a component; log it if `log` is true, by default once per kind."""
        error_type = label(type(error).__name__)
        # A label function hides ids, so its exception must not show them in the log. An outage is
        # no fault in code, so its error needs no traceback. An unreadable reply may be one.
        hides = component in {"thread_label", "subject_label"}
        is_code = not isinstance(error, QuotaStoreError) or isinstance(error.__cause__, UNREADABLE)
        logged_error = error if is_code and not hides else None
        # If counting or logging fails, there is no place left to report it.
        with suppress(Exception):
            self.metrics.count(names.ERRORS, 1, component, error_type)
        with suppress(Exception):
            logged = self.logged[component]
            is_first = (error_type,) not in logged
            logged.add((error_type,))
            if is_first if log is None else log:
                logger.error(
                    "%s of langchain-quota failed with %s%s; %s are only "
                    "counted in langchain_quota_errors_total",
                    component,
                    error_type,
                    f" ({describe(error)})" if component == "store" else "",
                    "further failures of this kind"
                    if log is None
                    else "until it recovers, further failures",
                    exc_info=logged_error,
                )

    def record_freezes(self, source: str, frozen: Sequence[Freeze] | None) -> None:
        """Note that a store answered and, if it was read, who is frozen under one prefix."""
        if frozen:
            labels, quotas = self.settings.subject_label, self.quotas.copy()
            makes = {quotas[quota]: labels[quota] for quota in labels.keys() & quotas}
            makes[THREAD] = self.settings.thread_label or str
            frozen = [
                (per or "all", self._label(makes.get(per), who) or "", by and label(by), at, until)
                for per, who, by, at, until in frozen
            ]
        self.usage.record_freezes(source, frozen)

    def subject_label(self, quota: str, subject: str) -> str | None:
        """Return the label of a quota's subject, or `None` if it must not be shown."""
        return self._label(self.settings.subject_label.get(quota), subject)

    def _label(self, make: Label | None, subject: str) -> str | None:
        argument = "subject_label"
        return make and self.guard(argument, custom_label, make, subject, argument)


_instruments: WeakKeyDictionary[CollectorRegistry, Instruments] = WeakKeyDictionary()
_lock = fork_safe_lock()


def instruments_of(registry: CollectorRegistry, settings: Settings) -> Instruments:
    """Return the instruments of a registry; create them if it has none."""
    with _lock:
        instruments = _instruments.get(registry)
        if instruments is None:
            instruments = _instruments[registry] = Instruments(registry, settings)
    for name in Settings.__slots__:
        new, existing = getattr(settings, name), getattr(instruments.settings, name)
        if new != existing:
            raise ValueError(
                f"{name}={new!r} conflicts with {name}={existing!r} of another Telemetry on the "
                "same registry: make one Telemetry, and give it to all middlewares (one without "
                "telemetry= makes the default). It holds until the process ends. To change it "
                "before, in a notebook, give the new one a registry of its own: "
                "Telemetry(registry=CollectorRegistry(), …)"
            )
    return instruments


def usage_of(registry: CollectorRegistry) -> UsageTable | None:
    """Return the usage table of this process for a registry, or `None` if it has none."""
    instruments = _instruments.get(registry)
    return None if instruments is None else instruments.usage
