"""A live view of running services: who is near a limit, and who is refused."""

import os
import re
import select
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.arguments import INTERVAL, ORDERS
from langchain_quota.cli.metrics import Figures, Limit, Use, Watch, sources
from langchain_quota.cli.printing import complain, printable, say, table
from langchain_quota.units import Level, Unit

try:
    import termios
    import tty
except ModuleNotFoundError:  # Windows
    termios = tty = None  # type: ignore[assignment]

SOME_FAILED, ALL_FAILED = 1, 2
"""The exit codes if addresses did not answer, where each is asked once."""
STYLES = {Level.OK: "green", Level.NEAR: "yellow", Level.EXHAUSTED: "red"}
"""The terminal's own colors, so that they fit a dark and a light background."""
KEYS = "q quit  1-3 view  s sort  / filter  space pause  arrows scroll"
FAULTS = 3
"""How many lines name addresses that fail."""

_NO_KEYS = "no keys are read here: use the options; Ctrl-C quits"
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|.", re.DOTALL)
_LONGEST_FILTER = 100
_NO_WRAPPING, _WRAPPING = "\x1b[?7l", "\x1b[?7h"
_PAUSE = 0.2
"""The seconds between two looks at new answers."""
_WIDE = 100
_BESIDE_ROWS = 5
"""The lines above and below the rows: two with totals, the views, the headings, the keys."""
_NAMES = ("thread", "subject", "quota", "agent", "limit")
"""The columns that become narrower where the terminal is; numbers never do."""
_USED = ("used/of", "share", "state")
_COLUMNS = {
    "threads": ("thread", "agent", "limit", *_USED, "refused", "ago", "ends in"),
    "quotas": ("subject", "quota", "agent", "limit", *_USED, "ends in"),
    "limits": (
        *("agent", "limit", "allowed", "refused", "/min", "on trial", "near", "exhausted"),
        *("ended runs", "granted"),
    ),
}
_ONLY_WIDE = {
    "threads": ("state", "ends in"),
    "quotas": ("state",),
    "limits": ("ended runs", "granted"),
}
"""The columns that need a wide terminal."""
_MARKS = {None: " ", Level.OK: " ", Level.NEAR: "~", Level.EXHAUSTED: "!"}
"""They say the same without colors."""
_NOTHING = {
    "threads": "no thread has used anything yet",
    "quotas": "no subject has used anything yet; users and tenants are seen with subject_label",
    "limits": "no limit has judged anything yet",
}

Row = Use | Limit


@dataclass(frozen=True, slots=True)
class View:
    """What the user looks at: rows with `text` in a name, and `first` rows above those shown."""

    name: str = "threads"
    order: str | None = None
    text: str = ""
    first: int = 0
    paused: bool = False
    is_typing: bool = False
    ended: bool = False

    @property
    def used_order(self) -> str:
        """The order that the view really has."""
        orders = ORDERS[self.name]
        return self.order if self.order in orders else orders[0]


def run(arguments: Namespace) -> int:
    """Show the view in a terminal, else print the figures."""
    watch = Watch(sources(arguments))
    view = View(arguments.view or "threads", arguments.sort, arguments.filter)
    # COLUMNS and LINES do not change with the terminal's size.
    sizes = ("COLUMNS", "LINES")
    console = Console(_environ={key: os.environ[key] for key in os.environ if key not in sizes})
    is_screen = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    if is_screen and not arguments.once:
        watch.start(arguments.interval or INTERVAL)
        return _show(watch, view, console)
    names = [view.name] if arguments.view else [*ORDERS]
    return _print(watch, view, names, None if arguments.once else arguments.interval)


def _print(watch: Watch, view: View, names: Sequence[str], interval: float | None) -> int:
    """Print the figures, once, or again and again if an interval is given."""
    complained: list[str] = []
    while True:
        began = time.monotonic()
        watch.ask_all()
        failures = [f"{each.name}: {each.failure}" for each in watch.sources if each.failure]
        for each in (each for each in failures if each not in complained):
            complain("top", each)
        complained = failures
        if all(each.scrape is None for each in watch.sources):
            return ALL_FAILED
        moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}  " if interval else ""
        for line in _lines(watch.figures or Figures(), view, names):
            if line or not moment:
                say(f"{moment}{line}")
        if interval is None:
            return SOME_FAILED if failures else 0
        time.sleep(max(0.0, began + interval - time.monotonic()))


def _lines(figures: Figures, view: View, names: Sequence[str]) -> Iterator[str]:
    """The sums, and a table of each of these views, as plain text."""
    yield _summary(figures).plain
    for name in names:
        columns, now = _COLUMNS[name], time.time()
        texts = [_cells(row, now) for row in rows(figures, replace(view, name=name))]
        if texts:
            cells = [[printable(each[column][0]).strip() for column in columns] for each in texts]
            right = {*columns}.difference(_NAMES, ("state",))
            yield from ("", f"{name}:", *table(columns, cells, right=right))


def _show(watch: Watch, view: View, console: Console) -> int:
    """Show the view until the user ends it; however it ends, the terminal is as before."""
    drawn: Any = None
    write = console.file.write
    with ExitStack() as stack:
        pressed = _keys(stack)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        # A character that is wider than expected must not move the lines below.
        stack.callback(write, _WRAPPING)
        write(_NO_WRAPPING)
        beside: Any = {"console": console, "addresses": len(watch.sources)}
        beside["keys"] = _NO_KEYS if pressed is _wait else KEYS
        while not view.ended:
            watch.gather()
            known = drawn[0] if drawn and view.paused else watch.figures
            faults = [fault for each in watch.sources if (fault := each.fault) is not None]
            now = (known, view, faults, console.size)
            if now != drawn:
                drawn = now
                shown = screen(known, view, faults=faults, now=time.time(), **beside)
                live.update(shown, refresh=True)
            size = _page(console, faults)
            for key in pressed(_PAUSE):
                view = press(view, key, page=size)
            if view.first:
                most = len(rows(known or Figures(), view)) - size
                view = replace(view, first=max(0, min(view.first, most)))
    return 0


def _keys(stack: ExitStack) -> Callable[[float], Sequence[str]]:
    """A function that waits some seconds for keys; a signal ends the view like an error."""
    # Ctrl-Z would leave the screen to the shell.
    for name, handler in (("SIGTERM", _end), ("SIGHUP", _end), ("SIGTSTP", signal.SIG_IGN)):
        if hasattr(signal, name):
            number = getattr(signal, name)
            stack.callback(signal.signal, number, signal.signal(number, handler))
    if termios is None or not sys.stdin.isatty():
        return _wait
    terminal = sys.stdin.fileno()
    stack.callback(termios.tcsetattr, terminal, termios.TCSAFLUSH, termios.tcgetattr(terminal))
    tty.setcbreak(terminal)
    return _pressed


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _pressed(seconds: float) -> Sequence[str]:
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ()
    data = os.read(sys.stdin.fileno(), 1024)
    # Without a terminal nobody reads the view any more.
    return _KEY.findall(data.decode(errors="ignore")) if data else ("\x1b", "q")


def _wait(seconds: float) -> Sequence[str]:
    time.sleep(seconds)
    return ()


def press(view: View, key: str, *, page: int = 10) -> View:
    """The view after a key: a character, or what a terminal sends for another key."""
    if view.is_typing:
        if key in "\r\n\x1b":
            return replace(view, is_typing=False, text="" if key == "\x1b" else view.text)
        text = view.text[:-1] if key in "\x7f\b" else view.text
        if key.isprintable() and len(text) < _LONGEST_FILTER:
            text += key
        return replace(view, text=text, first=0)
    orders = ORDERS[view.name]
    following = orders[(orders.index(view.used_order) + 1) % len(orders)]
    moves = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -page, "\x1b[6~": page}
    changes: dict[str, dict[str, Any]] = {
        "q": {"ended": True},
        " ": {"paused": not view.paused},
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
    names: tuple[str, ...] = (row.agent, row.limit)
    if isinstance(row, Use):
        names = (row.subject, *names, row.scope)
    return tuple(each.casefold() for each in names)


def _order(row: Row, by: str) -> tuple[float, ...]:
    if by == "name":
        return ()
    if isinstance(row, Limit):
        share = (-row.exhausted, -row.near)
        return share if by == "share" else (-(row.refused_a_minute or 0), -row.refused)
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
    keys: str = KEYS,
) -> RenderableType:
    """The whole screen; `known` is `None` before the first answer."""
    figures = known or Figures()
    found = rows(figures, view)
    shown = _page(console, faults)
    first = max(0, min(view.first, len(found) - shown))
    title = Text.assemble(("langchain-quota top", "bold"), "  ")
    processes = f"{figures.processes} process{'' if figures.processes == 1 else 'es'}"
    where = f"{addresses} address{'' if addresses == 1 else 'es'}"
    title.append(f"{processes} at {where}" if known else "asking ...")
    title.append("  paused" if view.paused else "", "yellow")
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
        nothing = "nothing matches; Esc clears" if view.text else _NOTHING[view.name]
        parts.append(Text(nothing, "dim"))
    parts += [Text("")] * (shown - max(1, min(shown, len(found))))
    prompt = f"filter: {view.text}_   Enter keeps it, Esc clears it"
    parts.append(Text(prompt) if view.is_typing else Text(keys, "dim"))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "crop"
    return Group(*parts)


def _summary(figures: Figures) -> Text:
    """The sums of everything, in one line."""
    lately = figures.refused_a_minute
    text = Text(f"calls {compact(figures.ran)} ran, ")
    text.append(f"{compact(figures.refused)} refused", "red" if lately else "")
    text.append("" if lately is None else f" ({compact(round(lately, 1))}/min)")
    for before, level in (("  ", Level.NEAR), (", ", Level.EXHAUSTED)):
        count = sum(getattr(each, level) for each in figures.limits)
        text.append(before).append(f"{compact(count)} {level}", STYLES[level] if count else "")
    if figures.hidden:
        text.append(f"  {compact(figures.hidden)} threads hidden", "dim")
    return text


def _table(found: Sequence[Row], name: str, console: Console, now: float) -> Table:
    wide = console.width >= _WIDE
    columns = [each for each in _COLUMNS[name] if wide or each not in _ONLY_WIDE[name]]
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    overflow: Any = "ellipsis" if console.encoding.startswith("utf") else "crop"
    for column in columns:
        heading = Text(column, no_wrap=True, overflow=overflow)
        justify: Any = "left" if column in (*_NAMES, "state") else "right"
        # Rich makes columns narrower that may wrap, those with names; the texts in them do not.
        made.add_column(heading, justify=justify, no_wrap=column not in _NAMES)
    if name != "limits":
        made.add_column("", no_wrap=True)
    for row in found:
        texts = _cells(row, now)
        cells: list[RenderableType] = [
            Text(printable(text), style, no_wrap=True, overflow=overflow)
            for text, style in (texts[each] for each in columns)
        ]
        if isinstance(row, Use):
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
    if isinstance(row, Limit):
        numbers = {
            "allowed": (row.allowed, ""),
            "refused": (row.refused, "red"),
            "/min": (row.refused_a_minute, ""),
            "on trial": (row.on_trial, ""),
            "near": (row.near, STYLES[Level.NEAR]),
            "exhausted": (row.exhausted, STYLES[Level.EXHAUSTED]),
            "ended runs": (row.ended, ""),
        }
        return {
            "agent": (row.agent, ""),
            "limit": (row.limit, ""),
            **{name: (compact(n), style if n else "dim") for name, (n, style) in numbers.items()},
            "granted": (compact(row.granted, row.unit), ""),
        }
    used, style = compact(row.used, row.unit), "dim" if row.level is None else STYLES[row.level]
    if row.most is not None:
        used = f"{used.removesuffix(' tok')}/{compact(row.most, row.unit)}"
    ago = None if row.refused_at is None else now - row.refused_at
    left = (row.resets_at or now) - now
    return {
        "thread": (row.subject, ""),
        "subject": (row.subject or "-", ""),
        "quota": (row.scope, ""),
        "agent": (row.agent, ""),
        "limit": (row.limit, ""),
        "used/of": (used, style),
        "share": (percent(row.share) + _MARKS[row.level], style),
        "state": ("" if row.share is None else str(row.level or "on trial"), style),
        "refused": (compact(row.refused), "red" if row.refused else "dim"),
        "ago": (lasting(ago), ""),
        "ends in": (lasting(left if left > 0 else None), ""),
    }


def compact(value: float | None, unit: Unit = "calls") -> str:
    """An amount in few characters: `"1,200"`, `"1.25M tok"`, `"$0.50"`."""
    if value is None:
        return "-"
    sign, end = "$" if unit == "microdollars" else "", " tok" if unit == "tokens" else ""
    if abs(value) < 100_000:  # noqa: PLR2004 - the most that six characters show
        if not sign:
            return f"{value:,.0f}{end}" if value == round(value) else f"{value:,.1f}{end}"
        # From a dime on, whole cents are exact enough.
        places = 6 if 0 < value < 0.001 else 4 if 0 < value < 0.1 else 2  # noqa: PLR2004
        whole, _, cents = f"{value:,.{places}f}".partition(".")
        return f"{sign}{whole}.{cents.rstrip('0').ljust(2, '0')}"
    for letter in "kMGT":
        value /= 1000
        # 999,999 is a million, once it is rounded.
        if abs(value) < 999.5:  # noqa: PLR2004 - explained
            return f"{sign}{value:.3g}{letter}{end}"
    return f"{sign}{value:.0e}T{end}"


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
    for length, suffix in ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s")):
        if seconds >= length:
            return f"{int(min(seconds // length, 999))}{suffix}"
    return "0s"
