"""The objects that are made once per registry and shared by every `Telemetry` on it."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, values

from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.telemetry.labels import (
    NONE,
    TOOL,
    BoundedLabels,
    Label,
    described,
    label,
    own_label,
)
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.metrics import Metrics
from langchain_quota.telemetry.usage import UsageTable
from langchain_quota.telemetry.usage_rows import Bounds

_MAX_MODELS = 100
"""How many distinct names of models there may be: gateways pass on what a caller invents."""

_MIB = 2**20
_NEEDED = 4 * _MIB
"""The free space, in bytes, that a worker needs to begin.

prometheus_client has one file for each of our types of metrics (counter, histogram, gauges of two
modes). Each file begins with up to a MiB, and takes that from the disk step by step.
"""


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
        directory = _checked_directory()
        self.metrics = Metrics(registry, settings.near)
        self.agents = BoundedLabels(settings.max_agents)
        self.tools = BoundedLabels(settings.max_tools, nameless=NONE, allowed=TOOL)
        self.models = BoundedLabels(_MAX_MODELS)
        ttl = settings.thread_ttl.total_seconds()
        self.usage = UsageTable(
            settings.near,
            Bounds(settings.max_exported_threads, settings.max_exported_subjects, ttl),
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
            self.metrics.add(self.metrics.errors, component, error_type)
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


def multiprocess_directory() -> Path | None:
    """The directory that workers share; `None` unless prometheus_client has multi-process mode."""
    # It chooses its mode when it is imported; the environment may have changed since.
    if not values.ValueClass._multiprocess:  # noqa: SLF001 - it has no public name for it
        return None
    names = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    return next((Path(os.environ[name]) for name in names if name in os.environ), None)


def unusable(directory: Path, purpose: str) -> ValueError:
    """The error for a directory that cannot be read, or written to."""
    return ValueError(
        f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is no directory that this process can "
        f"{purpose}: make it before the workers start, or unset the variable where there is one "
        "worker only"
    )


def _checked_directory() -> Path | None:
    """The directory in which this process shares its counts; `None` without multi-process mode."""
    directory = multiprocess_directory()
    if directory is None:
        return None
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise unusable(directory, "write to")
    disk = shutil.disk_usage(directory)
    if disk.total and disk.free < _NEEDED:
        free = disk.free * 10 // _MIB / 10  # rounded down, or it could look like enough
        raise ValueError(
            f"PROMETHEUS_MULTIPROC_DIR={str(directory)!r} is on a disk with "
            f"{free:.1f} MiB free, and a worker begins with {_NEEDED / _MIB:.1f} MiB "
            "there. On a full disk prometheus_client ends the process (SIGBUS): make room, or name "
            "a directory on another disk"
        )
    return directory
