"""The ways to serve /metrics: a server of its own, and an ASGI app for a server that exists."""

import asyncio
import errno
import os
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import Thread
from typing import Any, Self
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIServer

from prometheus_client import REGISTRY, CollectorRegistry, Metric, make_asgi_app, start_http_server
from prometheus_client.multiprocess import MultiProcessCollector

from langchain_quota.ops import page as web
from langchain_quota.runtime.arguments import validate_switch, validate_type
from langchain_quota.runtime.sync_async import as_async, run_sync
from langchain_quota.telemetry.instruments import usage_of
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.reading import UsageReader
from langchain_quota.telemetry.workers import is_alive, shared_directory

HOSTS_VARIABLE = "LANGCHAIN_QUOTA_METRICS_HOSTS"
"""The environment variable with the host names to answer to, separated by commas."""

ADDR_VARIABLE = "LANGCHAIN_QUOTA_METRICS_ADDR"
"""The environment variable with the default address to bind."""

LOOPBACK = "127.0.0.1"

_MAX_PORT = 65_535

_WsgiApp = Callable[..., Iterable[bytes]]
"""An app for a server of the standard library: of the request, and of what starts the response."""


class _WorkersCollector(MultiProcessCollector):
    """A collector of the metrics of all workers, also for a process that checks no calls."""

    def __init__(self, registry: CollectorRegistry, directory: Path) -> None:
        super().__init__(None, str(directory))  # type: ignore[no-untyped-call]  # no types there
        self._registry = registry
        self._others = UsageReader(directory, web.log_unreadable)

    def collect(self) -> Iterator[Metric]:
        """Render the metrics of all workers, by this worker's settings, else by another's."""
        # First the table, then the counters: see `Instruments`.
        of_subjects = list((usage_of(self._registry) or self._others).collect())
        # A file is empty while a worker creates it, and prometheus_client cannot read it then.
        files = [file for file in Path(self._path).glob("*.db") if _size(file)]
        current = [str(file) for file in files if not _is_outdated(file)]
        yield from self.merge(current, accumulate=True)  # type: ignore[no-untyped-call]
        yield from of_subjects


def _size(file: Path) -> int:
    """Return the size of a file, 0 if it was removed meanwhile."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _is_outdated(file: Path) -> bool:
    """Return True if a file has what a process does now, and the process has died."""
    kind, _, pid = file.stem.rpartition("_")
    return kind == "gauge_livesum" and not is_alive(int(pid))


def resolve_registry(registry: CollectorRegistry) -> CollectorRegistry:
    """Return the registry to serve: in multi-process mode one with the metrics of all workers."""
    validate_type("registry", registry, CollectorRegistry, "a CollectorRegistry")
    directory = shared_directory()
    if directory is None:
        return registry
    registry_of_all = CollectorRegistry()
    registry_of_all.register(_WorkersCollector(registry, directory))
    return registry_of_all


class MetricsServer:
    """A running metrics server; `close()` it, or use it in a `with` statement.

    `start_metrics_server` makes it.

    Attributes:
        addr: The address that it is bound to.
        port: The port that it is bound to.
        url: Where Prometheus finds the metrics.
        page_url: Where people find the page; `None` without it.

    Examples:
        >>> from urllib.request import urlopen
        >>> from langchain_quota import start_metrics_server
        >>> with start_metrics_server(port=0) as server:
        ...     with urlopen(server.url) as response:
        ...         response.status
        200
    """

    def __init__(
        self, addr: str, httpd: WSGIServer, thread: Thread, *, tls: bool, page: bool
    ) -> None:
        self.addr, self.port = addr, httpd.server_port
        host = f"[{addr}]" if ":" in addr else addr
        self.url = f"{'https' if tls else 'http'}://{host}:{self.port}/metrics"
        self.page_url = self.url.removesuffix("metrics") if page else None
        self._httpd, self._thread = httpd, thread

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_metrics_server(  # noqa: PLR0913 - the server's settings, all with defaults
    port: int = 9464,
    addr: str | None = None,
    *,
    certfile: str | None = None,
    keyfile: str | None = None,
    client_cafile: str | None = None,
    registry: CollectorRegistry = REGISTRY,
    page: bool = True,
    dashboards_url: str | None = None,
    allowed_hosts: Sequence[str] | None = None,
) -> MetricsServer:
    """Serve the metrics over HTTP, in a daemon thread, and a page that shows them at `/`.

    In prometheus_client's multi-process mode it serves the metrics of all workers.

    Args:
        port: The port, from 0 to 65535; 0 takes a free one.
        addr: The address to bind; by default that in `LANGCHAIN_QUOTA_METRICS_ADDR`, else
            127.0.0.1. In a container, bind 0.0.0.0. Everybody who can reach it can read thread ids.
        certfile: The server's certificate, in a PEM file, for TLS.
        keyfile: The certificate's key, in a PEM file.
        client_cafile: Authorities, in a PEM file, whose certificates clients must show.
        registry: The metrics.
        page: Whether browsers get the page at `/`, and its data at `/quota.json`.
        dashboards_url: Where your Grafana is, for a link on the page.
        allowed_hosts: Names that requests may use for the host, besides addresses and localhost; by
            default those in `LANGCHAIN_QUOTA_METRICS_HOSTS`, separated by commas, else none on
            a loopback address, and any on others.

    Raises:
        TypeError: `port` is no whole number, `addr` or `dashboards_url` no string, or `page` no
            switch.
        ValueError: `port` is out of bounds, `dashboards_url` no address, `allowed_hosts` not names
            of hosts, only one of `certfile` and `keyfile` is given, or `client_cafile` without
            them; in multi-process mode, if the directory does not exist.
        OSError: The address cannot be bound, or a certificate or key cannot be read; the message
            names it.

    Examples:
        >>> from langchain_quota import start_metrics_server
        >>> server = start_metrics_server(port=0)
        >>> server.url
        'http://127.0.0.1:.../metrics'
        >>> server.close()
    """
    validate_type("port", port, int, "a whole number")
    if not 0 <= port <= _MAX_PORT:
        raise ValueError(f"port must be from 0 to {_MAX_PORT}, not {port!r}")
    if not isinstance(addr, str | None):
        raise TypeError(f'addr must be a string or None, not {addr!r}: write "127.0.0.1", say')
    if (certfile is None) != (keyfile is None):
        raise ValueError(f"certfile and keyfile go together, not {certfile=!s} with {keyfile=!s}")
    if client_cafile is not None and certfile is None:
        raise ValueError(f"client_cafile={client_cafile} needs certfile and keyfile")
    if certfile is not None:
        _check_certificates(certfile, keyfile, client_cafile)
    validate_switch("page", page)
    bound_addr = addr or os.environ.get(ADDR_VARIABLE) or LOOPBACK
    is_local = _is_loopback(bound_addr)
    hosts = _parse_hosts(allowed_hosts, is_local=is_local)
    site = web.Page(registry, dashboards_url=dashboards_url)
    try:
        httpd, thread = start_http_server(
            port,
            bound_addr,
            registry=resolve_registry(registry),
            certfile=certfile,
            keyfile=keyfile,
            client_cafile=client_cafile,
            client_auth_required=client_cafile is not None,
        )
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        reason = "the port is taken" if is_in_use else error.strerror or str(error)
        raise OSError(
            error.errno,
            f"cannot serve metrics on {bound_addr}:{port}: {reason}; give another port= (0 takes "
            f"a free one), or another address with addr= or {ADDR_VARIABLE}",
        ) from error

    if metrics := httpd.get_app():
        httpd.set_app(_site(metrics, site if page else None, hosts))
    if isinstance(httpd.socket, ssl.SSLSocket):
        # Shake hands in each connection's own thread, because a silent client must not stop others.
        httpd.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
    # A broken connection is the client's problem and needs no traceback on stderr.
    httpd.handle_error = _log_broken_connection  # type: ignore[method-assign,assignment]

    server = MetricsServer(bound_addr, httpd, thread, tls=certfile is not None, page=page)
    where = f", and the page on {server.page_url}" if page else ""
    if is_local:
        where += f" (this machine only; in a container set addr or {ADDR_VARIABLE} to 0.0.0.0)"
    logger.info("metrics are served on %s%s", server.url, where)
    return server


def _parse_hosts(hosts: Sequence[str] | None, *, is_local: bool) -> Sequence[str] | None:
    """Return the host names that are given or in the environment; `None` for all."""
    variable = os.environ.get(HOSTS_VARIABLE, "").replace(" ", "")
    if hosts is None:
        hosts = variable.split(",") if variable else () if is_local else None
    if isinstance(hosts, str) or any(_parse_host(name) != name for name in hosts or ()):
        must = 'be names in small letters, without a port, such as ["host.docker.internal"]'
        raise ValueError(f"allowed_hosts must {must}, not {hosts!r}")
    return hosts


def _is_loopback(addr: str) -> bool:
    with suppress(ValueError):
        return addr == "localhost" or ip_address(addr).is_loopback
    return False


def _log_broken_connection(_request: object, client: object) -> None:
    logger.debug("a scrape from %r failed", client, exc_info=sys.exception())


def _check_certificates(certfile: str, keyfile: str | None, client_cafile: str | None) -> None:
    """Raise if the files cannot be read, before anything is bound."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile)
        if client_cafile is not None:
            context.load_verify_locations(client_cafile)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot serve metrics with {certfile=!s} {keyfile=!s} {client_cafile=!s}: "
            f"{error.strerror or error}",
        ) from error


def _site(metrics: _WsgiApp, page: web.Page | None, hosts: Sequence[str] | None) -> _WsgiApp:
    """Return an app that answers browsers at `/` with the page, and all others with the metrics.

    It answers only to addresses, localhost and these hosts; `None`: to all.
    """

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        # An attacker may let a name of theirs point to this machine (DNS rebinding).
        host = _parse_host(environ.get("HTTP_HOST", ""))
        if hosts is not None and host not in hosts and not _is_this_machine(host):
            start("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
            remedy = f"give this name in allowed_hosts=[…] or {HOSTS_VARIABLE}"
            return [f"Use 127.0.0.1 or localhost, or {remedy}.\n".encode()]
        keys = ("HTTP_ACCEPT", "QUERY_STRING", "HTTP_ACCEPT_ENCODING")
        accept, query, encoding = (environ.get(key, "") for key in keys)
        name = environ["PATH_INFO"].removeprefix("/")
        # Whoever scrapes `/` gets metrics.
        is_of_page = name == "quota.json" or (not name and "text/html" in accept)
        if page is not None and environ["REQUEST_METHOD"] == "GET" and is_of_page:
            status, headers, body = page.answer(name, query, encoding)
            start(status, list(headers.items()))
            return [body]
        if not web.accepts_gzip(encoding):
            environ["HTTP_ACCEPT_ENCODING"] = ""  # prometheus_client does not look at the weight
        return metrics(environ, start)

    return answer


def _parse_host(host: str) -> str:
    """Return the name in a host that may have a port, in small letters."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def _is_this_machine(name: str) -> bool:
    """Return True for an address or localhost: names that no foreign DNS server resolves."""
    with suppress(ValueError):
        return name == "localhost" or bool(ip_address(name))
    return False


class _MetricsApp:
    """An ASGI app: an instance, not a function, so that Starlette takes it as a route."""

    def __init__(self, registry: CollectorRegistry) -> None:
        served = resolve_registry(registry)
        self._apps = [make_asgi_app(served, disable_compression=plain) for plain in (True, False)]

    async def __call__(self, scope: web.Message, receive: web.Receive, send: web.Send) -> None:
        """Answer one request, and render in a worker thread."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        encoding = dict(scope["headers"]).get(b"accept-encoding", b"").decode("latin-1")
        request = await receive()
        sent: list[web.Message] = []

        def get_request() -> web.Message:
            return request

        # The app awaits only these two functions, so its thread needs no event loop.
        app = self._apps[web.accepts_gzip(encoding)]
        rendering = app(scope, as_async(get_request), as_async(sent.append))
        await asyncio.to_thread(run_sync, rendering)
        for message in sent:
            await send(message)


# By Starlette's types, `add_route` takes a function of a request, so the arguments are open.
def metrics_app(registry: CollectorRegistry = REGISTRY) -> Callable[..., Any]:
    """Return an ASGI app that answers with the metrics, rendered off the event loop.

    Add it as a route, not as a mount (a mount answers `/metrics` with a redirect); in FastAPI with
    `app.add_route("/metrics", metrics_app())`. It has no access control of its own:
    everybody who can reach it can read thread ids. In prometheus_client's multi-process mode it
    answers with the metrics of all workers.

    Args:
        registry: The metrics.

    Raises:
        TypeError: `registry` is no registry.
        ValueError: In multi-process mode, if the directory does not exist.

    Examples:
        >>> from starlette.applications import Starlette
        >>> from starlette.routing import Route
        >>> from langchain_quota import metrics_app
        >>> app = Starlette(routes=[Route("/metrics", metrics_app())])
    """
    return _MetricsApp(registry)
