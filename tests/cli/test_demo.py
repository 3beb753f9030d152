"""The demo as a user runs it: real agents, a real database, a real /metrics. And all commands."""

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from blockbuster import blockbuster_ctx

from langchain_quota.cli import main
from tests.forked import COMMAND_LINE, run_python, start_python, without
from tests.server.demo import running_demo
from tests.server.otlp import running_receiver
from tests.server.prometheus import check_metrics, eventually, parse_openmetrics, series_of

INSTRUMENTED = f"""
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
{COMMAND_LINE}
"""
"""The command as `opentelemetry-instrument` runs it, whose exporter reads the environment."""
_LINE = re.compile(
    r"^(chat-\d+) +(\d+)/\d+ +(\d+)/\d+ +(\d+)/\d+ +[\d,]+/6,000 +(\d+)$", re.MULTILINE
)
Use = tuple[int, ...]
"""A thread's searches, calls of tools and of the model, and refusals."""


def lines(text: str) -> dict[str, Use]:
    """The lines of threads."""
    return {thread: tuple(map(int, use)) for thread, *use in _LINE.findall(text)}


@dataclass(frozen=True)
class Ran:
    """A demo whose traffic is over: its output, and its /metrics in both formats."""

    output: str
    metrics: str
    plain: str

    @property
    def end(self) -> list[str]:
        """The end of the output: a table, metrics, what was prevented, steps."""
        return self.output[self.output.rindex("\nchat ") + 1 :].split("\n\n")

    def sum_of(self, metric: str, **labels: str) -> float:
        """What series add up to."""
        return sum(
            value
            for (name, found), value in series_of(parse_openmetrics(self.metrics)).items()
            if name == f"langchain_quota_{metric}" and labels.items() <= dict(found).items()
        )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run in a pipe."""
    with running_demo(tmp_path_factory.mktemp("demo") / "log", threads=6, seconds=3) as running:
        running.wait_for_end_of_traffic()
        url = f"http://{running.address}/metrics"
        texts = [
            httpx.get(url, headers={"accept": accepted}, trust_env=False).text
            for accepted in ("application/openmetrics-text; version=1.0.0", "text/plain")
        ]
        return Ran(running.output.partition("\nServing ")[0], *texts)


@pytest.mark.rest
def test_the_end(ran: Ran) -> None:
    """At the end: a table that agrees with /metrics, what was prevented, steps; 80 columns do."""
    shown, said, steps = ran.end
    uses = lines(shown)
    assert len(uses) == 6
    for index, limit in enumerate(("tool:search", "tool:*", "model")):
        of = {"limit": limit, "agent": "support"}
        charged = ran.sum_of("limit_decisions_total", **of, decision="allowed")
        charged -= ran.sum_of("limit_decisions_total", **of, decision="refunded")
        assert charged == sum(use[index] for use in uses.values())
    refused = sum(use[-1] for use in uses.values())
    assert ran.sum_of("calls_total", decision="blocked") == refused
    said_so = r"(?m)^chat-\d's call of .+ is blocked: .+ \(\w+\)$"
    assert len(re.findall(said_so, ran.output)) >= refused
    chat, worst = max(uses.items(), key=lambda item: item[1][-1])
    prevented, spent = said.split("\n")
    assert prevented == f"{refused} calls were blocked, {worst[-1]} of them in {chat}. None ran."
    budgets = re.findall(r"\w+ \$(\d+\.\d+) of \$(\d+\.\d+)", spent)
    counts = re.findall(r"([\d,]+)/([\d,]+)", shown.replace(",", ""))
    assert len(budgets) == 2
    assert len(counts) == 4 * 6
    assert all(0 <= float(used) <= float(limit) for used, limit in [*budgets, *counts])
    assert [step[:3] for step in steps.split("\n")[:3]] == ["1. ", "2. ", "3. "]
    assert max(map(len, ran.output.splitlines())) <= 80
    assert "\x1b" not in ran.output


@pytest.mark.rest
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_early(number: int, tmp_path: Path) -> None:
    """After Ctrl-C or a SIGTERM it prints the same end, and its exit code is 130."""
    # Ctrl-C must reach the demo even where the tests run with SIGINT ignored.
    program = f"import signal; signal.signal(2, signal.default_int_handler); {COMMAND_LINE}"
    log = tmp_path / "log"
    with log.open("wb") as file:
        demo = ("demo", "--port", "0", "--seconds", "600")
        with start_python(program, *demo, stdout=file.fileno(), stderr=file.fileno()) as running:
            eventually(lambda: "is blocked: " in log.read_text())
            running.send_signal(number)
            assert running.wait(60) == 130
    assert len(lines(log.read_text())) == 6
    assert log.read_text().splitlines()[-3] == (
        "1. Open the page, and click a red row: langchain-quota demo --serve"
    )


@pytest.mark.rest
def test_the_demo_shows_what_limits_do(ran: Ran) -> None:
    """All states and refusals and a wait are in its metrics, and no error."""
    for limit in ("tool:search", "model", "tokens", "repeats"):
        assert ran.sum_of("limit_decisions_total", limit=limit, decision="blocked") > 0, limit
    for state in ("ok", "near", "exhausted"):
        assert ran.sum_of("subjects", state=state) > 0, state
    assert ran.sum_of("wait_seconds_sum") > 0
    assert ran.sum_of("errors_total") == 0
    assert check_metrics(ran.plain) == (0, [])


def test_the_event_loop_is_never_blocked(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the whole demo nothing blocks the event loop."""
    with blockbuster_ctx():
        assert main(["demo", "--seconds", "1", "--port", "0"]) == 0
    assert lines(capsys.readouterr().out)["chat-1"][-1] > 0


@pytest.mark.rest
def test_spans_reach_a_collector() -> None:
    """Where spans are sent, every check_quota span arrives, inside a turn of its own thread."""
    with running_receiver() as receiver:
        to = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "COLUMNS": "80", "FORCE_COLOR": "1"}
        demo = ("demo", "--port", "0", "--seconds", "1", "--threads", "3")
        ended = run_python(INSTRUMENTED, *demo, env={**os.environ, **to})
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    used = lines(ended.stdout)
    turns = {each.span_id: each for each in receiver.spans if each.name == "conversation turn"}
    checks = [each for each in receiver.spans if each.name.startswith("check_quota")]
    blocked = [each for each in checks if each.attributes["langchain_quota.decision"] == "blocked"]
    assert len(blocked) == sum(use[-1] for use in used.values()) > 0
    thread = "gen_ai.conversation.id"
    assert {each.attributes[thread] for each in checks} == {*used}
    assert all(
        each.attributes[thread] == turns[each.parent_id].attributes[thread] for each in checks
    )


@pytest.mark.rest
def test_what_the_demo_cannot_do(tmp_path: Path) -> None:
    """What keeps it from running is one line, with the reason, and code 2; nothing is touched."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused: list[tuple[list[str], dict[str, str], str]] = [
            (["--port", str(port)], {}, "the port is taken; give another --port [^=]*METRICS_ADDR"),
            ([], {"PROMETHEUS_MULTIPROC_DIR": f"{tmp_path}/no"}, "PROMETHEUS_MULTIPROC_DIR"),
        ]
        for arguments, environment, reason in refused:
            demo = ("demo", "--port", "0", *arguments)
            ended = run_python(COMMAND_LINE, *demo, env={**os.environ, **environment})
            (said,) = ended.stderr.splitlines()
            assert ended.returncode == 2
            assert re.search(f"^langchain-quota demo: .*{reason}", said), said
    assert not (tmp_path / "no").exists()


def test_wrong_values(capsys: pytest.CaptureFixture[str]) -> None:
    """A value out of bounds is refused with code 2, naming option and value."""
    wrong = {"--threads": ("0", "101", "many"), "--seconds": ("0", "1.5"), "--port": ("70000",)}
    for words in (["demo", option, each] for option in wrong for each in wrong[option]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        reason = capsys.readouterr().err.splitlines()[-1]
        assert all(each in reason for each in words[1:])


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("quotas show --store redis://127.0.0.1", "redis", "redis"),
        ("quotas show --store postgresql://127.0.0.1", "psycopg", "postgres"),
    ],
)
def test_an_extra_is_missing(command: str, package: str, extra: str) -> None:
    """The command line works without an extra; the command says how to install it."""
    ended = run_python(without(package) + COMMAND_LINE, *command.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    (reason,) = ended.stderr.splitlines()
    assert package in reason
    assert reason.endswith(f'pip install "langchain-quota[{extra}]"')


def test_the_version_comes_without_langchain() -> None:
    """The version and the help import no library: LangChain takes a second."""
    program = """
import atexit, sys
before = {*sys.modules}
from langchain_quota.cli import main
atexit.register(lambda: print(*{each.partition(".")[0] for each in {*sys.modules} - before}))
main(sys.argv[1:])
"""
    for option in ("--version", "--help"):
        # The processes of `run_python` have imported LangChain.
        command = [sys.executable, "-c", program, option]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        imported = {*ended.stdout.splitlines()[-1].split()}
        assert imported - sys.stdlib_module_names == {"langchain_quota"}
