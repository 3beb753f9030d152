"""A live view of running services: who is near a limit, and who is refused."""

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console, JustifyMethod, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.screen import Screen
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.arguments import VIEWS
from langchain_quota.cli.metrics import Figures, Limit, Scrape, Source, Use, ask, figures, sources
from langchain_quota.cli.printing import complain, printable, say
from langchain_quota.core.decision import Outcome
from langchain_quota.runtime.units import NANODOLLARS, Level, Unit, as_dollars, as_time

SOME_FAILED, ALL_FAILED = 1, 2
"""The exit codes if addresses did not answer, where each is asked once."""
OK, NEAR, EXHAUSTED = Level
STYLES = {OK: "green", NEAR: "yellow", EXHAUSTED: "red"}
"""The terminal's own colors, so that they fit a dark and a light background."""
FAULTS = 3
"""How many lines name addresses that fail."""

_PAUSE = 0.2
"""The seconds between two looks at new answers."""
_WIDE = 100
_WIDEST = 100_000
"""So many columns that plain text is neither wrapped nor cut."""
_HEADINGS = 2
"""The lines above the rows of a table: its name, and the names of its columns."""
_NAMES = ("thread", "subject", "quota", "agent", "limit")
"""The columns that become narrower where the terminal is; numbers never do."""
_USED = ("used/of", "share", "state")
_COLUMNS = {
    "threads": ("thread", "agent", "limit", *_USED, "refused", "ago", "ends in"),
    "quotas": ("subject", "quota", "agent", "limit", *_USED, "ends in"),
    "limits": (
        *("agent", "limit", "allowed", "refused", "dry run", "near", "exhausted", "ended runs"),
    ),
}
_ONLY_WIDE = ("state", "ended runs")
"""The columns that need a wide terminal."""
_MARKS = {None: " ", OK: " ", NEAR: "~", EXHAUSTED: "!"}
"""They say the same without colors."""
_NOTHING = "nothing has been used yet; users and tenants are seen with subject_label"

Row = Use | Limit


def run(arguments: Namespace) -> int:
    """Show the figures in a terminal until Ctrl-C, else print them once."""
    asked = sources(arguments)
    views = (arguments.view,) if arguments.view else VIEWS
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal and not arguments.once:
        ask(asked, arguments.interval)
        _show(asked, views, console)
    for thread in ask(asked, None):
        thread.join()
    scrapes, faults = _told(asked)
    for fault in faults:
        complain("top", fault)
    if not scrapes:
        return ALL_FAILED
    known = figures(scrapes)
    plain = Console(width=_WIDEST, force_terminal=False)
    with plain.capture() as printed:
        plain.print(_summary(known))
        for view, rows in _tables(known, views).items():
            plain.print(f"\n{view}:", _table(rows, view, plain, time.time()), sep="\n")
    for line in printed.get().splitlines():
        say(line.rstrip())
    return SOME_FAILED if faults else 0


def _told(asked: Sequence[Source]) -> tuple[list[Scrape], list[str]]:
    """Return what addresses have answered, and what is wrong with some."""
    scrapes = [source.scrape for source in asked if source.scrape is not None]
    return scrapes, [source.fault for source in asked if source.fault]


def _show(asked: Sequence[Source], views: Sequence[str], console: Console) -> NoReturn:
    """Show the figures until a signal; however it ends, the terminal is as before."""
    known: Figures | None = None
    taken: list[Scrape] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(signal, "SIGTSTP"):  # not on Windows; Ctrl-Z would leave the screen to the shell
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            scrapes, faults = _told(asked)
            if scrapes != taken:
                taken, known = scrapes, figures(scrapes)
            now, count = time.time(), len(asked)
            view = screen(known, views, console=console, addresses=count, faults=faults, now=now)
            live.update(view, refresh=True)
            time.sleep(_PAUSE)


def _tables(figures: Figures, views: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of each view that has some, the most urgent first."""
    tables = {view: sorted(getattr(figures, view), key=_urgency) for view in views}
    return {view: rows for view, rows in tables.items() if rows}


def _urgency(row: Row) -> tuple[float | str, ...]:
    if isinstance(row, Limit):
        return (-row.counts[Outcome.BLOCKED], *row[:2])
    # A limit in a dry run refuses nobody, so nobody counts as near it.
    return (row.level is None, -(row.share or 0), -row.refused, *row[:4])


def screen(  # noqa: PLR0913 - what a screen shows, by keyword
    known: Figures | None,
    views: Sequence[str] = VIEWS,
    *,
    console: Console,
    addresses: int,
    faults: Sequence[str],
    now: float,
) -> RenderableType:
    """Return the whole screen; `known` is `None` before the first answer."""
    figures = known or Figures()
    title = Text.assemble(("langchain-quota top", "bold"), "  ")
    title.append(f"{figures.processes} of {addresses} addresses" if known else "asking ...")
    parts: list[RenderableType] = [
        title,
        _summary(figures),
        *(Text(each, "red") for each in faults[:FAULTS]),
    ]
    tables = _tables(figures, views)
    if not tables:
        parts.append(Text(_NOTHING, "dim"))
    left = console.height - len(parts) - _HEADINGS * len(tables)
    pages: dict[str, int] = {}
    # Small tables are whole, and large ones share the rest.
    for view, rows in sorted(tables.items(), key=lambda table: len(table[1])):
        pages[view] = min(len(rows), max(1, left // (len(tables) - len(pages))))
        left -= pages[view]
    for view, rows in tables.items():
        heading = Text.assemble((f"{view} ", "reverse"), f" {pages[view]:,} of {len(rows):,}")
        parts += [heading, _table(rows[: pages[view]], view, console, now)]
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "crop"
    return Screen(*parts)


def _summary(figures: Figures) -> Text:
    """Return the sums of everything, in one line."""
    text = Text(f"calls {compact(figures.ran)} ran, ")
    text.append(f"{compact(figures.refused)} refused", "red" if figures.refused else "")
    for before, level in (("  ", NEAR), (", ", EXHAUSTED)):
        count = sum(limit.counts[level] for limit in figures.limits)
        text.append(before).append(f"{compact(count)} {level}", STYLES[level] if count else "")
    return text


def _table(rows: Sequence[Row], name: str, console: Console, now: float) -> Table:
    wide = console.width >= _WIDE
    columns = [column for column in _COLUMNS[name] if wide or column not in _ONLY_WIDE]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        heading = Text(column, no_wrap=True, overflow="ellipsis")
        justify: JustifyMethod = "left" if column in (*_NAMES, "state") else "right"
        # Rich makes columns narrower that may wrap, those with names; the texts in them do not.
        table.add_column(heading, justify=justify, no_wrap=column not in _NAMES)
    has_bars = name != "limits" and console.is_terminal
    if has_bars:
        table.add_column("", no_wrap=True)
    for row in rows:
        texts = _cells(row, now)
        cells: list[RenderableType] = [
            Text(printable(text), style, no_wrap=True, overflow="ellipsis")
            for text, style in (texts[column] for column in columns)
        ]
        if has_bars and isinstance(row, Use):
            style = texts["used/of"][1]
            cells.append("" if row.share is None else gauge(row.share, 1, style, 20 if wide else 6))
        table.add_row(*cells)
    return table


def gauge(used: float, most: float, style: str, width: int | None = None) -> ProgressBar:
    """Return a bar that is full only from the limit on; by default as wide as there is space."""
    rest = "bright_black"
    return ProgressBar(most, used, width, style=rest, complete_style=style, finished_style=style)


def _cells(row: Row, now: float) -> dict[str, tuple[str, str]]:
    """Return what each column says of a row, and in which style."""
    both = {"agent": (row.agent, ""), "limit": (row.limit, "")}
    if isinstance(row, Limit):
        counts: dict[str, tuple[int, str]] = {
            "allowed": (row.counts[Outcome.ALLOWED] - row.counts["refunded"], ""),
            "refused": (row.counts[Outcome.BLOCKED], "red"),
            "dry run": (row.counts[Outcome.WOULD_BLOCK], ""),
            **{str(level): (row.counts[level], STYLES[level]) for level in (NEAR, EXHAUSTED)},
            "ended runs": (row.counts["ended"], ""),
        }
        cells = {name: (compact(n), style if n else "dim") for name, (n, style) in counts.items()}
        return both | cells
    used, style = compact(row.used, row.unit), "dim" if row.level is None else STYLES[row.level]
    if row.most is not None:
        used = f"{used.removesuffix(' tok')}/{compact(row.most, row.unit)}"
    ago = None if row.refused_at is None else now - row.refused_at
    left = (row.resets_at or now) - now
    return {
        "thread": (row.subject, ""),
        "subject": (row.subject or "-", ""),
        "quota": (row.scope, ""),
        **both,
        "used/of": (used, style),
        "share": (percent(row.share) + _MARKS[row.level], style),
        "state": ("" if row.share is None else str(row.level or "dry run"), style),
        "refused": (compact(row.refused), "red" if row.refused else "dim"),
        "ago": (lasting(ago), ""),
        "ends in": (lasting(left if left > 0 else None), ""),
    }


def compact(value: float | None, unit: Unit = "calls") -> str:
    """Return an amount in few characters: `"1,200"`, `"1.25M tok"`, `"$0.50"`."""
    if value is None:
        return "-"
    if unit == "nanodollars":
        # From a dime on, whole cents are exact enough.
        places = 2 if value >= 0.1 else 6  # noqa: PLR2004 - explained
        return as_dollars(round(round(value, places) * NANODOLLARS))
    if unit == "milliseconds":
        return as_time(round(value) * 1000)
    text = f"{value:,.0f}"
    if value >= 100_000:  # noqa: PLR2004 - the most that six characters show
        size, letter = pick_unit_and_suffix(round(value), ["", "k", "M", "G", "T"], 1000)
        text = f"{value / size:.4g}{letter}"
    return f"{text} tok" if unit == "tokens" else text


def percent(share: float | None) -> str:
    """Return a share as text: 100 % only if all is used, and 0 % only if nothing is."""
    if share is None:
        return "-"
    if share >= 1:
        return f"{min(share, 9.99):.0%}"
    return f"{min(99, max(int(share * 100), 1 if share > 0 else 0))}%"


def lasting(seconds: float | None) -> str:
    """Return a length of time by its largest unit: `"3m"`; empty for none."""
    if seconds is None:
        return ""
    units = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
    texts = (f"{seconds // length:.0f}{unit}" for length, unit in units if seconds >= length)
    return next(texts, "0s")
