"""Each argument of `Telemetry`: its bounds, its type, and whether two may differ."""

from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry

HOUR = timedelta(hours=1)
BOUNDS = ("max_exported_threads", "max_exported_subjects", "max_tools", "max_agents")
WRONG: list[tuple[str, object, type[Exception]]] = [
    *[("near", value, ValueError) for value in (0, 1.1, float("nan"))],
    *[("near", value, TypeError) for value in ("0.8", True)],
    *[("spans", value, ValueError) for value in ("some", None)],
    ("thread_ttl", timedelta(0), ValueError),
    ("thread_ttl", 3600, TypeError),
    *[(bound, -1, ValueError) for bound in BOUNDS],
    *[(bound, True, TypeError) for bound in BOUNDS],
    ("registry", CollectorRegistry, TypeError),
    ("tracer_provider", TracerProvider, TypeError),
    ("thread_label", "hidden", TypeError),
    *[("subject_label", x, TypeError) for x in (str, {"tenant": "hidden"}, {7: str})],
    ("count_unchecked_calls", 1, TypeError),
    ("run_histograms", 1, TypeError),
]


@pytest.mark.parametrize(("argument", "value", "error"), WRONG, ids=lambda value: str(value)[:24])
def test_what_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    """The error names the argument and the value, and leaves the registry to another Telemetry."""
    registry = CollectorRegistry()
    with pytest.raises(error, match=rf"^(Invalid )?{argument}\b") as caught:
        Telemetry(**{"registry": registry, argument: value})
    shown = f"{next(iter(value))!r} is mapped to" if isinstance(value, dict) else repr(value)
    assert shown in str(caught.value)
    assert list(registry.collect()) == []
    # The ends of the bounds are allowed.
    ends: Any = {"near": 1, "thread_ttl": timedelta(microseconds=1), **dict.fromkeys(BOUNDS, 0)}
    Telemetry(registry=registry, **ends)


def later(thread_id: object) -> str:
    return str(thread_id)


@pytest.mark.parametrize(
    ("argument", "ours", "theirs"),
    [
        ("near", 0.9, 0.8),
        ("thread_label", later, None),
        ("subject_label", {"tenant": later}, {}),
        ("max_exported_threads", 5, 500),
        ("max_exported_subjects", 5, 100),
        ("thread_ttl", HOUR / 2, HOUR),
        ("max_tools", 7, 100),
        ("max_agents", 7, 1000),
    ],
)
def test_what_shapes_shared_metrics_must_agree(argument: str, ours: Any, theirs: Any) -> None:
    """Of two Telemetry on one registry; the error names the argument and both values."""
    registry = CollectorRegistry()
    Telemetry(registry=registry)
    Telemetry(registry=registry, spans="off", count_unchecked_calls=True, run_histograms=True)
    with pytest.raises(ValueError, match=argument) as caught:
        Telemetry(**{"registry": registry, argument: ours})
    assert f"{argument}={ours!r}" in str(caught.value)
    assert f"{argument}={theirs!r}" in str(caught.value)
