"""The options of Telemetry; checked by mypy and pyright, never run."""

from datetime import timedelta

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_tracer_provider
from prometheus_client import CollectorRegistry

from langchain_quota import ModelCallLimit, QuotaMiddleware, Telemetry, hmac_label


def masked(thread_id: object) -> str:
    return str(thread_id)[:4]


telemetry = Telemetry(
    registry=CollectorRegistry(),
    tracer_provider=TracerProvider(),
    near=0.9,
    spans="refused",
    thread_label=hmac_label("a secret of 16 bytes or more"),
    max_exported_threads=100,
    thread_ttl=timedelta(minutes=10),
    max_tools=20,
    max_agents=50,
)
QuotaMiddleware([ModelCallLimit(run_limit=10)], telemetry=telemetry)

Telemetry(tracer_provider=get_tracer_provider(), spans="off")
Telemetry(thread_label=masked)
Telemetry(thread_label=str)
Telemetry(thread_label=lambda thread_id: f"{thread_id}")

# The label of a thread that one knows.
label: str = hmac_label(b"a secret of 16 bytes or more")("thread-7")


def of_text(thread_id: str) -> str:
    return thread_id[:4]


# Not these. A thread id can be of any type, so a label is made from any object.
Telemetry(thread_label=of_text)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(thread_label=hash)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(spans="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(thread_ttl=600)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(CollectorRegistry())  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
hmac_label(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
