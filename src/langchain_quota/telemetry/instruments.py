"""The objects that are made once per registry and shared by every `Telemetry` on it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry

from langchain_quota.locks import fork_safe_lock
from langchain_quota.telemetry.failures import Failures
from langchain_quota.telemetry.labels import BoundedLabels, Label, own_label, tool_labels
from langchain_quota.telemetry.metrics import Metrics
from langchain_quota.telemetry.multiprocess import checked_directory
from langchain_quota.telemetry.stores import StoreTable
from langchain_quota.telemetry.usage import UsageTable

_MAX_MODELS = 100
"""How many distinct names of models there may be: gateways pass on what a caller invents."""


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
    """The metrics of a registry, and their sources."""

    def __init__(self, registry: CollectorRegistry, settings: Settings) -> None:
        self.settings = settings
        directory = checked_directory()
        self.metrics = Metrics(registry, settings.near)
        self.failures = Failures(self.metrics)
        self.agents = BoundedLabels(settings.max_agents)
        self.tools = tool_labels(settings.max_tools)
        self.models = BoundedLabels(_MAX_MODELS)
        self.stores = StoreTable()
        self.usage = UsageTable(
            near=settings.near,
            max_exported=settings.max_exported_threads,
            subject_label=self._subject_label,
            max_subjects=settings.max_exported_subjects,
            ttl=settings.thread_ttl.total_seconds(),
            fullest_store=self.stores.fullest,
            on_error=lambda error: self.failures.record("threads", error),
            directory=directory,
        )
        registry.register(self.usage)

    def _subject_label(self, quota: str, subject: str) -> str | None:
        """The label of a quota's subject; `None` if it is not to be shown."""
        make = self.settings.subject_label.get(quota)
        if make is None:
            return None
        try:
            return own_label(make, subject, "subject_label")
        except Exception as error:
            self.failures.record("subject_label", error)
            return None


_instruments: WeakKeyDictionary[CollectorRegistry, Instruments] = WeakKeyDictionary()
_lock = fork_safe_lock()


def instruments_of(registry: CollectorRegistry, settings: Settings) -> Instruments:
    """The instruments of a registry, made if it has none."""
    with _lock:
        found = _instruments.get(registry)
        if found is None:
            found = _instruments[registry] = Instruments(registry, settings)
    for name in (each.name for each in fields(Settings)):
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
