"""A live view of running services: who is near a limit, and who is refused."""

import os
import re
import select
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.filesize import pick_unit_and_suffix
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.arguments import ORDERS
from langchain_quota.cli.metrics import Figures, Limit, Scrape, Source, Use, ask, figures, sources
from langchain_quota.cli.printing import complain, printable, say
from langchain_quota.decision import Outcome
from langchain_quota.units import MICRODOLLARS, Level, Unit, as_dollars

try:
    import termios
    import tty
except ModuleNotFoundError:  # Windows
    termios = tty = None  # type: ignore[assignment]

SOME_FAILED, ALL_FAILED = 1, 2
"""The exit codes if addresses did not answer, where each is asked once."""
OK, NEAR, EXHAUSTED = Level
STYLES = {OK: "green", NEAR: "yellow", EXHAUSTED: "red"}
"""The terminal's own colors, so that they fit a dark and a light background."""
KEYS = "q quit  1-3 view  s sort  / filter  arrows scroll"
FAULTS = 3
"""How many lines name addresses that fail."""

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
_NO_WRAPPING, _WRAPPING = "\x1b[?7l", "\x1b[?7h"
_PAUSE = 0.2
"""The seconds between two looks at new answers."""
_WIDE = 100
_WIDEST = 100_000
"""So many columns that plain text is neither wrapped nor cut."""
_BESIDE_ROWS = 5
"""The lines above and below the rows: two with totals, the views, the headings, the keys."""
_NAMES = ("thread", "subject", "quota", "agent", "limit")
"""The columns that become narrower where the terminal is; numbers never do."""
_USED = ("used/of", "share", "state")
_COLUMNS = {
    "threads": ("thread", "agent", "limit", *_USED, "refused", "ago", "ends in"),
    "quotas": ("subject", "quota", "agent", "limit", *_USED, "ends in"),
    "limits": (
        *("agent", "limit", "allowed", "refused", "ago", "on trial", "near", "exhausted"),
        *("ended runs", "granted"),
    ),
}
_ONLY_WIDE = ("state", "ended runs", "granted")
"""The columns that need a wide terminal."""
_MARKS = {None: " ", OK: " ", NEAR: "~", EXHAUSTED: "!"}
"""They say the same without colors."""
_NOTHING = "nothing has been used yet; users and tenants are seen with subject_label"

Row = Use | Limit


@dataclass(frozen=True, slots=True)
class View:
    """What the user looks at: rows with `text` in a name, and `first` rows above those shown."""

    name: str = "threads"
    order: str | None = None
    text: str = ""
    first: int = 0
    is_typing: bool = False
    ended: bool = False

    @property
    def used_order(self) -> str:
        """The order that the view really has."""
        orders = ORDERS[self.name]
        return self.order if self.order in orders else orders[0]


def run(arguments: Namespace) -> int:
    """Show the view in a terminal, else print the figures once."""
    asked = sources(arguments)
    view = View(arguments.view or "threads", arguments.sort, arguments.filter)
    console = Console()
    has_keys = termios is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if has_keys and not console.is_dumb_terminal and not arguments.once:
        ask(asked, arguments.interval)
        return _show(asked, view, console)
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
        for name in [view.name] if arguments.view else ORDERS:
            if found := rows(known, replace(view, name=name)):
                plain.print(f"\n{name}:", _table(found, name, plain, time.time()), sep="\n")
    for line in printed.get().splitlines():
        say(line.rstrip())
    return SOME_FAILED if faults else 0


def _told(asked: Sequence[Source]) -> tuple[list[Scrape], list[str]]:
    """What addresses have answered, and what is wrong with some."""
    scrapes = [each.scrape for each in asked if each.scrape is not None]
    return scrapes, [fault for each in asked if (fault := each.fault)]


def _show(asked: Sequence[Source], view: View, console: Console) -> int:
    """Show the view until the user ends it; however it ends, the terminal is as before."""
    drawn: Any = None
    known: Figures | None = None
    taken: list[Scrape] = []
    write = console.file.write
    with ExitStack() as stack:
        _take_keys(stack)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        # A character that is wider than expected must not move the lines below.
        stack.callback(write, _WRAPPING)
        write(_NO_WRAPPING)
        beside: Any = {"console": console, "addresses": len(asked)}
        while not view.ended:
            scrapes, faults = _told(asked)
            if scrapes != taken:
                taken, known = scrapes, figures(scrapes)
            now = (known, view, faults, console.size)
            if now != drawn:
                drawn = now
                shown = screen(known, view, faults=faults, now=time.time(), **beside)
                live.update(shown, refresh=True)
            size = _page(console, faults)
            for key in _pressed(_PAUSE):
                view = press(view, key, page=size)
            if view.first:
                most = len(rows(known or Figures(), view)) - size
                view = replace(view, first=max(0, min(view.first, most)))
    return 0


def _take_keys(stack: ExitStack) -> None:
    """Get keys as they are pressed; a signal ends the view like an error."""
    # Ctrl-Z would leave the screen to the shell.
    signals: Any = {signal.SIGTERM: _end, signal.SIGHUP: _end, signal.SIGTSTP: signal.SIG_IGN}
    for number, handler in signals.items():
        stack.callback(signal.signal, number, signal.signal(number, handler))
    terminal = sys.stdin.fileno()
    stack.callback(termios.tcsetattr, terminal, termios.TCSAFLUSH, termios.tcgetattr(terminal))
    tty.setcbreak(terminal)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _pressed(seconds: float) -> Sequence[str]:
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ()
    data = os.read(sys.stdin.fileno(), 1024)
    # Without a terminal nobody reads the view any more.
    return _KEY.findall(data.decode(errors="ignore")) if data else ("\x1b", "q")


def press(view: View, key: str, *, page: int = 10) -> View:
    """The view after a key: a character, or what a terminal sends for another key."""
    if view.is_typing:
        if key in "\r\n\x1b":
            return replace(view, is_typing=False, text="" if key == "\x1b" else view.text)
        text = view.text[:-1] if key in "\x7f\b" else view.text
        if key.isprintable():
            text += key
        return replace(view, text=text, first=0)
    orders = ORDERS[view.name]
    following = orders[(orders.index(view.used_order) + 1) % len(orders)]
    moves = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -page, "\x1b[6~": page}
    changes: dict[str, dict[str, Any]] = {
        "q": {"ended": True},
        "/": {"is_typing": True},
        "s": {"order": following, "first": 0},
        "\x1b": {"text": "", "first": 0},
        **{str(number): {"name": name, "first": 0} for number, name in enumerate(ORDERS, 1)},
        **{move: {"first": max(0, view.first + by)} for move, by in moves.items()},
    }
    return replace(view, **changes.get(key, {}))


def rows(figures: Figures, view: View) -> list[Row]:
    """The rows of a view, filtered and in order."""
    text, by = view.text.casefold(), view.used_order
    found = [row for row in getattr(figures, view.name) if any(text in x for x in _names(row))]
    return sorted(found, key=lambda row: (_order(row, by), _names(row)))


def _names(row: Row) -> tuple[str, ...]:
    return tuple(str(each).casefold() for each in row[: 4 if isinstance(row, Use) else 2])


def _order(row: Row, by: str) -> tuple[float, ...]:
    if by == "name":
        return ()
    if isinstance(row, Limit):
        names = (EXHAUSTED, NEAR) if by == "share" else (Outcome.BLOCKED,)
        return tuple(-row.counts[each] for each in names)
    # A limit on trial refuses nobody, so nobody counts as near it.
    order = (row.level is None, -(row.share or 0), -row.refused)
    return order if by == "share" else (-row.refused, *order)


def _page(console: Console, faults: Sequence[str]) -> int:
    """How many rows fit into a terminal."""
    return max(1, console.height - _BESIDE_ROWS - min(len(faults), FAULTS))


def screen(  # noqa: PLR0913 - what a screen shows, by keyword
    known: Figures | None,
    view: View,
    *,
    console: Console,
    addresses: int,
    faults: Sequence[str],
    now: float,
) -> RenderableType:
    """The whole screen; `known` is `None` before the first answer."""
    figures = known or Figures()
    found = rows(figures, view)
    shown = _page(console, faults)
    first = max(0, min(view.first, len(found) - shown))
    title = Text.assemble(("langchain-quota top", "bold"), "  ")
    title.append(f"{figures.processes} of {addresses} addresses" if known else "asking ...")
    named = [*faults]
    if len(faults) > FAULTS:
        named[FAULTS - 1 :] = [f"and {len(faults) - FAULTS + 1} more addresses fail"]
    tabs = Text()
    for number, name in enumerate(ORDERS, 1):
        tabs.append(f" {number} {name} ", "reverse" if name == view.name else "")
    if found:
        last = min(len(found), first + shown)
        tabs.append(f"  {first + 1:,}-{last:,} of {len(found):,}")
    tabs.append(f"  by {view.used_order}", "dim")
    tabs.append(f"  with {printable(view.text)}" if view.text else "", "bold")
    parts: list[RenderableType] = [
        *(title, _summary(figures), *(Text(each, "red") for each in named), tabs),
        _table(found[first : first + shown], view.name, console, now),
    ]
    if not found:
        nothing = "nothing matches; Esc clears" if view.text else _NOTHING
        parts.append(Text(nothing, "dim"))
    parts += [Text("")] * (shown - max(1, min(shown, len(found))))
    prompt = f"filter: {view.text}_   Enter keeps it, Esc clears it"
    parts.append(Text(prompt) if view.is_typing else Text(KEYS, "dim"))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "crop"
    return Group(*parts)


def _summary(figures: Figures) -> Text:
    """The sums of everything, in one line."""
    text = Text(f"calls {compact(figures.ran)} ran, ")
    text.append(f"{compact(figures.refused)} refused", "red" if figures.refused else "")
    for before, level in (("  ", NEAR), (", ", EXHAUSTED)):
        count = sum(each.counts[level] for each in figures.limits)
        text.append(before).append(f"{compact(count)} {level}", STYLES[level] if count else "")
    if figures.hidden:
        text.append(f"  {compact(figures.hidden)} threads hidden", "dim")
    return text


def _table(found: Sequence[Row], name: str, console: Console, now: float) -> Table:
    wide = console.width >= _WIDE
    columns = [each for each in _COLUMNS[name] if wide or each not in _ONLY_WIDE]
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    overflow: Any = "ellipsis" if console.encoding.startswith("utf") else "crop"
    for column in columns:
        heading = Text(column, no_wrap=True, overflow=overflow)
        justify: Any = "left" if column in (*_NAMES, "state") else "right"
        # Rich makes columns narrower that may wrap, those with names; the texts in them do not.
        made.add_column(heading, justify=justify, no_wrap=column not in _NAMES)
    has_bars = name != "limits" and console.is_terminal
    if has_bars:
        made.add_column("", no_wrap=True)
    for row in found:
        texts = _cells(row, now)
        cells: list[RenderableType] = [
            Text(printable(text), style, no_wrap=True, overflow=overflow)
            for text, style in (texts[each] for each in columns)
        ]
        if has_bars and isinstance(row, Use):
            style = texts["used/of"][1]
            cells.append("" if row.share is None else gauge(row.share, 1, style, 20 if wide else 6))
        made.add_row(*cells)
    return made


def gauge(used: float, most: float, style: str, width: int | None = None) -> ProgressBar:
    """A bar that is full only from the limit on; without a width it takes what space there is."""
    rest = "bright_black"
    return ProgressBar(most, used, width, style=rest, complete_style=style, finished_style=style)


def _cells(row: Row, now: float) -> dict[str, tuple[str, str]]:
    """What each column says of a row, and in which style."""
    ago = None if row.refused_at is None else now - row.refused_at
    both = {"agent": (row.agent, ""), "limit": (row.limit, ""), "ago": (lasting(ago), "")}
    if isinstance(row, Limit):
        counts: dict[str, tuple[float, str]] = {
            "allowed": (row.counts[Outcome.ALLOWED] - row.counts["refunded"], ""),
            "refused": (row.counts[Outcome.BLOCKED], "red"),
            "on trial": (row.counts[Outcome.WOULD_BLOCK], ""),
            **{str(each): (row.counts[each], STYLES[each]) for each in (NEAR, EXHAUSTED)},
            "ended runs": (row.counts["ended"], ""),
        }
        cells = {name: (compact(n), style if n else "dim") for name, (n, style) in counts.items()}
        return {**both, **cells, "granted": (compact(row.counts["granted"], row.unit), "")}
    used, style = compact(row.used, row.unit), "dim" if row.level is None else STYLES[row.level]
    if row.most is not None:
        used = f"{used.removesuffix(' tok')}/{compact(row.most, row.unit)}"
    left = (row.resets_at or now) - now
    return {
        "thread": (row.subject, ""),
        "subject": (row.subject or "-", ""),
        "quota": (row.scope, ""),
        **both,
        "used/of": (used, style),
        "share": (percent(row.share) + _MARKS[row.level], style),
        "state": ("" if row.share is None else str(row.level or "on trial"), style),
        "refused": (compact(row.refused), "red" if row.refused else "dim"),
        "ends in": (lasting(left if left > 0 else None), ""),
    }


def compact(value: float | None, unit: Unit = "calls") -> str:
    """An amount in few characters: `"1,200"`, `"1.25M tok"`, `"$0.50"`."""
    if value is None:
        return "-"
    if unit == "microdollars":
        # From a dime on, whole cents are exact enough.
        places = 2 if value >= 0.1 else 6  # noqa: PLR2004 - explained
        return as_dollars(round(round(value, places) * MICRODOLLARS))
    text = f"{value:,.0f}"
    if value >= 100_000:  # noqa: PLR2004 - the most that six characters show
        size, letter = pick_unit_and_suffix(round(value), ["", "k", "M", "G", "T"], 1000)
        text = f"{value / size:.4g}{letter}"
    return f"{text} tok" if unit == "tokens" else text


def percent(share: float | None) -> str:
    """A share; 100 % only if all is used, and 0 % only if nothing is."""
    if share is None:
        return "-"
    if share >= 1:
        return f"{min(share, 9.99):.0%}"
    return f"{min(99, max(int(share * 100), 1 if share > 0 else 0))}%"


def lasting(seconds: float | None) -> str:
    """A length of time, by its largest unit: `"3m"`; empty for none."""
    if seconds is None:
        return ""
    units = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
    found = (f"{seconds // length:.0f}{unit}" for length, unit in units if seconds >= length)
    return next(found, "0s")
