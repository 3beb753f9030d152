"""The demo as a user runs it: real agents, a real database, a real /metrics."""

import os
import pty
import re
import signal
import socket
import sqlite3
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread
from typing import IO

import pytest
from blockbuster import blockbuster_ctx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from langchain_quota.cli import main
from tests.forked import Program, run_python, start_python

TIMEOUT = 120
ESCAPE = "\x1b"

# A terminal's Ctrl-C must reach the demo even where the tests run with SIGINT ignored.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from langchain_quota.cli import main
sys.exit(main(sys.argv[1:]))
"""

# Stands in for a provider's package; the chat model is a real one.
PROVIDER = """
import asyncio, os
from langchain_quota.testing import ScriptedChatModel

class ChatOpenAI(ScriptedChatModel):
    model: str

    def __init__(self, **kwargs):
        if "OPENAI_API_KEY" not in os.environ:
            raise ValueError("Missing credentials.\\nPlease set OPENAI_API_KEY.")
        super().__init__(script=lambda messages: "Hello!", **kwargs)

    async def _agenerate(self, *args, **kwargs):
        if self.model == "slow":
            await asyncio.Event().wait()
        if self.model == "broken":
            raise RuntimeError("429:\\ntoo many requests")
        return await super()._agenerate(*args, **kwargs)
"""


def environment(**extra: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return own | extra


def demo(
    *arguments: str, code: str = CODE, **extra_environment: str
) -> subprocess.CompletedProcess[str]:
    return run_python(code, "demo", *arguments, env=environment(**extra_environment))


class RunningDemo:
    """A demo that runs, and what it writes.

    Args:
        process: The process.
        output: What it prints, as it is printed.
        errors: The file with its errors.
    """

    def __init__(self, process: Program, output: IO[str], errors: IO[bytes]) -> None:
        self.process = process
        self.output = output
        self._errors = errors

    def read_until(self, pattern: str) -> re.Match[str]:
        """The first of its lines that a pattern finds something in."""
        for text in self.output:
            found = re.search(pattern, text)
            if found:
                return found
        pytest.fail(f"the demo never said {pattern}")

    def ended(self) -> tuple[int, str]:
        """Wait for its end: the exit code, and its errors."""
        if not self.output.closed:
            self.output.read()
        code = self.process.wait(TIMEOUT)
        self._errors.seek(0)
        return code, self._errors.read().decode()


@contextmanager
def running_demo(*arguments: str) -> Iterator[RunningDemo]:
    readable, writable = os.pipe()
    with (
        os.fdopen(readable, encoding="utf-8") as output,
        TemporaryFile() as errors,
    ):
        with os.fdopen(writable, "wb"):
            process = start_python(
                CODE,
                *("demo", "--port", "0", *arguments),
                stdout=writable,
                stderr=errors.fileno(),
                env=environment(),
            )
        with process:
            yield RunningDemo(process, output, errors)


@dataclass(frozen=True)
class Total:
    """A line of the summary."""

    carried_over: int
    charged: int
    blocked: int
    near: int
    exhausted: int


def totals(output: str) -> dict[str, Total]:
    rows = re.findall(
        r"^(tool:search|tool:\*|model|tokens) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$",
        output,
        re.MULTILINE,
    )
    return {limit: Total(*map(int, numbers)) for limit, *numbers in rows}


def limit_decisions(output: str) -> Counter[tuple[str, str]]:
    samples = re.findall(
        r'limit_decisions_total{agent="support",decision="(\w+)",limit="([^"]+)",.*} ([\d.]+)$',
        output,
        re.MULTILINE,
    )
    counts: Counter[tuple[str, str]] = Counter()
    for decision, limit, value in samples:
        counts[limit, decision] += int(float(value))
    return counts


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What two runs on one database print."""
    file = tmp_path_factory.mktemp("demo") / "threads.sqlite"
    outputs = []
    for _ in range(2):
        ended = demo("--seconds", "2", "--port", "0", "--db", str(file))
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        outputs.append(ended.stdout)
    return outputs[0], outputs[1]


def test_summary(two_runs: tuple[str, str]) -> None:
    """The summary tells of calls that were let through and calls that were blocked."""
    found = totals(two_runs[0])
    assert set(found) == {"tool:search", "tool:*", "model", "tokens"}
    assert all(total.charged > 0 for total in found.values())
    assert found["tool:search"].blocked > 0
    # A machine that is slow plays fewer turns; a second run begins with what the first has used.
    tokens = totals(two_runs[1])["tokens"]
    assert tokens.near + tokens.exhausted + tokens.blocked > 0
    assert "scrape http://127.0.0.1:" in two_runs[0]


def test_summary_agrees_with_metrics(two_runs: tuple[str, str]) -> None:
    """What the threads' states add up to is what /metrics says, read back over HTTP."""
    for output in two_runs:
        metrics = limit_decisions(output)
        found = totals(output)
        for limit, total in found.items():
            if limit != "tokens":
                assert metrics[limit, "allowed"] - metrics[limit, "refunded"] == total.charged
            assert metrics[limit, "blocked"] == total.blocked
        tokens = re.findall(
            r'spent_tokens_total{.*limit="tokens",.*} ([\d.]+)$', output, re.MULTILINE
        )
        assert sum(map(float, tokens)) == found["tokens"].charged


def test_spans_agree_with_metrics(two_runs: tuple[str, str]) -> None:
    """There is one span for each judged call."""
    found = re.search(r"check_quota spans: (\d+) \((\d+) allowed, (\d+) blocked\)", two_runs[0])
    assert found is not None
    for count, decision in ((found[2], "allowed"), (found[3], "blocked")):
        calls = re.findall(
            rf'calls_total{{.*decision="{decision}",.*}} ([\d.]+)$', two_runs[0], re.MULTILINE
        )
        assert int(count) == sum(map(float, calls)) > 0
    assert int(found[1]) == int(found[2]) + int(found[3])


def test_second_run_goes_on(two_runs: tuple[str, str]) -> None:
    """With a database a second run begins with the counts that the first left."""
    first, second = (totals(output) for output in two_runs)
    for limit, total in first.items():
        assert total.carried_over == 0
        assert second[limit].carried_over == total.charged
    assert "6 carried over" in two_runs[1]
    counts = re.compile(
        r"^(customer-\d)  search (\d)/[89] .* tools (\d+)/16 .* model (\d+)/20 ", re.MULTILINE
    )
    last_of_first = {thread: used for thread, *used in counts.findall(two_runs[0])}
    first_of_second = {thread: used for thread, *used in reversed(counts.findall(two_runs[1]))}
    assert first_of_second == last_of_first


def test_plain_output_is_plain(two_runs: tuple[str, str]) -> None:
    """Where the output is no terminal, it has no escape codes, even where colors are forced."""
    forced = demo("--seconds", "1", "--threads", "1", "--port", "0", FORCE_COLOR="1")
    assert forced.returncode == 0
    assert "customer-1  search " in forced.stdout
    for output in (*two_runs, forced.stdout):
        assert ESCAPE not in output


def test_terminal_gets_a_table() -> None:
    """In a terminal the table is redrawn in its place, and the cursor is given back."""
    ours, theirs = pty.openpty()
    with start_python(
        CODE,
        *("demo", "--seconds", "1", "--port", "0"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm", COLUMNS="120", LINES="40"),
    ) as process:
        os.close(theirs)
        output = b"".join(_until_closed(ours)).decode()
        assert process.wait(TIMEOUT) == 0
    assert re.search(rf"{ESCAPE}\[\d*A", output), "the cursor goes up to redraw"
    assert re.search(r"search [1-7]/8 ▇+_+", output)
    assert output.rindex(f"{ESCAPE}[?25h") > output.rindex(f"{ESCAPE}[?25l")
    assert totals(output.replace("\r\n", "\n"))["tool:search"].blocked > 0


def _until_closed(descriptor: int) -> Iterator[bytes]:
    try:
        while True:
            yield os.read(descriptor, 65_536)
    except OSError:  # how Linux says that the other side has gone
        os.close(descriptor)


def test_event_loop_is_never_blocked(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the whole demo nothing blocks the event loop."""
    with blockbuster_ctx():
        assert main(["demo", "--seconds", "1", "--port", "0"]) == 0
    assert totals(capsys.readouterr().out)["tool:search"].blocked > 0


def test_serve_until_interrupted() -> None:
    """With --serve the metrics stay, exemplars with trace ids included, until Ctrl-C."""
    with running_demo("--seconds", "1", "--serve") as demo:
        url = demo.read_until(r"^scrape (\S+) \(until Ctrl-C\)")[1]
        request = urllib.request.Request(  # noqa: S310 - the demo's own address
            url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - the same
            metrics = response.read().decode()
        demo.process.send_signal(signal.SIGINT)
        assert demo.ended() == (0, "")
    assert re.search(
        r'calls_total{.*decision="blocked".*} [\d.]+ # {.*trace_id="[0-9a-f]{32}"', metrics
    )
    assert (
        'langchain_quota_thread_used{agent="support",limit="tool:search",thread_id="customer-1"}'
        in (metrics)
    )


def test_interrupted_early() -> None:
    """Ctrl-C during the traffic ends the demo at once, with code 130 and no traceback."""
    with running_demo("--seconds", "600") as demo:
        demo.read_until(r"^customer-1 .* allowed [1-9]")
        demo.process.send_signal(signal.SIGINT)
        assert demo.ended() == (130, "")


def test_reader_goes_away() -> None:
    """When the reader of the output goes away, the demo ends without a traceback."""
    with running_demo("--seconds", "600") as demo:
        demo.read_until(r"^customer-1 ")
        demo.output.close()
        assert demo.ended() == (1, "")


def refusal(ended: "subprocess.CompletedProcess[str]") -> str:
    """The one line that says why the demo did not run."""
    assert ended.returncode == 2
    (reason,) = ended.stderr.splitlines()
    assert reason.startswith("langchain-quota demo: ")
    return reason


def test_taken_port() -> None:
    """A taken port is named in one line, with the option that helps."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reason = refusal(demo("--port", str(port)))
    assert f"127.0.0.1:{port}: the port is taken" in reason
    assert "--port" in reason


def test_unusable_database(tmp_path: Path) -> None:
    """A file that cannot be a database is named in one line, with the reason, and not touched."""
    missing = tmp_path / "missing" / "threads.sqlite"
    text = tmp_path / "notes.txt"
    text.write_text("no database, " * 100)
    reasons = {
        missing: "its directory does not exist",
        tmp_path: "it is a directory",
        text: "file is not a database",
    }
    for file, reason in reasons.items():
        assert refusal(demo("--port", "0", "--db", str(file))).endswith(f"{str(file)!r}: {reason}")
    assert text.read_text() == "no database, " * 100
    assert not missing.parent.exists()


def test_foreign_database(tmp_path: Path) -> None:
    """A database whose tables are another program's fails in one line."""
    file = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE checkpoints (name TEXT)")
        connection.execute("CREATE TABLE writes (name TEXT)")
    assert str(file) in refusal(demo("--port", "0", "--db", str(file)))


@pytest.fixture
def provider(tmp_path: Path) -> dict[str, str]:
    """An environment in which a provider's package is installed and has a key."""
    package = tmp_path / "site" / "langchain_openai"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PROVIDER)
    return {"PYTHONPATH": str(package.parent), "OPENAI_API_KEY": "key"}


def test_model_of_a_provider(provider: dict[str, str]) -> None:
    """With --model the provider's model is called, held to the same limits."""
    ended = demo("--model", "openai:fast", "--seconds", "1", "--port", "0", **provider)
    assert ended.returncode == 0, ended.stderr
    found = totals(ended.stdout)
    assert found["model"].charged > 0
    assert found["tool:search"].charged == 0


@pytest.mark.parametrize("name", ["openai:fast", "nobody:fast", "fast"])
def test_model_that_cannot_be_made(name: str, provider: dict[str, str]) -> None:
    """A missing key, an unknown provider and no provider at all are told in one line."""
    environment_without_key = {"PYTHONPATH": provider["PYTHONPATH"]}
    ended = demo("--model", name, "--port", "0", **environment_without_key)
    assert f"cannot use the model {name!r}: " in refusal(ended)
    assert ended.stdout == ""


def test_provider_is_not_installed() -> None:
    """A provider whose package is missing is told in one line that names the package."""
    blocked = "import sys; sys.modules['langchain_openai'] = None\n"
    ended = demo("--model", "openai:fast", "--port", "0", code=blocked + CODE)
    assert "langchain-openai" in refusal(ended)


def test_metrics_without_a_directory(tmp_path: Path) -> None:
    """A directory for several workers' metrics that is not there is told in one line."""
    missing = str(tmp_path / "missing")
    ended = demo("--port", "0", PROMETHEUS_MULTIPROC_DIR=missing)
    assert "cannot keep metrics" in refusal(ended)


def test_model_that_fails(provider: dict[str, str]) -> None:
    """An error of the provider during the traffic ends the demo in one line."""
    ended = demo("--model", "openai:broken", "--seconds", "600", "--port", "0", **provider)
    assert refusal(ended).endswith("the model 'openai:broken' failed: 429: too many requests")


def test_model_that_hangs(provider: dict[str, str]) -> None:
    """A model that never answers does not keep the demo from ending; its calls are charged."""
    short = "from langchain_quota.cli import demo\ndemo.GRACE_SECONDS = 0\n"
    ended = demo(
        "--model", "openai:slow", "--seconds", "1", "--port", "0", code=short + CODE, **provider
    )
    assert ended.returncode == 0, ended.stderr
    assert totals(ended.stdout)["model"].charged == 6


def test_spans_reach_a_collector() -> None:
    """With an OTLP endpoint every check_quota span arrives, inside a turn of its own thread."""
    with collector() as (endpoint, spans):
        ended = demo(
            "--seconds",
            "1",
            "--threads",
            "3",
            "--port",
            "0",
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf",
        )
    assert ended.returncode == 0, ended.stderr
    assert f"collector: {endpoint}" in ended.stdout
    checks = [span for span in spans if span.name.startswith("check_quota")]
    assert f"check_quota spans: {len(checks)} " in ended.stdout
    turns = {span.span_id: span for span in spans if span.name == "conversation turn"}
    for check in checks:
        turn = turns[check.parent_span_id]
        assert _conversation(check) == _conversation(turn)
    assert {_conversation(turn) for turn in turns.values()} == {
        "customer-1",
        "customer-2",
        "customer-3",
    }


def _conversation(span: Span) -> str:
    attributes = {each.key: each.value.string_value for each in span.attributes}
    return str(attributes["gen_ai.conversation.id"])


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """A receiver of spans over OTLP/HTTP."""
    spans: list[Span] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def test_unknown_span_protocol() -> None:
    """A protocol without an exporter is named in one line."""
    ended = demo(
        "--port",
        "0",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318",
        OTEL_EXPORTER_OTLP_PROTOCOL="pigeon",
    )
    assert "'pigeon'" in refusal(ended)
