"""How calls that no limit judged are counted and logged: bounded, and never at the agent's cost."""

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
from langchain_quota.telemetry import recorder_of
from langchain_quota.telemetry.metrics import Metrics
from langchain_quota.telemetry.unjudged import UnjudgedCalls


def counting(registry: CollectorRegistry, **options: Any) -> UnjudgedCalls:
    recorder = recorder_of(Telemetry(registry=registry, count_unjudged_calls=True, **options))
    assert recorder.unjudged is not None
    return recorder.unjudged


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_switch_of_a_wrong_type_is_refused(value: Any) -> None:
    """A TypeError names the argument and what was given."""
    with pytest.raises(
        TypeError, match=f"count_unjudged_calls must be True or False, not {value!r}"
    ):
        Telemetry(registry=CollectorRegistry(), count_unjudged_calls=value)


def test_it_is_off_by_default() -> None:
    """A `Telemetry` without the switch has nothing that counts such calls."""
    assert recorder_of(Telemetry(registry=CollectorRegistry())).unjudged is None


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """However many kinds of calls there are, so many are logged."""
    unjudged = counting(CollectorRegistry())

    with caplog.at_level(logging.WARNING, "langchain_quota"):
        for index in range(1010):
            unjudged.record(f"agent {index}", "model", 1)

    assert len(caplog.records) == 1000


def fail(*_: object) -> None:
    raise OSError("disk full")


def test_a_failing_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is counted, and goes no further."""
    registry = CollectorRegistry()
    unjudged = counting(registry)
    monkeypatch.setattr(Metrics, "unjudged", fail)

    unjudged.record("boss", "model", 2)

    labels = {"component": "metrics", "error_type": "OSError"}
    assert registry.get_sample_value("langchain_quota_errors_total", labels) == 1


def test_a_failing_log() -> None:
    """A log handler's filter that raises does no harm: the call is counted."""
    registry = CollectorRegistry()
    unjudged = counting(registry)
    logger = logging.getLogger("langchain_quota")
    logger.addFilter(fail)  # type: ignore[arg-type]
    try:
        unjudged.record("boss", "model", 2)
    finally:
        logger.removeFilter(fail)  # type: ignore[arg-type]

    labels = {"component": "observer", "error_type": "OSError"}
    assert registry.get_sample_value("langchain_quota_errors_total", labels) == 1
