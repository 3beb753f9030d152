"""`langchain-quota top` in a real terminal, beside running services."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from prometheus_client import CollectorRegistry

from langchain_quota import (
    CostLimit,
    MemoryStore,
    Quota,
    QuotaMiddleware,
    Telemetry,
    TokenLimit,
    ToolCallLimit,
    start_metrics_server,
)
from tests.forked import COMMAND_LINE
from tests.server.agents import build_agent
from tests.server.prometheus import eventually
from tests.server.terminal import Terminal, command, running_terminal
from tests.tokens import answer

A_TOKEN = Decimal("0.0001")
"""What a token costs, in dollars."""


class Worker:
    """A process' agent, with budgets and quotas of tenants, and its metrics."""

    def __init__(self, store: MemoryStore, port: int = 0) -> None:
        registry = CollectorRegistry()
        self._quota = QuotaMiddleware(
            [
                ToolCallLimit("search", thread_limit=5, quotas=[Quota(8, per="tenant")]),
                CostLimit(thread_limit="0.50", name="money"),
                TokenLimit(run_limit=100_000, name="tokens"),
            ],
            store=store,
            prices=lambda used: used.total_tokens * A_TOKEN,
            telemetry=Telemetry(registry=registry, subject_label={"tenant": str}),
        )
        self.server = start_metrics_server(port, registry=registry)
        self.address = f"127.0.0.1:{self.server.port}"

    def play(self, thread: str, searches: int, tokens: int, tenant: str = "acme") -> None:
        """Let the agent search on a thread; it spends tokens for that."""
        script = (
            [answer(tokens - 1, *["search"] * searches), answer(1)]
            if searches
            else [answer(tokens)]
        )
        agent = build_agent(script, [self._quota], name="support", saver=InMemorySaver())
        asked: Any = {"messages": [("user", "go on")]}
        config: Any = {"configurable": {"thread_id": thread}}
        asyncio.run(agent.ainvoke(asked, config, context={"tenant": tenant}))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    """The addresses of two workers of a service."""
    store = MemoryStore()
    one, two = Worker(store), Worker(store)
    with one.server, two.server:
        one.play("ann", 6, 4_000)
        two.play("bob", 2, 1_000)
        two.play("cid", 0, 500, tenant="other")
        yield [one.address, two.address]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal of 80 columns and 24 lines."""
    with running_terminal(tmp_path) as terminal:
        yield terminal


def top(*arguments: str, program: str = COMMAND_LINE) -> str:
    """A line for a shell that shows the view, and says how it ended."""
    return f"unset COLUMNS LINES; {command('top', *arguments, program=program)}; echo ended with $?"


def test_a_screen(workers: list[str], terminal: Terminal) -> None:
    """In a terminal all views share the screen, of any size; Ctrl-Z is ignored, Ctrl-C ends it."""
    terminal.type(top(*workers, "--interval", "0.5"))
    rows = {3: "thread agent limit used/of", 4: "ann support tool:search 5/5"}
    terminal.wait_for("2 of 2 addresses", "7/8", "87%~", "dry run", begins=rows)
    assert terminal.flags() == {"alternate_on": True, "cursor_flag": False, "wrap_flag": True}
    terminal.press("C-z")
    terminal.resize(140, 40)
    lines = terminal.wait_for("state", "exhausted", "ends in")
    assert len(lines) == 40
    terminal.press("C-c")
    terminal.wait_for("ended with 130")
    assert "addresses" not in terminal.text


def test_news_are_shown(terminal: Terminal) -> None:
    """What agents do is seen while they do it; a restart begins anew, and takes nothing back.

    While an address does not answer, the others are shown.
    """
    store = MemoryStore()
    worker = Worker(store)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = f"127.0.0.1:{silent.getsockname()[1]}"
        with worker.server:
            terminal.type(top(worker.address, slow, "--interval", "0.5"))
            terminal.wait_for("1 of 2 addresses", "nothing has been used yet")
            worker.play("ann", 6, 4_000)
            terminal.wait_for("ann", "5/5", "1 refused")
        terminal.wait_for(" s old): [Errno 111] Connection refused", "5/5")
        worker = Worker(store, worker.server.port)
        with worker.server:
            worker.play("bob", 0, 100)
            lines = terminal.wait_for("bob", "$0.01/$0.50", without="ann")
            assert "-" not in lines[1]
            terminal.press("C-c")
            terminal.wait_for("ended with 130")


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

# The exit code says how.
ENDS: dict[str, tuple[int, str]] = {
    "C-c": (130, COMMAND_LINE),
    "SIGTERM": (130, COMMAND_LINE),
    "an error": (1, BREAKS),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_terminal_is_as_before(
    end: str, workers: list[str], terminal: Terminal, tmp_path: Path
) -> None:
    """However the view ends, the terminal's settings, its cursor and its screen are as before."""
    code, program = ENDS[end]
    pid, before, after = (tmp_path / name for name in ("pid", "before", "after"))
    # The shell's own id becomes the program's.
    run = command("top", *workers, "--interval", "0.5", program=program)
    terminal.type(
        f"stty -g > {before}; sh -c 'echo $$ > {pid}; exec \"$@\"' sh {run};"
        f" echo ended with $?; stty -g > {after}"
    )
    if program is not BREAKS:
        terminal.wait_for("2 of 2 addresses")
    if end == "SIGTERM":
        os.kill(int(eventually(pid.read_text)), signal.SIGTERM)
    elif program is not BREAKS:
        terminal.press("C-c")
    terminal.wait_for(f"ended with {code}")
    assert eventually(lambda: after.exists() and after.read_text()) == before.read_text()
    assert terminal.flags() == {"alternate_on": False, "cursor_flag": True, "wrap_flag": True}
    assert ("RuntimeError: it broke" in terminal.text) == (program is BREAKS)


def test_a_pipe(workers: list[str], terminal: Terminal) -> None:
    """Where the output is no terminal, the figures are printed once."""
    terminal.type(f"clear; ({top(*workers)}) | cat")
    terminal.wait_for("quotas:", "87%~ near", "ended with 0")
    assert terminal.flags()["alternate_on"] is False
