"""The figures as rows, filtered and in order, on a screen and as plain text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from langchain_quota.cli.bars import STYLES, bar, bar_characters, is_utf
from langchain_quota.cli.command import printable, table
from langchain_quota.cli.top_figures import Figures, Limit, Use
from langchain_quota.cli.top_options import ORDERS
from langchain_quota.decision import Unit
from langchain_quota.levels import Level

KEYS = "q quit  1-3 view  s sort  / filter  space pause  arrows scroll"
FAULTS = 3
"""How many lines name addresses that fail."""

_UNKNOWN = "-"
_WIDE = 100
_BESIDE_ROWS = 5
"""The lines above and below the rows: two with totals, the views, the headings, the keys."""
_MARKS: Mapping[Level | None, str] = {Level.NEAR: "~", Level.EXHAUSTED: "!"}
_NOTHING = {
    "threads": "no thread has used anything yet",
    "quotas": "no subject has used anything yet; users and tenants are seen with subject_label",
    "limits": "no limit has judged anything yet",
}
_LONGEST_FILTER = 100
_THOUSAND = 1_000
_WHOLE_UP_TO = 100_000
_DIME = 0.1
_TIMES = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))

Row = Use | Limit


def compact(value: float | None, unit: Unit = "calls") -> str:
    """An amount in few characters: `"1,200"`, `"1.25M tok"`, `"$0.50"`."""
    if value is None:
        return _UNKNOWN
    sign, end = "$" if unit == "microdollars" else "", " tok" if unit == "tokens" else ""
    if abs(value) < _WHOLE_UP_TO:
        if not sign:
            return f"{value:,.0f}{end}" if value == round(value) else f"{value:,.1f}{end}"
        # From a dime on, whole cents are exact enough.
        places = 6 if 0 < value < _DIME / 100 else 4 if 0 < value < _DIME else 2
        whole, _, cents = f"{value:,.{places}f}".partition(".")
        return f"{sign}{whole}.{cents.rstrip('0').ljust(2, '0')}"
    for letter in "kMGT":
        value /= _THOUSAND
        # 999,999 is a million, once it is rounded.
        if abs(value) < _THOUSAND - 0.5:
            return f"{sign}{value:.3g}{letter}{end}"
    return f"{sign}{value:.0e}T{end}"


def percent(share: float | None) -> str:
    """A share; 100 % only if all is used, and 0 % only if nothing is."""
    if share is None:
        return _UNKNOWN
    if share >= 1:
        return f"{min(share, 9.99):.0%}"
    return f"{min(99, max(int(share * 100), 1 if share > 0 else 0))}%"


def lasting(seconds: float | None) -> str:
    """A length of time, by its largest unit: `"3m"`; empty for none."""
    if seconds is None:
        return ""
    for length, suffix in _TIMES:
        if seconds >= length:
            return f"{int(min(seconds // length, 999))}{suffix}"
    return "0s"


class _Column(NamedTuple):
    """A column: its heading, a row's text, its style; `wide` ones need a wide terminal."""

    title: str
    cell: Callable[[Any, float], str]
    style: Callable[[Any], str] = lambda _: ""
    right: bool = False
    wide: bool = False


def _number(title: str, name: str, style: str = "", *, wide: bool = False) -> _Column:
    """A column with a row's number."""
    return _Column(
        title,
        lambda row, _: compact(getattr(row, name)),
        lambda row: style if getattr(row, name) else "dim",
        right=True,
        wide=wide,
    )


def _use_style(use: Use) -> str:
    return "dim" if use.level is None else STYLES[use.level]


def _used_of(use: Use, _: float) -> str:
    used, most = compact(use.used, use.unit), use.most
    return used if most is None else f"{used.removesuffix(' tok')}/{compact(most, use.unit)}"


def _share(use: Use, _: float) -> str:
    return percent(use.share) + _MARKS.get(use.level, " ")  # a mark says the same without colors


def _state(use: Use, _: float) -> str:
    return "" if use.share is None else str(use.level or "on trial")


def _ends_in(use: Use, now: float) -> str:
    return "" if use.resets_at is None or use.resets_at <= now else lasting(use.resets_at - now)


_WHOSE = (
    _Column("agent", lambda row, _: row.agent),
    _Column("limit", lambda row, _: row.limit),
)
_USE = (
    *_WHOSE,
    _Column("used/of", _used_of, _use_style, right=True),
    _Column("share", _share, _use_style, right=True),
    _Column("state", _state, _use_style, wide=True),
)
_COLUMNS: Mapping[str, Sequence[_Column]] = {
    "threads": (
        _Column("thread", lambda use, _: use.subject),
        *_USE,
        _number("refused", "refused", "red"),
        _Column(
            "ago",
            lambda use, now: lasting(None if use.refused_at is None else now - use.refused_at),
            right=True,
        ),
        _Column("ends in", _ends_in, right=True, wide=True),
    ),
    "quotas": (
        _Column("subject", lambda use, _: use.subject or _UNKNOWN),
        _Column("quota", lambda use, _: use.scope),
        *_USE,
        _Column("ends in", _ends_in, right=True),
    ),
    "limits": (
        *_WHOSE,
        _number("allowed", "allowed"),
        _number("refused", "refused", "red"),
        _number("/min", "refused_a_minute"),
        _number("on trial", "on_trial"),
        _number("near", "near", STYLES[Level.NEAR]),
        _number("exhausted", "exhausted", STYLES[Level.EXHAUSTED]),
        _number("ended runs", "ended", wide=True),
        _Column("granted", lambda row, _: compact(row.granted, row.unit), right=True, wide=True),
    ),
}


def _order(row: Row, by: str) -> tuple[float, ...]:
    if by == "name":
        return ()
    if isinstance(row, Limit):
        share = (-row.exhausted, -row.near)
        return share if by == "share" else (-(row.refused_a_minute or 0), -row.refused)
    # A limit on trial refuses nobody, so nobody counts as near it.
    order = (row.level is None, -(row.share or 0), -row.refused)
    return order if by == "share" else (-row.refused, *order)


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


def rows(figures: Figures, view: View) -> list[Row]:
    """The rows of a view, filtered and in order."""
    text, order = view.text.casefold(), view.used_order
    known = getattr(figures, view.name)
    found = [row for row in known if any(text in name for name in _names(row))]
    return sorted(found, key=lambda row: (_order(row, order), _names(row)))


def _names(row: Row) -> tuple[str, ...]:
    names: tuple[str, ...] = (row.agent, row.limit)
    if isinstance(row, Use):
        names = (row.subject, *names, row.scope)
    return tuple(each.casefold() for each in names)


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


def page(height: int, faults: int) -> int:
    """How many rows fit into a terminal."""
    return max(1, height - _BESIDE_ROWS - min(faults, FAULTS))


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
    shown = page(console.height, len(faults))
    first = max(0, min(view.first, len(found) - shown))
    title = Text.assemble(("langchain-quota top", "bold"), "  ")
    processes = f"{figures.processes} process{'' if figures.processes == 1 else 'es'}"
    where = f"{addresses} address{'' if addresses == 1 else 'es'}"
    title.append(f"{processes} at {where}" if known else "asking ...")
    title.append("  paused" if view.paused else "", "yellow")
    named = [*faults]
    if len(faults) > FAULTS:
        named[FAULTS - 1 :] = [f"and {len(faults) - FAULTS + 1} more addresses fail"]
    parts: list[RenderableType] = [
        title,
        summary(figures),
        *(Text(each, "red") for each in named),
        _tabs(view, first, min(len(found), first + shown), len(found)),
        _table(found[first : first + shown], view.name, console, now),
    ]
    if not found:
        nothing = "nothing matches; Esc clears" if view.text else _NOTHING[view.name]
        parts.append(Text(nothing, "dim"))
    parts += [Text("")] * (shown - max(1, min(shown, len(found))))
    prompt = f"filter: {view.text}_   Enter keeps it, Esc clears it"
    parts.append(Text(prompt if view.is_typing else keys, "" if view.is_typing else "dim"))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "crop"
    return Group(*parts)


def summary(figures: Figures) -> Text:
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


def _tabs(view: View, first: int, last: int, total: int) -> Text:
    """The names of the views; which rows are shown, in which order, and filtered by what."""
    text = Text()
    for number, name in enumerate(ORDERS, 1):
        text.append(f" {number} {name} ", "reverse" if name == view.name else "")
    if total:
        text.append(f"  {first + 1:,}-{last:,} of {total:,}")
    text.append(f"  by {view.used_order}", "dim")
    if view.text:
        text.append(f"  with {printable(view.text)}", "bold")
    return text


def _table(found: Sequence[Row], name: str, console: Console, now: float) -> Table:
    wide = console.width >= _WIDE
    columns = [each for each in _COLUMNS[name] if wide or not each.wide]
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    overflow: Any = "ellipsis" if is_utf(console.encoding) else "crop"
    for column in columns:
        heading = Text(column.title, no_wrap=True, overflow=overflow)
        justify: Any = "right" if column.right else "left"
        # Rich makes columns narrower that may wrap, those with names; the texts in them do not.
        made.add_column(heading, justify=justify, no_wrap=column.right or column.wide)
    has_bar = name in ("threads", "quotas")
    if has_bar:
        made.add_column("", no_wrap=True)
    for row in found:
        cells = [
            Text(printable(each.cell(row, now)), each.style(row), no_wrap=True, overflow=overflow)
            for each in columns
        ]
        if has_bar and isinstance(row, Use):
            width, characters = 20 if wide else 6, bar_characters(console.encoding)
            drawn = "" if row.share is None else bar(row.share, width, characters)
            cells.append(Text(drawn, _use_style(row)))
        made.add_row(*cells)
    return made


def lines(figures: Figures, view: View, names: Sequence[str], now: float) -> Iterator[str]:
    """The same as plain text: the sums, and a table of each of these views."""
    yield summary(figures).plain
    for name in names:
        columns = _COLUMNS[name]
        found = rows(figures, replace(view, name=name))
        cells = [[printable(each.cell(row, now)).strip() for each in columns] for row in found]
        right = [each.title for each in columns if each.right]
        if cells:
            yield from ("", f"{name}:", *table([c.title for c in columns], cells, right=right))
