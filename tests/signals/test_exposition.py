"""/metrics over real HTTP: the server of an agent's own, and the ASGI app as a route."""

import errno
import logging
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.routing import Route

from langchain_quota import metrics_app, start_metrics_server
from tests.certificates import Certificate
from tests.server.prometheus import parse_openmetrics

get = partial(httpx.get, trust_env=False)  # no proxy
VARIABLE = "LANGCHAIN_QUOTA_METRICS_ADDR"
ANYWHERE = "0.0.0.0"  # noqa: S104 - the address that containers need
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ENOUGH = 60.0
"""Seconds after which what a test waits for will not come."""


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry with two counters: apples and pears."""
    registry = CollectorRegistry()
    Counter("apples", "Apples.", registry=registry).inc(3, exemplar={"trace_id": "abc"})
    Counter("pears", "Pears.", registry=registry).inc(4)
    return registry


def trusting(server: Certificate, client: Certificate | None = None) -> ssl.SSLContext:
    """What a client needs that trusts the server, and shows a certificate if it has one."""
    context = ssl.create_default_context(cafile=server.certfile)
    if client is not None:
        context.load_cert_chain(client.certfile, client.keyfile)
    return context


@pytest.mark.parametrize(
    ("environment", "addr", "bound"),
    [
        (None, None, "127.0.0.1"),
        ("127.0.0.2", None, "127.0.0.2"),
        ("127.0.0.2", "127.0.0.3", "127.0.0.3"),
        (None, ANYWHERE, ANYWHERE),
    ],
    ids=["by default", "environment", "argument", "everywhere"],
)
def test_where_it_listens(
    environment: str | None,
    addr: str | None,
    bound: str,
    *,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On this machine only, or where argument or environment say; the log tells, with a hint."""
    caplog.set_level(logging.INFO, logger="langchain_quota")
    if environment is not None:
        monkeypatch.setenv(VARIABLE, environment)
    with start_metrics_server(0, addr, registry=registry) as server:
        assert server.addr == bound
        assert server.url == f"http://{bound}:{server.port}/metrics"
        assert "apples_total 3.0" in get(server.url).text.splitlines()
        if bound == "127.0.0.2":
            with pytest.raises(httpx.ConnectError):
                get(f"http://127.0.0.1:{server.port}/metrics")
    (message,) = caplog.messages
    assert server.url in message
    assert (VARIABLE in message) == (bound != ANYWHERE)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"port": 65_536}, ValueError, "port must be from 0 to 65535, not 65536"),
    ({"port": "9464"}, TypeError, "port must be a whole number, not '9464'"),
    ({"addr": 127}, TypeError, "addr must be a string or None, not 127"),
    ({"addr": "no.such.host.invalid"}, OSError, "cannot serve metrics on no.such.host.invalid:0: "),
    ({"certfile": "some.pem"}, ValueError, "certfile=some.pem"),
    ({"page": 1}, TypeError, "page must be True or False, not 1"),
    ({"dashboards_url": "javascript:1"}, ValueError, "dashboards_url must begin with https://"),
    ({"keyfile": "some.pem"}, ValueError, "keyfile=some.pem"),
    ({"allowed_hosts": "agents"}, ValueError, "names in small letters, without a port, such as"),
    ({"allowed_hosts": ["agents:80"]}, ValueError, "allowed_hosts must be names .*'agents:80'"),
    ({"client_cafile": "some.pem"}, ValueError, "client_cafile=some.pem"),
]


@pytest.mark.parametrize(("given", "error", "text"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_arguments_that_are_refused(
    given: Any, error: type[Exception], text: str, registry: CollectorRegistry
) -> None:
    """The error names the argument and its value, or the address."""
    with pytest.raises(error, match=text):
        start_metrics_server(**{"port": 0, "registry": registry, **given})


def test_a_taken_port(registry: CollectorRegistry) -> None:
    """It is an OSError that names the address and the port; two with port 0 get two real ports."""
    with (
        start_metrics_server(0, registry=registry) as server,
        start_metrics_server(0, registry=registry) as other,
    ):
        assert 0 != server.port != other.port != 0
        taken = f"127.0.0.1:{server.port}: the port is taken"
        with pytest.raises(OSError, match=taken) as caught:
            start_metrics_server(server.port, registry=registry)
        assert caught.value.errno == errno.EADDRINUSE
        assert get(server.url).status_code == 200


def test_tls(registry: CollectorRegistry, certificates: dict[str, Certificate]) -> None:
    """With certificates it speaks TLS and nothing else, with the clients that it knows only."""
    own, client, other = (certificates[each] for each in ("server", "client", "other"))
    given: Any = {"certfile": own.certfile, "keyfile": own.keyfile, "registry": registry}
    with start_metrics_server(0, **given) as server:
        assert server.url == f"https://127.0.0.1:{server.port}/metrics"
        assert "apples_total 3.0" in get(server.url, verify=trusting(own)).text.splitlines()
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            get(server.url, verify=trusting(other))
        with pytest.raises(httpx.TransportError):
            get(server.url.replace("https", "http"))
        # A client that never begins the handshake keeps nobody waiting.
        with socket.create_connection((server.addr, server.port)):
            assert get(server.url, verify=trusting(own), timeout=ENOUGH).status_code == 200
    with start_metrics_server(0, client_cafile=client.certfile, **given) as server:
        for refused in (None, other):
            with pytest.raises(httpx.TransportError):
                get(server.url, verify=trusting(own, refused))
        assert get(server.url, verify=trusting(own, client)).status_code == 200


@pytest.mark.parametrize("broken", ["certfile", "keyfile", "client_cafile"])
def test_an_unusable_file(
    broken: str, registry: CollectorRegistry, certificates: dict[str, Certificate], tmp_path: Path
) -> None:
    """It is an OSError that names the file, and no port is held."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = certificates["server"]
    files: Any = {"certfile": own.certfile, "keyfile": own.keyfile, "client_cafile": own.certfile}
    path = tmp_path / "broken.pem"
    if broken != "certfile":
        path.write_text("nothing of use")
    with pytest.raises(OSError, match=r"broken\.pem"):
        start_metrics_server(port, registry=registry, **{**files, broken: str(path)})
    socket.create_server(("127.0.0.1", port)).close()


@pytest.fixture
def client(registry: CollectorRegistry) -> httpx.AsyncClient:
    """A client of a Starlette application with the app as a route."""
    app = Starlette(routes=[Route("/metrics", metrics_app(registry))])
    app.add_route("/added", metrics_app(registry))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_what_the_app_answers(client: httpx.AsyncClient) -> None:
    """Text by default, OpenMetrics with exemplars where it is accepted, and HEAD without a body."""
    for path in ("/metrics", "/added"):
        response = await client.get(path, headers={"accept": "*/*"})
        assert (response.status_code, response.history) == (200, [])
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "apples_total 3.0" in response.text.splitlines()
    response = await client.get("/metrics", headers={"accept": OPENMETRICS})
    assert response.headers["content-type"].startswith(OPENMETRICS)
    families = {family.name: family for family in parse_openmetrics(response.text)}
    exemplar = families["apples"].samples[0].exemplar
    assert exemplar is not None
    assert exemplar.labels == {"trace_id": "abc"}
    response = await client.head("/metrics")
    assert (response.status_code, response.content) == (200, b"")
