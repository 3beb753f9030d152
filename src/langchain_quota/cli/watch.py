"""A table that is redrawn until the user quits."""

import os
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from langchain_quota.cli.command import say

try:
    import termios
    import tty
except ModuleNotFoundError:  # Windows: Ctrl-C ends it
    termios = tty = None  # type: ignore[assignment]

_OPEN = "\x1b[?1049h\x1b[?25l"
"""Shows the terminal's other screen, without a cursor."""
_CLOSE = "\x1b[?25h\x1b[?1049l"


def watch(lines: Callable[[], Sequence[str]], every: float) -> int:
    """Show lines again and again: in a terminal in place, in a pipe those that are new.

    Args:
        lines: Gives a heading, and one line for each thing.
        every: How long to wait before the next time, in seconds.

    Returns:
        The exit code, when `q` is pressed; Ctrl-C is the caller's.
    """
    if not sys.stdout.isatty():
        return _print_news(lines, every)
    with _screen(), _keys() as pressed:
        while True:
            _draw(lines(), every)
            if pressed(every) in {"q", "Q"}:
                return 0


def _print_news(lines: Callable[[], Sequence[str]], every: float) -> int:
    """Print the lines that were not there the time before, each with the time."""
    before: set[str] = set()
    while True:
        found = lines()
        # The width of columns may change: that alone is no news.
        now = {" ".join(line.split()) for line in found}
        for line in found:
            if " ".join(line.split()) not in before:
                say(f"{datetime.now().astimezone():%H:%M:%S}  {line}")
        before = now
        time.sleep(every)


def _draw(lines: Sequence[str], every: float) -> None:
    width, height = shutil.get_terminal_size()
    room = max(1, height - 2)
    shown = [*lines]
    if len(shown) > room:
        shown = [*lines[: room - 1], f"... {len(lines) - room + 1} more: narrow it with --key"]
    shown += ["", f"{datetime.now().astimezone():%H:%M:%S}, every {every:g} s; q ends"]
    text = "".join(f"{line[:width]}\x1b[K\r\n" for line in shown[:-1])
    encoding = sys.stdout.encoding or "utf-8"
    text = f"\x1b[H{text}{shown[-1][:width]}\x1b[K\x1b[J"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


@contextmanager
def _screen() -> Iterator[None]:
    sys.stdout.write(_OPEN)
    try:
        yield
    finally:
        sys.stdout.write(_CLOSE)
        sys.stdout.flush()


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits some seconds for a key; its result is empty without one."""
    if termios is None or not sys.stdin.isatty():
        yield _wait
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda seconds: _pressed(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _pressed(terminal: int, seconds: float) -> str:
    ready, _, _ = select.select([terminal], [], [], seconds)
    return os.read(terminal, 1).decode(errors="replace") if ready else ""


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
