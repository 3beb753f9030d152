"""How the demo shows its threads: a live table in a terminal, plain lines elsewhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.bars import STYLES, bar, bar_characters
from langchain_quota.cli.command import say
from langchain_quota.cli.demo_board import Row, Use

_BAR_WIDTHS = (2, 20)
_REFUSAL_HEADING = "last refusal   "
_THOUSAND = 1000
_WIDE = 110
"""From how many columns on there is room for the allowed calls and the last refusal."""
# What a line of the table takes beside the thread's name, the bars and what only a wide one has.
_FIXED_WIDTH = len(" search 8/8  tools 16/16  model 20/20  tokens 5.9k/6k  blocked")


class Display(Protocol):
    """Shows the threads again and again; `show` may block, and is called in a worker thread."""

    interval: float

    def show(self, rows: Sequence[Row]) -> None:
        """Show the threads as they stand."""


class LiveTable:
    """A table that stays in its place in a terminal."""

    interval = 0.2

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, rows: Sequence[Row]) -> None:
        """Redraw the table."""
        self._live.update(table(rows, self._live.console), refresh=True)


class PlainLines:
    """One line for each thread that changed."""

    interval = 1.0

    def __init__(self) -> None:
        self._shown: dict[str, Row] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Print what changed."""
        for row in rows:
            if self._shown.get(row.thread) != row:
                self._shown[row.thread] = row
                say(line(row))


@contextmanager
def display() -> Iterator[Display]:
    """The table where it can be redrawn, else lines."""
    console = Console()
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield LiveTable(live)
    else:
        yield PlainLines()


def table(rows: Sequence[Row], console: Console) -> Table:
    """The threads as a table; names are shown as they are, never read as markup."""
    wide = console.width >= _WIDE
    fixed = max(len(row.thread) for row in rows) + _FIXED_WIDTH
    fixed += len(f" allowed {_REFUSAL_HEADING}") if wide else 0
    least, most = _BAR_WIDTHS
    width = max(least, min(most, (console.width - fixed) // len(rows[0].uses)))
    characters = bar_characters(console.encoding)
    shown = Table(
        "thread", *("" for _ in rows[0].uses), box=None, padding=(0, 1, 0, 0), pad_edge=False
    )
    if wide:
        shown.add_column("allowed", justify="right")
    shown.add_column("blocked", justify="right")
    if wide:
        shown.add_column(_REFUSAL_HEADING)
    for column in shown.columns:
        column.no_wrap = True
    for row in rows:
        cells = [
            Text(row.thread),
            *(Text(gauge(use, width, characters), STYLES[use.level]) for use in row.uses),
            *([Text(str(row.allowed))] if wide else []),
            Text(str(row.blocked), "red" if row.blocked else ""),
            *([Text(row.last_refusal)] if wide else []),
        ]
        shown.add_row(*cells)
    return shown


def line(row: Row) -> str:
    """A thread as a line of text."""
    characters = bar_characters(sys.stdout.encoding)
    gauges = "  ".join(gauge(use, 8, characters) for use in row.uses)
    refused = f"  last refusal: {row.last_refusal}" if row.last_refusal else ""
    counts = f"allowed {row.allowed}  blocked {row.blocked}"
    return f"{row.thread}  {gauges}  {counts}  {row.level}{refused}"


def gauge(use: Use, width: int, characters: str = "▇_") -> str:
    """A use with a bar, such as `search 3/8 ▇▇____`; the bar is full only at the limit."""
    share = use.used / use.limit if use.limit else 1.0
    most = _short(use.limit)
    # Thousands have a decimal.
    room = 2 * len(most) + (1 if use.limit < _THOUSAND else 3)
    numbers = f"{_short(use.used)}/{most}".ljust(room)
    return f"{use.title} {numbers} {bar(share, width, characters)}"


def _short(amount: int) -> str:
    """An amount in few characters, such as `950` or `8.9k`, and never more than it is."""
    if amount < _THOUSAND:
        return str(amount)
    return f"{amount * 10 // _THOUSAND / 10:g}k"
