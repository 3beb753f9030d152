"""`langchain-quota top`: addresses that answer, fail, are slow, or want to know who asks."""

import re
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from langchain_quota import start_metrics_server
from langchain_quota.cli import _parser, main, top_sources
from langchain_quota.cli.top import Watch
from langchain_quota.cli.top_options import TOKEN_VARIABLE
from langchain_quota.cli.top_sources import Source, sources
from langchain_quota.telemetry.metrics import Metrics
from tests.certificates import Certificate

TOKEN = "a-token-for-tests"  # noqa: S105 - opens nothing
METRICS = b'langchain_quota_runs_ended_total{agent="a",limit="l"} 3.0\n'


class Respond(BaseHTTPRequestHandler):
    """Answers by the path that is asked for."""

    over: threading.Event
    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(self.path)
        getattr(self, self.path.strip("/").replace("-", "_"))()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def metrics(self) -> None:
        self.answer(200, METRICS)

    def guarded(self) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.answer(200 if allowed else 401, METRICS if allowed else b"")

    def moved(self) -> None:
        self.answer(307, Location="/metrics")

    def broken(self) -> None:
        self.answer(503)

    def page(self) -> None:
        self.answer(200, b"<html>\nSign in\n</html>")

    def binary(self) -> None:
        self.answer(200, b"\xff\xfe\x00")

    def bad(self) -> None:
        self.answer(200, METRICS + b"langchain_quota_runs_ended_total{, =+Inf=} 1\n")

    def zeros(self) -> None:
        self.answer(200, b"\0" * (3 << 20))

    def half(self) -> None:
        self.answer(200, b'langchain_quota_runs_ended_total{agent="a"} 3.0\n')

    def others(self) -> None:
        self.answer(200, b"process_cpu_seconds_total 12.5\n")

    def cut(self) -> None:
        self.answer(200, METRICS, Content_Length="1000")

    def silent(self) -> None:
        self.over.wait(60)

    def drips(self) -> None:
        self.answer(200)
        while not self.over.wait(0.05):
            try:
                self.wfile.write(b"#\n")
            except OSError:
                return

    def rude(self) -> None:
        self.close_connection = True

    def hostile(self) -> None:
        self.answer(301, Location="http://h/" + "x" * 9000)


@contextmanager
def serving() -> Iterator[tuple[str, type[Respond]]]:
    over = threading.Event()
    handler = type("Handler", (Respond,), {"over": over, "paths": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler
        finally:
            over.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def url() -> Iterator[str]:
    """A server with an answer for each path."""
    with serving() as (url, _):
        yield url


@pytest.fixture(autouse=True)
def no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the test run has no say."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    # Loopback is never asked through a proxy, whatever the environment says.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)


def options(*arguments: str) -> Namespace:
    return _parser().parse_args(["top", *arguments])


def polled(*arguments: str) -> Source:
    """The one address, after it was asked."""
    (source,) = sources(options(*arguments))
    source.poll()
    return source


def fault(*arguments: str) -> str:
    """Why the address fails, in one line that moves no cursor."""
    reason = polled(*arguments).fault
    assert reason is not None
    assert reason.isprintable()
    assert len(reason) < 500
    return reason


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("broken", "it answers 503 Service Unavailable"),
        ("moved", "it answers 307 Temporary Redirect: give the address /metrics"),
        ("guarded", f"it answers 401 Unauthorized: give a token in {TOKEN_VARIABLE} or with"),
        ("page", "it answers, but has no metrics of langchain-quota"),
        ("others", "it answers, but has no metrics of langchain-quota"),
        ("binary", "it answers, but not with metrics: "),
        ("bad", "it answers, but not with metrics: "),
        ("half", "it answers, but not with metrics: 'limit'"),
        ("zeros", "it answers, but has no metrics of langchain-quota"),
        ("cut", "peer closed connection without sending complete message body"),
        ("rude", "Server disconnected without sending a response"),
        ("hostile", "it answers 301 Moved Permanently: give the address http://h/xxx"),
    ],
)
def test_faults(url: str, path: str, reason: str) -> None:
    """What is wrong with an answer is one line with the address."""
    assert fault(f"{url}/{path}").startswith(f"{url}/{path}: {reason}")


def test_no_redirect_is_followed() -> None:
    """Whoever redirects does not get the token sent elsewhere: nothing else is asked for."""
    with serving() as (url, handler):
        fault(f"{url}/moved")
        assert handler.paths == ["/moved"]


@pytest.mark.parametrize(
    ("path", "bound", "reason"),
    [
        ("silent", ("SILENCE", 0.2), "no answer within 0.2 s"),
        ("drips", ("LONGEST", 0.2), "its answer takes longer than 0.2 s"),
        ("zeros", ("MOST_BYTES", 1 << 20), "its answer is longer than 1 MiB"),
    ],
)
def test_bounds(
    url: str, path: str, bound: tuple[str, float], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that does not come, never ends or is too large is given up."""
    monkeypatch.setattr(top_sources, *bound)
    assert reason in fault(f"{url}/{path}")


def test_old_figures_stay(url: str) -> None:
    """What an address said last stays, with its age; when it answers again, all is well."""
    (source,) = watch = sources(options(url))
    gathered = Watch(watch)
    gathered.ask_all()
    name, source.name = source.name, f"{url}/broken"
    gathered.ask_all()
    assert source.fault == f"{url}/broken (figures 0 s old): it answers 503 Service Unavailable"
    assert gathered.figures is not None
    assert [each.ended for each in gathered.figures.limits] == [3]
    source.name = name
    source.poll()
    assert source.fault is None


@pytest.mark.parametrize("where", ["environment", "file"])
def test_token(url: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token comes from the environment or a file; a wrong token differs from none."""
    file = tmp_path / "token"

    def asked(token: str) -> str | None:
        if where == "environment":
            monkeypatch.setenv(TOKEN_VARIABLE, token)
            return polled(f"{url}/guarded").failure
        file.write_text(f"{token}\n")
        return polled(f"{url}/guarded", "--token-file", str(file)).failure

    assert asked(TOKEN) is None
    assert asked("wrong-token") == "it answers 401 Unauthorized: it does not take the token"


def test_tls(certificates: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate must be trusted, as OpenSSL's own variable says; a wrong scheme is reported."""
    own, registry = certificates["server"], CollectorRegistry()
    Metrics(registry, 0.8).run_ended("a", "l")
    with start_metrics_server(
        port=0, certfile=own.certfile, keyfile=own.keyfile, registry=registry
    ) as server:
        assert "certificate verify failed" in fault(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", own.certfile)
        assert polled(server.url).fault is None
        assert "disconnected" in fault(server.url.replace("https", "http"))


WRONG: list[tuple[Callable[[Path], list[str]], str]] = [
    (lambda path: ["--token-file", f"{path}/no"], "No such file or directory"),
    (lambda path: ["--token-file", str(path)], "Is a directory"),
    (lambda _: ["--token-file", "/dev/null"], "is empty"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_wrong_options(
    arguments: Callable[[Path], list[str]],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file that cannot be used is one line, and code 2."""
    assert main(["top", "--once", *arguments(tmp_path)]) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith("langchain-quota top: ")
    assert text in reason


def test_a_token_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that cannot be one is refused, and not shown."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret\r\nX-Forged: 1")
    assert main(["top", "--once"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_the_exit_code(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All answer: 0; some fail: 1, with the figures of the others; all fail: 2. stderr says why."""
    assert main(["top", "--once", url]) == 0
    assert capsys.readouterr().err == ""
    assert main(["top", "--once", url, f"{url}/broken"]) == 1
    seen = capsys.readouterr()
    assert re.search(r"^a +l .* 3 +0$", seen.out, re.MULTILINE)
    assert seen.err.splitlines() == [
        f"langchain-quota top: {url}/broken: it answers 503 Service Unavailable"
    ]
    assert main(["top", f"{url}/broken", f"{url}/page"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert len(seen.err.splitlines()) == 2
