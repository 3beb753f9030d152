"""Telemetry and /metrics, as a route and as a server; checked by mypy and pyright, never run."""

from datetime import timedelta
from typing import assert_type

from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_tracer_provider
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from langchain_quota import (
    MemoryStore,
    ModelCallLimit,
    Quota,
    QuotaHeadersMiddleware,
    QuotaMiddleware,
    Telemetry,
    export_metrics,
    hmac_label,
    metrics_app,
    quota_app,
    start_metrics_server,
)

Telemetry(registry=CollectorRegistry(), tracer_provider=TracerProvider(), near=0.9)
Telemetry(spans="refused", thread_label=hmac_label("a secret of 16 bytes or more"), max_tools=20)
Telemetry(max_exported_threads=100, thread_ttl=timedelta(minutes=10), max_agents=50)
Telemetry(tracer_provider=get_tracer_provider(), spans="off", thread_label=str)

# The label of a thread that one knows.
label: str = hmac_label(b"a secret of 16 bytes or more")("thread-7")

app = Starlette(routes=[Route("/metrics", metrics_app())])
app.add_route("/metrics", metrics_app())
app.router.routes.append(Mount("/inner", metrics_app(CollectorRegistry())))
app.mount("/quota", quota_app(dashboards_url="https://grafana.example.org"))

quota = QuotaMiddleware([ModelCallLimit(quotas=[Quota(9, per="user_id")])], store=MemoryStore())
app.add_middleware(QuotaHeadersMiddleware, quota=quota, subject=lambda scope: scope["state"])
QuotaHeadersMiddleware(app, quota=quota, subject=lambda _: {"user_id": 7}, replace_answers=False)

server = start_metrics_server()
assert_type((server.url, server.addr, server.port), tuple[str, str, int])
assert_type(server.page_url, str | None)
server.close()
with start_metrics_server(0, "0.0.0.0", registry=CollectorRegistry()) as running:
    assert_type(running.url, str)
start_metrics_server(certfile="cert.pem", keyfile="key.pem", client_cafile="ca.pem")

export_metrics(ConsoleMetricExporter(), timedelta(minutes=1), CollectorRegistry()).flush()


def of_text(thread_id: str) -> str:
    return thread_id[:4]


# Not these. A thread id can be of any type, so a label is made from any object.
Telemetry(thread_label=of_text)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(spans="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(thread_ttl=600)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Telemetry(CollectorRegistry())  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
hmac_label(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
start_metrics_server("9464")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
start_metrics_server(9464, "127.0.0.1", "cert.pem")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
app.add_middleware(QuotaHeadersMiddleware, quota=quota)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
metrics_app("/metrics")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
