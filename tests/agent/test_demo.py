"""The demo as a user runs it: real agents, a real database, a real /metrics."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
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
from langchain_quota.telemetry.tracing import DECISION
from tests.forked import Program, run_python, start_python

TIMEOUT = 120
ESCAPE = "\x1b"

# A terminal's Ctrl-C must reach the demo even where the tests run with SIGINT ignored.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from langchain_quota.cli import main
from langchain_quota.telemetry.tracing import DECISION
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
    return {**own, "COLUMNS": "80", **extra}


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
class Use:
    """A thread's line of the table."""

    search: int
    tools: int
    model: int
    tokens: str
    blocked: int


_LINE = re.compile(
    r"^(customer-\d+) +(\d+)/\d+ +\S+ +(\d+)/\d+ +\S+ +(\d+)/\d+ +\S+ +(\S+)/6k +\S+ +(\d+)$",
    re.MULTILINE,
)


def table(text: str) -> dict[str, Use]:
    """The lines of threads; of several for a thread the last."""
    return {
        thread: Use(int(search), int(tools), int(model), tokens, int(blocked))
        for thread, search, tools, model, tokens, blocked in _LINE.findall(text)
    }


@dataclass(frozen=True)
class Ending:
    """The end of the output."""

    table: dict[str, Use]
    metrics: list[str]
    said: list[str]
    steps: list[str]


def ending(output: str) -> Ending:
    """The end of the output, from the heading of its last table on."""
    shown, metrics, said, steps = output[output.rindex("thread     search ") :].split("\n\n")
    return Ending(
        table(shown), metrics.splitlines()[1:], said.splitlines(), steps.strip().splitlines()
    )


@dataclass(frozen=True)
class Ran:
    """A demo that ran to its end: its output, and its /metrics after its traffic."""

    output: str
    metrics: str

    @property
    def end(self) -> Ending:
        return ending(self.output)

    def sum_of(self, metric: str, **labels: str) -> int:
        """What series add up to."""
        values = [
            float(value)
            for named, value in re.findall(
                rf"^langchain_quota_{metric}{{(.*?)}} ([\d.]+)", self.metrics, re.MULTILINE
            )
            if all(f'{name}="{wanted}"' in named for name, wanted in labels.items())
        ]
        return int(sum(values))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """Two runs on one database, which serve until Ctrl-C."""
    file = tmp_path_factory.mktemp("demo") / "threads.sqlite"
    one, two = (run_and_ask("--seconds", "2", "--db", str(file)) for _ in range(2))
    return one, two


def run_and_ask(*arguments: str) -> Ran:
    lines = []
    with running_demo("--serve", *arguments) as demo:
        for line in demo.output:
            served = re.match(r"Serving (\S+) until Ctrl-C\.", line)
            if served:
                break
            lines.append(line)
        else:
            pytest.fail(f"the demo never served: {demo.ended()}")
        request = urllib.request.Request(  # noqa: S310 - the demo's own address
            served[1], headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 - the same
            metrics = response.read().decode()
        demo.process.send_signal(signal.SIGINT)
        assert demo.ended() == (0, "")
    return Ran("".join(lines), metrics)


def test_end(two_runs: tuple[Ran, Ran]) -> None:
    """At the end: the table, five metrics, what was prevented, three steps; 80 columns do."""
    for run in two_runs:
        end = run.end
        assert len(end.table) == 6
        assert len(end.metrics) == 5
        for metric in end.metrics:
            name, value = metric.strip().replace("{", '{agent="support",', 1).split()
            assert re.search(rf"^{re.escape(name)} {value}\.0( #|$)", run.metrics, re.MULTILINE)
        thread, worst = max(end.table.items(), key=lambda item: item[1].blocked)
        assert worst.blocked > 1
        assert (
            end.said[-1] == f"{thread} asked for {worst.blocked} calls over its limits; none ran."
        )
        assert [step[:3] for step in end.steps] == ["1. ", "2. ", "3. "]
        assert max(map(len, run.output.splitlines())) <= 80


def test_table_agrees_with_metrics(two_runs: tuple[Ran, Ran]) -> None:
    """What threads' states and decisions say is what /metrics says."""
    before = [Use(0, 0, 0, "0", 0)]
    for run in two_runs:
        uses = run.end.table.values()
        for limit, field in (("tool:search", "search"), ("tool:*", "tools"), ("model", "model")):
            charged = run.sum_of("limit_decisions_total", limit=limit, decision="allowed")
            charged -= run.sum_of("limit_decisions_total", limit=limit, decision="refunded")
            used, used_before = (
                sum(getattr(use, field) for use in each) for each in (uses, before)
            )
            assert charged == used - used_before
        for thread, use in run.end.table.items():
            tokens = run.sum_of("thread_used_tokens", thread_id=thread)
            assert use.tokens == (
                f"{tokens // 100 / 10:g}k" if tokens >= 1000 else str(int(tokens))
            )
        assert run.sum_of("calls_total", decision="blocked") == sum(use.blocked for use in uses)
        before = list(uses)


def test_second_run_goes_on(two_runs: tuple[Ran, Ran]) -> None:
    """With a database a second run begins with the counts that the first left."""
    first, second = two_runs
    begun = table("\n".join(second.output.splitlines()[:8]))
    assert begun == {name: replace(use, blocked=0) for name, use in first.end.table.items()}
    assert len(first.end.said) == 1
    assert second.end.said[0] == "6 threads went on with what they had used in an earlier run."


def test_refused_calls_lead_to_traces(two_runs: tuple[Ran, Ran]) -> None:
    """While the demo serves, /metrics has threads, and exemplars with the ids of traces."""
    metrics = two_runs[0].metrics
    assert re.search(
        r'calls_total{.*decision="blocked".*} [\d.]+ # {.*trace_id="[0-9a-f]{32}"', metrics
    )
    assert two_runs[0].sum_of("thread_used", limit="tool:search", thread_id="customer-1") > 0


def test_plain_output_is_plain(two_runs: tuple[Ran, Ran]) -> None:
    """Where the output is no terminal, it has no escape codes, even where colors are forced."""
    forced = demo("--seconds", "1", "--threads", "1", "--port", "0", FORCE_COLOR="1")
    assert forced.returncode == 0
    assert len(ending(forced.stdout).table) == 1
    for output in (*(run.output for run in two_runs), forced.stdout):
        assert ESCAPE not in output


def test_event_loop_is_never_blocked(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the whole demo nothing blocks the event loop."""
    with blockbuster_ctx():
        assert main(["demo", "--seconds", "1", "--port", "0"]) == 0
    assert ending(capsys.readouterr().out).table["customer-1"].blocked > 0


def test_interrupted_early() -> None:
    """Ctrl-C during the traffic ends the demo at once, with its summary, code 130, no traceback."""
    with running_demo("--seconds", "600", "--serve") as demo:
        demo.read_until(r"^customer-1 +[1-8]/8")
        demo.process.send_signal(signal.SIGINT)
        end = ending(demo.output.read())
        assert demo.ended() == (130, "")
    assert end.table["customer-1"].search > 0
    used = f'limit="model",thread_id="customer-1"}} {end.table["customer-1"].model}'
    assert any(metric.endswith(used) for metric in end.metrics)
    assert "over its limits" in end.said[0]
    assert len(end.steps) == 3


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
    (*_, use) = ending(ended.stdout).table.values()
    assert use.model > 0
    assert use.search == 0


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
    short = "from langchain_quota.cli import demo_traffic\ndemo_traffic.GRACE_SECONDS = 0\n"
    ended = demo(
        "--model", "openai:slow", "--seconds", "1", "--port", "0", code=short + CODE, **provider
    )
    assert ended.returncode == 0, ended.stderr
    assert [use.model for use in ending(ended.stdout).table.values()] == [1] * 6


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
    checks = [span for span in spans if span.name.startswith("check_quota")]
    blocked = [span for span in checks if _attributes(span)[DECISION] == "blocked"]
    assert len(blocked) == sum(use.blocked for use in ending(ended.stdout).table.values()) > 0
    turns = {span.span_id: span for span in spans if span.name == "conversation turn"}
    for check in checks:
        turn = turns[check.parent_span_id]
        assert _conversation(check) == _conversation(turn)
    assert {_conversation(turn) for turn in turns.values()} == {
        "customer-1",
        "customer-2",
        "customer-3",
    }


def _attributes(span: Span) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


def _conversation(span: Span) -> str:
    return _attributes(span)["gen_ai.conversation.id"]


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
