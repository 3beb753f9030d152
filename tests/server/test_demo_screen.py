"""The demo in a real terminal: what stays on the screen at its end, and after Ctrl-C."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import COMMAND_LINE
from tests.server.terminal import Terminal, running_terminal

# Ctrl-C must reach the demo even where the tests run with SIGINT ignored.
PROGRAM = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
open("pid", "w").write(str(os.getpid()))
{COMMAND_LINE}
"""

BAR = " +[━╸╺]{6,}"
END = [
    # The shell's prompt may come late.
    r"(\S )?6 threads for \d+ s, Ctrl-C ends them; metrics: http://127\.0\.0\.1:\d+/metrics",
    r"thread +search +tools +model +tokens +blocked",
    *(
        rf"customer-{number} +\d/\d{BAR} \d+/16{BAR} \d+/20{BAR} [\d,]+/6,000{BAR} [ \d]+\d"
        for number in range(1, 7)
    ),
    "",
    r'Some of http://127\.0\.0\.1:\d+/metrics, all with agent="support":',
    *[r"  langchain_quota_\w+\{\S+\} \d+"] * 5,
    "",
    r"Calls over its limits that customer-\d asked for: \d+; none ran\.",
    "",
    r"1\. Limit your own agent: https://\S+",
    r"2\. Watch it live: .* top",
    r"3\. Get dashboards: .*langchain-quota export grafana --to grafana",
]
"""Every line, from the first that the demo prints on."""


def check_end(terminal: Terminal) -> None:
    """Assert that the screen ends with all of the demo's end, nothing of it wrapped or torn."""
    lines = terminal.wait_for("--to grafana")
    end = next(at for at, line in enumerate(lines, 1) if "--to grafana" in line)
    for pattern, line in zip(END, lines[max(0, end - len(END)) : end], strict=True):
        assert re.fullmatch(pattern, line), f"{pattern} is not\n{line}\nin\n{terminal.text}"
    assert terminal.flags() == {"alternate_on": False, "cursor_flag": True, "wrap_flag": True}


def start_demo(terminal: Terminal, directory: Path, seconds: int) -> None:
    (directory / "demo.py").write_text(PROGRAM)
    # Where they are set, COLUMNS and LINES are taken for the size.
    line = f"cd {directory}; unset COLUMNS LINES; {sys.executable} demo.py demo --port 0"
    terminal.type(f"{line} --seconds {seconds}")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40)])
def test_end_fits_the_screen(width: int, height: int, tmp_path: Path) -> None:
    """The table stays: with all that follows it, it fits the screen on which it was redrawn."""
    with running_terminal(tmp_path, width=width, height=height) as terminal:
        start_demo(terminal, tmp_path, seconds=5)
        terminal.wait_for("thread ", "━", "customer-1 may not call search: search (run)")
        assert terminal.flags()["alternate_on"]
        check_end(terminal)
        assert "\x1b[32m━" in terminal.escaped


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM"])
def test_ended_early(end: str, tmp_path: Path) -> None:
    """Ended early, the demo leaves the same end: keys and another size before do not tear it."""
    with running_terminal(tmp_path) as terminal:
        start_demo(terminal, tmp_path, seconds=600)
        terminal.wait_for("3/8 ", "━")
        terminal.resize(100, 30)
        terminal.wait_for("━" * 10)
        if end == "Ctrl-C":
            terminal.press("Enter", "x", "Enter", "C-c")
        else:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        check_end(terminal)
        terminal.type("echo code=$?")
        terminal.wait_for("code=130")
