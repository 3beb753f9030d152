"""How the demo shows its threads: a live table in a terminal, plain lines elsewhere."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.bars import STYLES, bar, bar_characters
from langchain_quota.cli.command import say
from langchain_quota.cli.demo_board import Row, Use

_BAR_WIDTHS = (2, 20)
_ALLOWED, _BLOCKED, _REFUSAL = "allowed", "blocked", "last refusal   "
_THOUSAND = 1000
_WIDE = 100
"""From how many columns on there is room for the allowed calls and the last refusal."""


class Display:
    """Shows the threads again and again; `show` may block, and is called in a worker thread.

    Args:
        live: Redraws the table in place; without it a line is printed for each thread that
            changed.
        heading: The heading of the redrawn table.
    """

    def __init__(self, live: Live | None = None, heading: str = "") -> None:
        self.interval = 1.0 if live is None else 0.2
        self._live = live
        self._heading = Text(heading, no_wrap=True)
        self._printed: dict[str, Row] = {}

    def show(self, rows: Sequence[Row]) -> None:
        """Show the threads' numbers."""
        if self._live is not None:
            shown = table(rows, self._live.console)
            self._live.update(Group(self._heading, shown), refresh=True)
            return
        changed = [row for row in rows if self._printed.get(row.thread) != row]
        if changed:
            _print(changed, heading=not self._printed)
        self._printed.update({row.thread: row for row in changed})


@contextmanager
def display(heading: str) -> Iterator[Display]:
    """The table where it can be redrawn, else lines.

    The table is redrawn on a screen of its own: a new size of the terminal and typed keys cannot
    spoil it. That screen is gone at the end, so call `print_table` then.
    """
    console = _terminal()
    if console is not None:
        # The user's own screen must come back.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                yield Display(live, heading)
        finally:
            signal.signal(signal.SIGTERM, before)
    else:
        yield Display()


def print_table(rows: Sequence[Row]) -> None:
    """Print the threads' numbers on the user's own screen, where they stay."""
    console = _terminal()
    if console is not None:
        console.print(table(rows, console))
    else:
        say()
        _print(rows, heading=True)


def _terminal() -> Console | None:
    """The terminal, if the table can be redrawn in it."""
    console = Console()
    can_redraw = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    return console if can_redraw else None


def _print(rows: Sequence[Row], *, heading: bool) -> None:
    """Print the threads without colors, even where the environment forces them."""
    console = Console(force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(table(rows, console, heading=heading))
    for line in captured.get().splitlines():
        say(line.rstrip())


def table(rows: Sequence[Row], console: Console, *, heading: bool = True) -> Table:
    """The threads as a table; names are shown as they are, never read as markup."""
    wide = console.width >= _WIDE
    counts = (_ALLOWED, _BLOCKED, _REFUSAL) if wide else (_BLOCKED,)
    fixed = max(len(row.thread) for row in rows) + sum(1 + len(each) for each in counts)
    fixed += max(sum(len(f" {_numbers(use)} ") for use in row.uses) for row in rows)
    least, most = _BAR_WIDTHS
    width = max(least, min(most, (console.width - fixed) // len(rows[0].uses)))
    characters = bar_characters(console.encoding)
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=heading)
    for title in ("thread", *(use.title for use in rows[0].uses), *counts):
        justify: JustifyMethod = "right" if title in {_ALLOWED, _BLOCKED} else "left"
        shown.add_column(
            title, justify=justify, min_width=len(title), no_wrap=True, overflow="crop"
        )
    for row in rows:
        cells = {
            _ALLOWED: Text(str(row.allowed)),
            _BLOCKED: Text(str(row.blocked), "red" if row.blocked else ""),
            _REFUSAL: Text(row.last_refusal),
        }
        uses = (gauge(use, width, characters) for use in row.uses)
        shown.add_row(Text(row.thread), *uses, *(cells[each] for each in counts))
    return shown


def gauge(use: Use, width: int, characters: str = "▇_") -> Text:
    """A use with a bar, such as `3/8 ▇▇____`; the bar is full only at the limit.

    Only the bar has a color: the numbers can be read on a dark and on a light background.
    """
    share = use.used / use.limit if use.limit else 1.0
    return Text.assemble(
        _numbers(use), " ", (bar(share, width, characters), STYLES[use.level]), no_wrap=True
    )


def _numbers(use: Use) -> str:
    most = _short(use.limit)
    # Thousands have a decimal.
    room = 2 * len(most) + (1 if use.limit < _THOUSAND else 3)
    return f"{_short(use.used)}/{most}".ljust(room)


def _short(amount: int) -> str:
    """An amount in few characters, such as `950` or `8.9k`, and never more than it is."""
    if amount < _THOUSAND:
        return str(amount)
    return f"{amount * 10 // _THOUSAND / 10:g}k"
