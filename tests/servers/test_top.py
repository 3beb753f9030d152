"""`langchain-quota top` in a real terminal, beside running services."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    MemoryStore,
    MetricsServer,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
)
from langchain_quota.cli import main
from langchain_quota.cli.top_options import TOKEN_VARIABLE
from tests.forked import COMMAND_LINE, start_python
from tests.servers.agents import build_agent
from tests.servers.prometheus import eventually
from tests.servers.service import TOKEN, running_service
from tests.servers.terminal import Terminal, command, running_terminal

MODEL = "gpt-5"
A_TOKEN = Decimal("0.0001")
"""What a token costs, in dollars."""


class Worker:
    """A process' agent, with budgets and quotas of tenants, and its metrics.

    Args:
        store: Where the workers of the service count together.
        port: Where the metrics are served; 0 takes a free one.
    """

    def __init__(self, store: MemoryStore, port: int = 0) -> None:
        self.registry = CollectorRegistry()
        telemetry = Telemetry(registry=self.registry, subject_label={"tenant": str})
        self._quota = QuotaMiddleware(
            [
                ToolCallLimit("search", thread_limit=5, quotas=[Quota(8, per="tenant")]),
                CostLimit(thread_limit="0.50", name="money"),
                TokenLimit(run_limit=100_000, name="tokens"),
            ],
            store=store,
            prices=lambda used: used.total_tokens * A_TOKEN,
            telemetry=telemetry,
        )
        self.server: MetricsServer = start_metrics_server(port, registry=self.registry)

    def play(self, thread: str, searches: int, tokens: int, tenant: str = "acme") -> None:
        """Let the agent search on a thread; it spends tokens for that."""
        calls = [{"name": "search", "args": {}, "id": f"s{each}"} for each in range(searches)]
        script = [_answer(tokens - 1, calls), _answer(1)] if calls else [_answer(tokens)]
        agent = build_agent(script, [self._quota], name="support", saver=InMemorySaver())
        asked: Any = {"messages": [("user", "go on")]}
        config: Any = {"configurable": {"thread_id": thread}}
        asyncio.run(agent.ainvoke(asked, config, context={"tenant": tenant}))


def _answer(tokens: int, calls: Sequence[Any] = ()) -> AIMessage:
    """An answer that has used so many tokens."""
    used: Any = {"input_tokens": tokens, "output_tokens": 0, "total_tokens": tokens}
    return AIMessage(
        "Hello.",
        usage_metadata=used,
        tool_calls=[*calls],
        response_metadata={"model_name": MODEL},
    )


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Worker, Worker]]:
    """Two workers of a service."""
    store = MemoryStore()
    one, two = Worker(store), Worker(store)
    with one.server, two.server:
        one.play("ann", 6, 4_000)
        two.play("bob", 2, 1_000)
        two.play("cid", 0, 500, tenant="other")
        yield one, two


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The figures, printed once, without ages, and without the space that aligns them."""
    assert main(["top", "--once", *arguments]) == 0
    return re.sub(r"  +", "  ", re.sub(r" +\d+s$", "", capsys.readouterr().out, flags=re.MULTILINE))


def addresses(workers: tuple[Worker, ...]) -> list[str]:
    return [f"127.0.0.1:{each.server.port}" for each in workers]


EXPECTED = """\
calls 12 ran, 1 refused  2 near, 1 exhausted

threads:
thread  agent  limit  used/of  share  state  refused  ago  ends in
ann  support  tool:search  5/5  100%!  exhausted  1
ann  support  money  $0.40/$0.50  80%~  near  0
bob  support  tool:search  2/5  40%  ok  0
bob  support  money  $0.10/$0.50  20%  ok  0
cid  support  money  $0.05/$0.50  10%  ok  0
ann  support  tokens  4,000 tok  -  0
bob  support  tokens  1,000 tok  -  0
cid  support  tokens  500 tok  -  0

quotas:
subject  quota  agent  limit  used/of  share  state  ends in
acme  tenant  support  tool:search  7/8  87%~  near

limits:
agent  limit  allowed  refused  /min  on trial  near  exhausted  ended runs  granted
support  tool:search  7  1  -  0  1  1  0  0
support  money  5  0  -  0  1  0  0  0
support  tokens  5  0  -  0  0  0  0  0
"""


def test_two_workers(workers: tuple[Worker, Worker], capsys: pytest.CaptureFixture[str]) -> None:
    """What two workers say is one set of figures: threads, tenants, limits."""
    assert printed(capsys, *addresses(workers)) == EXPECTED


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal of 80 columns and 24 lines."""
    with running_terminal(tmp_path) as terminal:
        yield terminal


def top(*arguments: str, program: str = COMMAND_LINE) -> str:
    """A line for a shell that shows the view, and says how it ended."""
    return f"{command('top', *arguments, program=program)}; echo ended with $?"


def test_keys(workers: tuple[Worker, Worker], terminal: Terminal) -> None:
    """In a terminal: views, orders, a filter and a pause by keys; another size; and the end."""
    terminal.type(top(*addresses(workers), "--interval", "0.5"))
    lines = terminal.wait_for("2 processes at 2 addresses", "(0/min)")
    assert [line.split()[:4] for line in lines[3:6]] == [
        ["thread", "agent", "limit", "used/of"],
        ["ann", "support", "tool:search", "5/5"],
        ["ann", "support", "money", "$0.40/$0.50"],
    ]
    assert lines[4].split()[4:6] == ["100%!", "1"]
    assert lines[23].startswith("q quit")
    assert terminal.flags() == {"alternate_on": True, "cursor_flag": False, "wrap_flag": False}
    terminal.press("2")
    terminal.wait_for("acme", "tenant", "7/8", "87%~")
    terminal.press("3")
    terminal.wait_for("allowed", "on trial")
    terminal.press("1", "s")
    terminal.wait_for("by refused")
    terminal.press("/", "m", "O", "Down", "Enter")
    assert "money" in terminal.wait_for("with mO", "1-3 of 3")[4]
    terminal.press("Escape")
    terminal.wait_for("of 8")
    terminal.press("C-z", "Space")
    terminal.wait_for("paused")
    terminal.resize(140, 40)
    lines = terminal.wait_for("state", "exhausted", "ends in")
    assert len(lines) == 40
    assert lines[39].startswith("q quit")
    terminal.press("q")
    terminal.wait_for("ended with 0")
    assert "processes" not in terminal.text


def test_two_services(tmp_path: Path) -> None:
    """Two services that want a token are shown together; without it, the reason is."""
    with (
        running_service(tmp_path / "one") as one,
        running_service(tmp_path / "two") as two,
        running_terminal(tmp_path, width=140, height=40) as terminal,
    ):
        for service, thread in ((one, "thread-of-one"), (two, "thread-of-two")):
            assert service.ask(thread, "Find something!").status_code == 200
        line = top(one.url, two.url, "--interval", "0.2")
        terminal.type(f"{TOKEN_VARIABLE}={TOKEN} {line}")
        terminal.wait_for("2 processes at 2 addresses", "thread-of-one", "thread-of-two")
        terminal.press("q")
        terminal.wait_for("ended with 0")
        terminal.type(line)
        terminal.wait_for("0 processes at 2", "401 Unauthorized: give a token")
        terminal.press("q")


def test_news_are_shown(terminal: Terminal) -> None:
    """What agents do is seen while they do it; a restart begins anew, and takes nothing back."""
    store = MemoryStore()
    worker = Worker(store)
    with worker.server:
        terminal.type(top(*addresses((worker,)), "--interval", "0.5"))
        terminal.wait_for("1 process at 1 address", "no thread has used anything yet")
        worker.play("ann", 6, 4_000)
        terminal.wait_for("ann", "5/5", "1 refused")
    terminal.wait_for(" s old): [Errno 111] Connection refused", "5/5")
    worker = Worker(store, worker.server.port)
    with worker.server:
        worker.play("bob", 0, 100)
        lines = terminal.wait_for("bob", "$0.01/$0.50")
        assert "ann" not in "".join(lines)
        assert not re.search(r"-\d|Errno", lines[1] + lines[2].partition("limits")[0])
        terminal.press("q")
        terminal.wait_for("ended with 0")


def test_a_slow_address_keeps_nobody_waiting(
    workers: tuple[Worker, Worker], terminal: Terminal
) -> None:
    """While an address does not answer, the others are shown, keys work, and so does the end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = f"127.0.0.1:{silent.getsockname()[1]}"
        terminal.type(top(slow, *addresses(workers)))
        terminal.wait_for("2 processes at 3 addresses", "ann")
        terminal.press("3")
        terminal.wait_for("allowed")
        terminal.press("q")
        terminal.wait_for("ended with 0")


BREAKS = f"""
from langchain_quota.cli import top
drawn = []
def screen(*arguments, **options):
    drawn.append(1)
    if len(drawn) > 1:
        raise RuntimeError("it broke")
    return "almost"
top.screen = screen
{COMMAND_LINE}
"""

# The exit code says how; a shell adds 128 to the number of a signal.
ENDS: dict[str, tuple[Callable[[Terminal, int], object], int, str]] = {
    "q": (lambda terminal, _: terminal.press("q"), 0, COMMAND_LINE),
    "Ctrl-C": (lambda terminal, _: terminal.press("C-c"), 130, COMMAND_LINE),
    "SIGTERM": (lambda _, pid: os.kill(pid, signal.SIGTERM), 143, COMMAND_LINE),
    "SIGHUP": (lambda _, pid: os.kill(pid, signal.SIGHUP), 129, COMMAND_LINE),
    "an error": (lambda *_: None, 1, BREAKS),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_terminal_is_as_before(
    end: str, workers: tuple[Worker, Worker], terminal: Terminal, tmp_path: Path
) -> None:
    """However the view ends, the terminal's settings, its cursor and its screen are as before."""
    stop, code, program = ENDS[end]
    pid, before, after = (tmp_path / name for name in ("pid", "before", "after"))
    # The shell's own id becomes the program's.
    run = command("top", *addresses(workers), "--interval", "0.5", program=program)
    terminal.type(
        f"stty -g > {before}; sh -c 'echo $$ > {pid}; exec \"$@\"' sh {run};"
        f" echo ended with $?; stty -g > {after}"
    )
    if program is COMMAND_LINE:
        terminal.wait_for("2 processes")
    stop(terminal, int(eventually(pid.read_text)) if pid.exists() else 0)
    terminal.wait_for(f"ended with {code}")
    assert eventually(lambda: after.exists() and after.read_text()) == before.read_text()
    assert terminal.flags() == {"alternate_on": False, "cursor_flag": True, "wrap_flag": True}
    if end == "an error":
        assert "RuntimeError: it broke" in terminal.text


def test_without_keys(workers: tuple[Worker, Worker], terminal: Terminal) -> None:
    """Where keys cannot be read, as on Windows, the view works without, and says so."""
    windows = f"import sys; sys.modules['termios'] = None; {COMMAND_LINE}"
    terminal.type(top(*addresses(workers), "--view", "limits", program=windows))
    terminal.wait_for("2 processes", "allowed", "no keys are read here")
    terminal.press("C-c")
    terminal.wait_for("ended with 130")


def test_hostile_names(terminal: Terminal) -> None:
    """Wide, long and deceiving names of threads move no line, nor the terminal's cursor."""
    worker = Worker(MemoryStore())
    names = ["名前" * 30, "a\x1b[2J\x1b[31mb", "e\u0301" * 30, "👩‍👩‍👧" * 5, "\u202edlo", "x" * 500]
    with worker.server:
        for name in names:
            worker.play(name, 1, 100)
        terminal.type(top(*addresses((worker,))))

        def drawn() -> bool:
            lines = terminal.lines
            # Three limits have judged each thread: each has a line, and the keys have the last.
            return (
                all(" support " in line for line in lines[4:22])
                and lines[0].startswith("langchain-quota top")
                and lines[23].startswith("q quit")
            )

        eventually(drawn)


def test_no_color(workers: tuple[Worker, Worker], terminal: Terminal) -> None:
    """With NO_COLOR nothing is colored; the state is in words or marks."""
    colored = re.compile(r"\x1b\[[0-9;]*3[1-7]")
    for prefix, has_colors in (("", True), ("NO_COLOR=1 ", False)):
        terminal.type(prefix + command("top", *addresses(workers)))
        terminal.wait_for("100%!")
        assert bool(colored.search(terminal.escaped)) is has_colors
        terminal.press("q")
        eventually(lambda: not terminal.flags()["alternate_on"])


def test_plain_lines(workers: tuple[Worker, Worker]) -> None:
    """In a pipe: one print; with --interval prints with their times, until the reader goes."""
    run = ["top", *addresses(workers), "--view", "quotas"]
    read, write = os.pipe()
    with (
        os.fdopen(read) as output,
        start_python(COMMAND_LINE, *run, stdout=write, stderr=write) as once,
    ):
        os.close(write)
        lines = output.read().splitlines()
        assert once.wait(60) == 0
    assert [line.split()[:1] for line in lines] == [
        *(["calls"], [], ["quotas:"], ["subject"], ["acme"])
    ]
    read, write = os.pipe()
    with start_python(
        COMMAND_LINE, *run, "--interval", "0.5", stdout=write, stderr=write
    ) as repeated:
        os.close(write)
        with os.fdopen(read) as output:
            lines = [output.readline() for _ in range(6)]
        assert repeated.wait(60) == 1
    assert all(
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  (calls|quotas:|subject|acme)", each)
        for each in lines
    )
    assert not any("\x1b" in each for each in lines)
