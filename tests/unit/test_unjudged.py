"""How calls that no limit judged are counted and logged: bounded, and never at the agent's cost."""

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
