"""The demo as a user runs it: real agents, a real database, a real /metrics."""

import os
import re
import subprocess
from dataclasses import dataclass

import pytest
from blockbuster import blockbuster_ctx

from langchain_quota.cli import main
from tests.forked import run_python

# A terminal's Ctrl-C must reach the demo even where the tests run with SIGINT ignored.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from langchain_quota.cli import main
from langchain_quota.telemetry.tracing import DECISION
sys.exit(main(sys.argv[1:]))
"""


def environment(**extra: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**own, "COLUMNS": "80", **extra}


def demo(
    *arguments: str, code: str = CODE, **extra_environment: str
) -> subprocess.CompletedProcess[str]:
    return run_python(code, "demo", *arguments, env=environment(**extra_environment))


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


def test_event_loop_is_never_blocked(capsys: pytest.CaptureFixture[str]) -> None:
    """Under the whole demo nothing blocks the event loop."""
    with blockbuster_ctx():
        assert main(["demo", "--seconds", "1", "--port", "0"]) == 0
    assert ending(capsys.readouterr().out).table["customer-1"].blocked > 0
