"""How the demo shows its threads: one table, redrawn in a terminal, printed as lines elsewhere."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.bars import STYLES, bar, bar_characters
from langchain_quota.cli.command import say
from langchain_quota.decision import Decision, Outcome
from langchain_quota.levels import level

NEAR = 0.8

_COUNTS = ("allowed", "blocked", "last refusal   ")
_THOUSAND = 1000
_WIDE = 100
"""From how many columns on there is room for the allowed calls and the last refusal."""


@dataclass
class Row:
    """A thread: what it has used of each limit, by name, and what became of its calls."""

    thread: str
    used: dict[str, int]
    most: dict[str, int]
    allowed: int = 0
    blocked: int = 0
    last_refusal: str = ""

    def take(self, decision: Decision) -> None:
        """Take in a decision about a call of the thread."""
        self.allowed += decision.outcome is Outcome.ALLOWED
        self.blocked += decision.outcome is Outcome.BLOCKED
        for status in decision.limits:
            if status.limit in self.used:
                self.used[status.limit] = status.thread_used
                # Grants have raised it.
                self.most[status.limit] = status.thread_limit or 0
            if status.refused:
                self.last_refusal = f"{_title(status.limit)} ({status.refusal_scope})"


class View:
    """Shows the threads under a heading; `show` may block, so call it in a worker thread."""

    def __init__(self, rows: Sequence[Row], heading: str) -> None:
        self._console = Console()
        can_redraw = self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_live = sys.stdout.isatty() and can_redraw
        if not self._is_live:  # no colors, even where the environment forces them
            self._console = Console(force_terminal=False, color_system=None)
        self.interval = 0.2 if self._is_live else 1.0
        self._rows = rows
        self._heading = Text(heading, no_wrap=True)
        self._live: Live | None = None
        self._printed: list[str] = []

    @contextmanager
    def on_screen(self) -> Iterator[None]:
        """Show the table, where it can be redrawn, on a screen of its own that keys do not tear."""
        # That screen is gone at the end, so call `end` then.
        if not self._is_live:
            yield
            return
        # The user's own screen must come back.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Live(console=self._console, screen=True, auto_refresh=False) as self._live:
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def show(self) -> None:
        """Redraw the table, or print those of its lines that changed."""
        if self._live is not None:
            shown = Group(self._heading, table(self._rows, self._console))
            self._live.update(shown, refresh=True)
            return
        lines = self._lines()
        for line, printed in zip_longest(lines, self._printed):
            if line != printed:
                say(line)
        self._printed = lines

    def end(self) -> None:
        """Print the table where it stays."""
        if not self._is_live:
            say()
        for line in self._lines():
            say(line)

    def _lines(self) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(table(self._rows, self._console))
        return [line.rstrip() for line in captured.get().splitlines()]


def table(rows: Sequence[Row], console: Console) -> Table:
    """The threads as a table; names are shown as they are, never read as markup."""
    counts = _COUNTS if console.width >= _WIDE else _COUNTS[1:2]
    fixed = max(len(row.thread) for row in rows) + sum(1 + len(each) for each in counts)
    fixed += max(
        sum(2 + len(_numbers(row.used[each], row.most[each])) for each in row.used) for row in rows
    )
    width = max(2, min(20, (console.width - fixed) // len(rows[0].used)))
    characters = bar_characters(console.encoding)
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("thread", *map(_title, rows[0].used), *counts):
        justify: JustifyMethod = "right" if title in _COUNTS[:2] else "left"
        shown.add_column(
            title, justify=justify, min_width=len(title), no_wrap=True, overflow="crop"
        )
    for row in rows:
        gauges = (gauge(row.used[each], row.most[each], width, characters) for each in row.used)
        cells = (
            Text(str(row.allowed)),
            Text(str(row.blocked), "red" if row.blocked else ""),
            Text(row.last_refusal),
        )
        shown.add_row(Text(row.thread), *gauges, *(cells if counts is _COUNTS else cells[1:2]))
    return shown


def gauge(used: int, most: int, width: int, characters: str = "▇_") -> Text:
    """Such as `3/8 ▇▇____`; only the bar has a color, so that the numbers can be read anywhere."""
    drawn = bar(used / most if most else 1.0, width, characters)
    style = STYLES[level(used, most, NEAR)]
    return Text.assemble(_numbers(used, most), " ", (drawn, style), no_wrap=True)


def _numbers(used: int, most: int) -> str:
    # Thousands have a decimal.
    room = 2 * len(_short(most)) + (1 if most < _THOUSAND else 3)
    return f"{_short(used)}/{_short(most)}".ljust(room)


def _short(amount: int) -> str:
    """An amount in few characters, such as `950` or `8.9k`, and never more than it is."""
    return str(amount) if amount < _THOUSAND else f"{amount * 10 // _THOUSAND / 10:g}k"


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
