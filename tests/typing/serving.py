"""/metrics, as a route and as a server; checked by mypy and pyright, never run."""

from typing import assert_type

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from langchain_quota import MetricsServer, metrics_app, start_metrics_server

# As a route.
app = Starlette(routes=[Route("/metrics", metrics_app())])
app.add_route("/metrics", metrics_app())
app.router.routes.append(Mount("/inner", metrics_app(CollectorRegistry())))

# As a server.
server = start_metrics_server()
assert_type(server, MetricsServer)
assert_type(server.url, str)
assert_type(server.addr, str)
assert_type(server.port, int)
server.close()
with start_metrics_server(
    0,
    "0.0.0.0",  # as in a container
    certfile="cert.pem",
    keyfile="key.pem",
    client_cafile="ca.pem",
    registry=CollectorRegistry(),
) as running:
    assert_type(running, MetricsServer)

# Not these.
start_metrics_server("9464")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
start_metrics_server(9464, "127.0.0.1", "cert.pem")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
metrics_app("/metrics")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
