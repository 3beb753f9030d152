"""Counts and logs failures, so that they do not reach the agent."""

import logging
from contextlib import suppress

from langchain_quota.telemetry.labels import described, label
from langchain_quota.telemetry.metrics import Metrics

logger = logging.getLogger("langchain_quota")


class Failures:
    """Counts failures of one registry's telemetry, and of the user's functions."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[tuple[str, str]] = set()

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
