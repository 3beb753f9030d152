"""`langchain-quota top` without a terminal: addresses, what they say together, screens."""

import io
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.cells import cell_len
from rich.console import Console

from langchain_quota import start_metrics_server
from langchain_quota.cli import main, metrics
from langchain_quota.cli.arguments import TOKEN_VARIABLE, VIEWS
from langchain_quota.cli.metrics import Figures, Limit, Use
from langchain_quota.cli.top import compact, lasting, percent, screen
from langchain_quota.runtime.units import Level
from tests.certificates import Certificate

TOKEN = "a-token-for-tests"  # noqa: S105 - opens nothing
NOW = 1_800_000_000.0
METRICS = 'langchain_quota_runs_ended_total{agent="a",limit="l"} 3.0\n'

NONE = "it answers, but has no metrics of langchain-quota"
NOT = "it answers, but not with metrics: "
BAD = METRICS + "langchain_quota_runs_ended_total{, =+Inf=} 1\n"
HALF = 'langchain_quota_runs_ended_total{agent="a"} 3.0\n'
UNASKED = f"it answers 401 Unauthorized: it needs its token in {TOKEN_VARIABLE}"

ANSWERS: dict[str, tuple[int, str, dict[str, str], str]] = {
    "metrics": (200, METRICS, {}, ""),
    "moved": (307, "", {"Location": "/metrics"}, "it answers 307 Temporary Redirect"),
    "guarded": (401, "", {}, UNASKED),
    "broken": (503, "", {}, "it answers 503 Service Unavailable"),
    "page": (200, "<html>\nSign in\n</html>", {}, NONE),
    "others": (200, "process_cpu_seconds_total 12.5\n", {}, NONE),
    "binary": (200, "\udcff\udcfe\0", {}, NONE),
    "bad": (200, BAD, {}, NOT),
    "half": (200, HALF, {}, f"{NOT}'limit'"),
    "cut": (200, METRICS, {"Content-Length": "1000"}, "peer closed connection without sending"),
    "rude": (0, "", {}, "Server disconnected without sending a response"),
    "silent": (0, "", {}, "timed out"),
}
"""What a path answers: status, text, headers; and what is wrong with it."""


class Respond(BaseHTTPRequestHandler):
    """Answers by the path that is asked for."""

    server: "Serving"

    def do_GET(self) -> None:
        path = self.path.strip("/")
        self.server.paths.append(path)
        status, text, headers, _ = self.server.answers[path]
        if path == "silent":
            self.server.over.wait(60)
        if path == "guarded" and self.headers.get("Authorization") == f"Bearer {TOKEN}":
            status, text = 200, METRICS
        if status:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode(errors="surrogateescape"))

    def log_message(self, *_: object) -> None:
        pass


class Serving(ThreadingHTTPServer):
    """A server with an answer for each path; without a status it closes the connection."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Respond)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.over, self.paths, self.answers = threading.Event(), list[str](), dict(ANSWERS)

    def say(self, *texts: str) -> list[str]:
        """The addresses of processes with these metrics, without the names' beginning."""
        for number, text in enumerate(texts):
            told = "".join(f"langchain_quota_{line}\n" for line in text.split("\n") if line)
            told = told.replace("AGO", str(time.time() - 7.5 * 86_400))
            self.answers[str(number)] = (200, told, {}, "")
        return [f"{self.url}/{number}" for number in range(len(texts))]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """The server; loopback is never asked through a proxy, whatever the environment says."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with Serving() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def fault(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Why the only address fails, in one line that moves no cursor."""
    assert main(["top", "--once", *arguments]) == 2
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.isprintable()
    assert len(reason) < 500
    return reason.removeprefix("langchain-quota top: ")


@pytest.mark.parametrize("path", [path for path, answer in ANSWERS.items() if answer[-1]])
def test_faults(
    serving: Serving,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is wrong with an answer is one line with the address; no redirect is followed."""
    if path == "silent":
        monkeypatch.setattr(metrics, "SILENCE", 0.2)
    url = f"{serving.url}/{path}"
    assert fault(capsys, url).startswith(f"{url}: {ANSWERS[path][-1]}")
    assert serving.paths == [path]


def test_the_exit_code(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """All answer: 0; some fail: 1, with the figures of the others; all fail: 2. stderr says why."""
    url, broken = f"{serving.url}/metrics", f"{serving.url}/broken"
    assert main(["top", "--once", url]) == 0
    assert capsys.readouterr().err == ""
    assert main(["top", "--once", url, broken]) == 1
    seen = capsys.readouterr()
    assert re.search(r"^a +l .* 3$", seen.out, re.MULTILINE)
    assert seen.err == f"langchain-quota top: {broken}: it answers 503 Service Unavailable\n"
    assert main(["top", broken, f"{serving.url}/page"]) == 2
    seen = capsys.readouterr()
    assert (seen.out, len(seen.err.splitlines())) == ("", 2)


def test_token(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token comes from the environment, and is never shown."""
    for token in (TOKEN, "wrong-token", "secret\r\nX-Forged: 1"):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        code = main(["top", "--once", f"{serving.url}/guarded"])
        said = capsys.readouterr().err
        assert (code == 0) == (token == TOKEN)
        assert "secret" not in said
        assert (TOKEN_VARIABLE in said) == (token != TOKEN)


def test_tls(
    certificates: dict[str, Certificate],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A certificate must be trusted, as OpenSSL's own variable says; a wrong scheme is reported."""
    own, registry = certificates["server"], CollectorRegistry()
    given: Any = {"certfile": own.certfile, "keyfile": own.keyfile, "registry": registry}
    with start_metrics_server(port=0, **given) as server:
        assert "certificate verify failed" in fault(capsys, server.url)
        monkeypatch.setenv("SSL_CERT_FILE", own.certfile)
        assert "has no metrics" in fault(capsys, server.url)
        assert "disconnected" in fault(capsys, server.url.replace("https", "http"))


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value is code 2, and the option is named."""
    for arguments, reason in (
        (["http://user:secret@host"], "argument ADDRESS"),
        (["host:port"], "argument ADDRESS"),
        *((["--interval", each], "argument --interval") for each in ("0", "nan")),
        (["--view", "all"], "argument --view"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["top", *arguments])
        assert ended.value.code == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that are printed, without the space that aligns them."""
    assert main(["top", "--once", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [" ".join(each.split()) for each in lines if each]


ONE = """
calls_total{agent="support",kind="tool",tool="search",decision="allowed"} 5
calls_total{agent="support",kind="tool",tool="search",decision="would_block"} 1
calls_total{agent="support",kind="tool",tool="search",decision="blocked"} 2
calls_total{agent="support",kind="tool",tool="search",decision="skipped"} 4
thread_used{agent="support",limit="tool:search",thread_id="ann\\nx"} 9
thread_limit{agent="support",limit="tool:search",thread_id="ann\\nx"} 10
thread_timestamp_seconds{event="decision",agent="support",limit="tool:search",thread_id="ann\\nx"} 5
thread_blocked_total{agent="support",limit="tool:search",thread_id="ann\\nx"} 9
thread_timestamp_seconds{event="decision",agent="support",limit="tool:search",thread_id="checked"} 5
thread_blocked_total{agent="support",limit="tool:search",thread_id="old"} 1
thread_timestamp_seconds{agent="support",event="refusal",limit="tool:search",thread_id="old"} AGO
thread_used{agent="support",limit="trial",thread_id="ann"} 20
thread_limit{agent="support",limit="trial",thread_id="ann"} 10
thread_used_dollars{agent="support",limit="money",thread_id="ann"} 0.3
thread_limit_dollars{agent="support",limit="money",thread_id="ann"} 0.375
limit_near_ratio{alert="true",agent="support",limit="tool:search"} 0.8
limit_near_ratio{alert="true",agent="support",limit="money"} 0.8
limit_decisions_total{agent="support",limit="tool:search",scope="none",decision="allowed"} 9
limit_decisions_total{agent="support",limit="tool:search",scope="none",decision="refunded"} 2
limit_decisions_total{agent="support",limit="tool:search",scope="thread",decision="blocked"} 3
limit_decisions_total{agent="support",limit="tool:search",scope="run",decision="blocked"} 10
limit_decisions_total{agent="support",limit="tool:search",scope="run",decision="would_block"} 4
runs_ended_total{agent="support",limit="tool:search"} 8
subjects{agent="support",limit="tool:search",scope="tenant",state="near",shown="true"} 3
subjects{agent="support",limit="tool:search",scope="tenant",state="exhausted",shown="true"} 7
subject_used_dollars{agent="support",limit="money",scope="tenant",subject=""} 0.5
subject_limit_dollars{agent="support",limit="money",scope="tenant",subject=""} 1
"""
TWO = """
thread_used{agent="support",limit="tool:search",thread_id="ann\\nx"} 8
thread_limit{agent="support",limit="tool:search",thread_id="ann\\nx"} 10
thread_timestamp_seconds{event="decision",agent="support",limit="tool:search",thread_id="ann\\nx"} 9
thread_blocked_total{agent="support",limit="tool:search",thread_id="ann\\nx"} 1
limit_near_ratio{alert="true",agent="support",limit="tool:search"} 0.8
limit_decisions_total{agent="support",limit="tool:search",scope="run",decision="blocked"} 1
subjects{agent="support",limit="tool:search",scope="tenant",state="near",shown="true"} 2
"""


def test_two_processes(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are added; what a thread has used says who checked it last.

    A thread that was checked has no row. Names forge no line.
    """
    for addresses in (serving.say(ONE, TWO), serving.say(TWO, ONE)):
        assert figures(capsys, *addresses) == [
            "calls 6 ran, 2 refused 5 near, 7 exhausted",
            "threads:",
            "thread agent limit used/of share state refused ago ends in",
            "ann\\nx support tool:search 8/10 80%~ near 10",
            "ann support money $0.30/$0.38 80%~ near 0",
            "ann support trial 20/10 200% dry run 0",
            "old support tool:search - - 1 7d",
            "quotas:",
            "subject quota agent limit used/of share state ends in",
            "- tenant support money $0.50/$1.00 50% ok",
            "limits:",
            "agent limit allowed refused dry run near exhausted ended runs",
            "support tool:search 7 14 4 5 7 8",
        ]


def test_a_view_can_be_chosen(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """The option chooses one table; those nearest to their limits are its first rows."""
    found = figures(capsys, *serving.say(ONE), "--view", "threads")
    assert [each.split()[0] for each in found[1:]] == [
        "threads:",
        "thread",
        "ann\\nx",
        "ann",
        "ann",
        "old",
    ]


def test_amounts() -> None:
    """Amounts are short, and say their unit where it is not calls; shares do not round up."""
    calls = {None: "-", 8: "8", 99_999: "99,999", 100_000: "100k", 1_250_000: "1.25M"}
    assert {value: compact(value, "calls") for value in calls} == calls
    tokens = {999_999: "1000k tok", 1e20: "1e+08T tok"}
    assert {value: compact(value, "tokens") for value in tokens} == tokens
    dollars = {0: "$0.00", 0.5: "$0.50", 0.0042: "$0.0042", 0.000042: "$0.000042"}
    dollars |= {1234.5: "$1,234.50", 2_500_000: "$2,500,000.00"}
    assert {value: compact(value, "nanodollars") for value in dollars} == dollars
    shares = {None: "-", 0: "0%", 0.001: "1%", 0.999: "99%", 1: "100%", 1.5: "150%", 1e9: "999%"}
    assert {value: percent(value) for value in shares} == shares
    times = {None: "", -5: "0s", 0.4: "0s", 59: "59s", 60: "1m", 7_300: "2h", 1e9: "11574d"}
    assert {value: lasting(value) for value in times} == times


def use(subject: str, used: float = 1, most: float = 10, **values: Any) -> Use:
    of = {"agent": "support", "limit": "tool:search", "scope": "thread", "level": Level.OK}
    return Use(subject=subject, used=used, most=most, **of | values)


HOSTILE = ("a\x1b[2Jb", "line\nbreak", "\u202etxt", "名前" * 40, "x" * 3000, "[bold]m[/]", "\ud800")
MANY = Figures(threads=tuple(use(f"customer-{each}", each, 100_000) for each in range(10_000)))


def drawn(known: Figures | None, *views: str, **options: Any) -> list[str]:
    """The lines of the screen, as they are written to a terminal."""
    raw = io.BytesIO()
    settings = {"color_system": None, "force_terminal": True, "width": 80, "height": 24} | options
    faults, encoding = settings.pop("faults", ()), settings.pop("encoding", "utf-8")
    file = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    console = Console(file=file, **settings)
    of: Any = {"console": console, "addresses": 1, "faults": faults, "now": NOW}
    shown = screen(known, views or VIEWS, **of)
    console.print(shown)
    file.flush()
    return raw.getvalue().decode(encoding).removesuffix("\n").split("\n")


def test_it_fits() -> None:
    """Every view of hostile names fills a terminal of any size, and is not larger."""
    known = Figures(
        threads=tuple(use(each, agent=each, limit=each) for each in HOSTILE) * 30,
        quotas=tuple(use(each, agent=each, scope=each) for each in HOSTILE) * 30,
        limits=tuple(Limit(each, each, Counter()) for each in HOSTILE) * 30,
    )
    for width, height in ((80, 24), (40, 10), (300, 100)):
        for views in ((), *zip(VIEWS)):
            shown = drawn(known, *views, width=width, height=height)
            assert len(shown) == height
            assert all(cell_len(each) <= width and each.isprintable() for each in shown)


def test_a_row() -> None:
    """A row says who, of what, how much, how often and when refused; more where it is wide."""
    row = use("ann", 8, 8, level=Level.EXHAUSTED, refused=3, refused_at=NOW - 61)
    known = Figures(threads=(row,))
    found = drawn(known)[4].split()
    assert found == ["ann", "support", "tool:search", "8/8", "100%!", "3", "1m", "━" * 6]
    assert " exhausted " in drawn(known, width=140)[4]


def test_beside_the_rows() -> None:
    """Which rows of how many are shown; the first three faults; and that there is no row."""
    shown = drawn(MANY)
    assert "threads  20 of 10,000" in shown[2]
    assert shown[4].startswith("customer-9999 ")
    # A small table is whole, the largest has the rest; a low terminal cuts the last ones.
    limits = tuple(Limit("a", str(each), Counter()) for each in range(3))
    every = MANY._replace(quotas=(use("acme", scope="tenant"),), limits=limits)
    for height, expected in (
        (24, ["12 of 10,000", "1 of 1", "3 of 3"]),
        (8, ["1 of 10,000", "1 of 1"]),
    ):
        text = "\n".join(drawn(every, height=height))
        assert re.findall(r"(?m)^(?:threads|quotas|limits)  (\S+ of \S+)", text) == expected
    faults = tuple(f"http://h:{each}: no answer" for each in range(5))
    shown = drawn(MANY, faults=faults)
    assert [each.strip() for each in shown[2:5]] == [*faults[:3]]
    assert len(shown) == 24
    assert "asking ..." in drawn(None)[0]
    assert "nothing has been used yet" in drawn(Figures())[2]
    assert "are seen with subject_label" in drawn(Figures(), "quotas")[2]
