"""Counts and logs failures, so that they do not reach the agent."""

import logging
from contextlib import suppress
from functools import cache, partial

from langchain_quota.telemetry.labels import described, label
from langchain_quota.telemetry.metrics import Metrics

logger = logging.getLogger("langchain_quota")


class _Guard:
    """Counts an exception that a block raises as a failure; the code behind the block goes on."""

    def __init__(self, failures: "Failures", component: str) -> None:
        self._failures = failures
        self._component = component

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failures.record(self._component, error)
        return True


class Failures:
    """Counts failures of one registry's telemetry, and of the user's functions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()
        self.guard = cache(partial(_Guard, self))
        """Guards blocks of a component: whatever they raise does not reach the agent."""

    def record(self, component: str, error: Exception, *, log: bool | None = None) -> None:
        """Count a failure of a component; log it if `log` is true, by default once per kind."""
        error_type = label(type(error).__name__)
        # A label function hides ids, so its exception must not show them in the log.
        shown = None if component in {"thread_label", "subject_label"} else error
        # If counting or logging fails, there is no place left to report it.
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
                    "%s of langchain-quota failed with %s%s; %s are only "
                    "counted in langchain_quota_errors_total",
                    component,
                    error_type,
                    f" ({described(error)})" if component == "store" else "",
                    what,
                    exc_info=shown,
                )
