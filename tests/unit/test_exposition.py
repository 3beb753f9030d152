"""/metrics over real HTTP: the server on loopback, and the ASGI app as a route."""

import errno
import logging
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import BlockingError, blockbuster_ctx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.values import MultiProcessValue
from starlette.applications import Starlette
from starlette.routing import Route

from langchain_quota import (
    Call,
    Decision,
    LimitStatus,
    Outcome,
    exposition,
    metrics_app,
    start_metrics_server,
)
from langchain_quota.exposition import ADDR_VARIABLE
from langchain_quota.telemetry.usage import UsageTable
from tests.certificates import Certificate

get = partial(httpx.get, trust_env=False)  # no proxy


@pytest.fixture(autouse=True)
def no_address_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the test run does not choose the address."""
    monkeypatch.delenv(ADDR_VARIABLE, raising=False)


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


class TestServer:
    """start_metrics_server()."""

    def test_binds_loopback_by_default(self, registry: CollectorRegistry) -> None:
        """Without an address only this machine can read the ids of threads."""
        with start_metrics_server(port=0, registry=registry) as server:
            assert server.addr == "127.0.0.1"
            assert server.url == f"http://127.0.0.1:{server.port}/metrics"

    def test_address_from_the_environment(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """LANGCHAIN_QUOTA_METRICS_ADDR is bound when no address is given."""
        monkeypatch.setenv("LANGCHAIN_QUOTA_METRICS_ADDR", "127.0.0.2")
        with start_metrics_server(port=0, registry=registry) as server:
            assert server.addr == "127.0.0.2"
            assert get(server.url).status_code == 200
            with pytest.raises(httpx.ConnectError):
                get(f"http://127.0.0.1:{server.port}/metrics")

    def test_address_argument_wins(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An address that the code gives is bound whatever the environment says."""
        monkeypatch.setenv("LANGCHAIN_QUOTA_METRICS_ADDR", "127.0.0.2")
        with start_metrics_server(port=0, addr="127.0.0.3", registry=registry) as server:
            assert server.addr == "127.0.0.3"
            assert get(server.url).status_code == 200

    def test_taken_port_is_named(self, registry: CollectorRegistry) -> None:
        """A port in use is an OSError that names the address and the port."""
        with start_metrics_server(port=0, registry=registry) as server:
            with pytest.raises(
                OSError, match=f"127.0.0.1:{server.port}: the port is taken"
            ) as taken:
                start_metrics_server(port=server.port, registry=registry)
            assert taken.value.errno == errno.EADDRINUSE
            assert get(server.url).status_code == 200

    @pytest.mark.parametrize("addr", ["192.0.2.1", "no.such.host.invalid"])
    def test_foreign_address_is_named(self, registry: CollectorRegistry, addr: str) -> None:
        """An address that is not of this machine is an OSError that names it."""
        with pytest.raises(OSError, match=f"cannot serve metrics on {addr}:0: "):
            start_metrics_server(port=0, addr=addr, registry=registry)

    @pytest.mark.parametrize("port", [70_000, 65_536, -1])
    def test_a_port_out_of_bounds(self, registry: CollectorRegistry, port: int) -> None:
        """A port that cannot be is a ValueError that names the argument and the value."""
        with pytest.raises(ValueError, match=f"port must be from 0 to 65535, not {port}"):
            start_metrics_server(port, registry=registry)

    def test_an_address_of_a_wrong_type(self, registry: CollectorRegistry) -> None:
        """An address that is no string is a TypeError that names the argument and the value."""
        address: Any = 127
        with pytest.raises(TypeError, match="addr must be a string or None, not 127"):
            start_metrics_server(port=0, addr=address, registry=registry)

    def test_logs_no_hint_elsewhere(
        self, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Bound to all addresses, the log names that and has no hint about containers."""
        caplog.set_level(logging.INFO, logger="langchain_quota")
        with start_metrics_server(
            port=0,
            addr="0.0.0.0",  # noqa: S104 - the address that containers need
            registry=registry,
        ) as server:
            [record] = caplog.records
            assert server.url in record.getMessage()
            assert "container" not in record.getMessage()


class TestTls:
    """start_metrics_server() with certificates."""

    def test_serves_https(
        self, registry: CollectorRegistry, certificates: dict[str, Certificate]
    ) -> None:
        """With a certificate it speaks TLS, as that certificate, and nothing else."""
        own = certificates["server"]
        with start_metrics_server(
            port=0, certfile=own.certfile, keyfile=own.keyfile, registry=registry
        ) as server:
            assert server.url == f"https://127.0.0.1:{server.port}/metrics"
            response = get(server.url, verify=trusting(own))
            assert "apples_total 3.0" in response.text.splitlines()
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                get(server.url, verify=trusting(certificates["other"]))
            with pytest.raises(httpx.TransportError):
                get(server.url.replace("https", "http"))

    def test_clients_must_show_a_certificate(
        self, registry: CollectorRegistry, certificates: dict[str, Certificate]
    ) -> None:
        """With client_cafile only clients that it knows get an answer."""
        own, client = certificates["server"], certificates["client"]
        with start_metrics_server(
            port=0,
            certfile=own.certfile,
            keyfile=own.keyfile,
            client_cafile=client.certfile,
            registry=registry,
        ) as server:
            assert get(server.url, verify=trusting(own, client)).status_code == 200
            for refused in (None, certificates["other"]):
                with pytest.raises(httpx.TransportError):
                    get(server.url, verify=trusting(own, refused))
            assert get(server.url, verify=trusting(own, client)).status_code == 200

    @pytest.mark.parametrize("given", ["certfile", "keyfile", "client_cafile"])
    def test_arguments_that_need_others(self, registry: CollectorRegistry, given: str) -> None:
        """A certificate without key, a key or client authorities alone: ValueError, naming it."""
        with pytest.raises(ValueError, match=f"{given}=some.pem"):
            start_metrics_server(port=0, registry=registry, **{given: "some.pem"})

    @pytest.mark.parametrize("broken", ["certfile", "keyfile", "client_cafile"])
    @pytest.mark.parametrize("content", [None, "no certificate"])
    def test_unusable_file_is_named(
        self,
        registry: CollectorRegistry,
        certificates: dict[str, Certificate],
        tmp_path: Path,
        broken: str,
        content: str | None,
    ) -> None:
        """A file that is missing or no certificate is an OSError naming it; no port is held."""
        with start_metrics_server(port=0, registry=registry) as server:
            port = server.port
        own = certificates["server"]
        files = {"certfile": own.certfile, "keyfile": own.keyfile, "client_cafile": own.certfile}
        path = tmp_path / "broken.pem"
        if content is not None:
            path.write_text(content)
        files[broken] = str(path)
        with pytest.raises(OSError, match=r"broken\.pem") as refused:
            start_metrics_server(port, registry=registry, **files)
        assert "the port is taken" not in str(refused.value)
        with start_metrics_server(port, registry=registry) as server:
            assert get(server.url).status_code == 200


@pytest.fixture
def client(registry: CollectorRegistry) -> httpx.AsyncClient:
    """A client of a Starlette application with the app as a route."""
    app = Starlette(routes=[Route("/metrics", metrics_app(registry))])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


class TestApp:
    """metrics_app()."""

    async def test_only_http(self, registry: CollectorRegistry) -> None:
        """A websocket is refused, not answered with half a response."""

        async def unused(*_: object) -> dict[str, object]:
            raise AssertionError

        with pytest.raises(ValueError, match="websocket"):
            await metrics_app(registry)({"type": "websocket"}, unused, unused)


def count_as(pid: int, name: str, value: float, **labels: str) -> None:
    """Count what another process, of this id, has counted in multi-process mode."""
    values: Any = MultiProcessValue(lambda: pid)  # type: ignore[no-untyped-call]  # so there
    counter = values(
        "counter", name, f"{name}_total", list(labels), list(labels.values()), "Fruit."
    )
    counter.inc(value)
    counter._file.close()


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which two workers have counted apples; one of them tells of a thread."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(exposition, "multiprocess_directory", lambda: tmp_path)
    count_as(1, "apples", 3, colour="red")
    count_as(2, "apples", 4, colour="red")
    return tmp_path


@pytest.fixture
def other(workers: Path) -> Iterator[UsageTable]:
    """The table of another worker."""
    errors: list[Exception] = []
    on_error = errors.append
    table = UsageTable(near=0.8, max_exported=9, ttl=3600, on_error=on_error, directory=workers)
    status = LimitStatus("search", "continue", 0, 7, 10, 0, 7, None, charged=True)
    table.record("boss", "t1", [Decision(Call("tool", "search"), Outcome.ALLOWED, (status,))])
    table.write()
    yield table
    table.end()
    assert errors == []


USED = 'langchain_quota_thread_used{agent="boss",limit="search",thread_id="t1"} 7.0'


@pytest.mark.usefixtures("other")
class TestWorkers:
    """Several workers: what each of them answers."""

    async def test_the_app_answers_for_all(self, client: httpx.AsyncClient) -> None:
        """Counters are summed, and threads are shown; what only this process has is missing."""
        response = await client.get("/metrics")
        lines = response.text.splitlines()
        assert 'apples_total{colour="red"} 7.0' in lines
        assert USED in lines
        assert "pears" not in response.text

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("apples_total", 'apples_total{colour="red"} 7.0'),
            ("langchain_quota_thread_used", USED),
        ],
    )
    async def test_names_can_be_chosen(
        self, client: httpx.AsyncClient, name: str, found: str
    ) -> None:
        """name[] restricts the answer to the metrics named, of both kinds."""
        response = await client.get("/metrics", params={"name[]": name})
        assert [line for line in response.text.splitlines() if line[0] != "#"] == [found]

    async def test_names_that_come_later(self, client: httpx.AsyncClient) -> None:
        """A metric that no worker had when the app was made can be chosen."""
        assert (await client.get("/metrics", params={"name[]": "plums_total"})).text == ""
        count_as(3, "plums", 1)
        response = await client.get("/metrics", params={"name[]": "plums_total"})
        assert "plums_total 1.0" in response.text.splitlines()

    async def test_other_workers_are_read_off_the_loop(self, client: httpx.AsyncClient) -> None:
        """The files of others are read where blocking is no harm."""
        with blockbuster_ctx():
            response = await client.get("/metrics")
        assert USED in response.text.splitlines()

    async def test_reading_on_the_loop_would_be_seen(
        self, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The test above can fail: the same file read on the loop is caught, and logged."""
        served = exposition._served(registry).restricted_registry(["langchain_quota_thread_used"])
        with blockbuster_ctx():
            list(served.collect())
        (record,) = caplog.records
        assert record.exc_info is not None
        assert record.exc_info[0] is BlockingError

    def test_a_directory_that_is_not_there(
        self, registry: CollectorRegistry, workers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without the directory nothing can be merged: that is said at once."""
        monkeypatch.setattr(exposition, "multiprocess_directory", lambda: workers / "gone")
        with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR"):
            metrics_app(registry)
