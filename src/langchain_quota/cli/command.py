"""What the commands have in common: how they fail, and how they print."""

import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime


class CommandError(Exception):
    """A command cannot do what was asked; the message says why, in one line."""


def printable(text: str) -> str:
    """The text without characters that could move the cursor or forge a line: they are escaped."""
    return "".join(each if each.isprintable() else escaped(each) for each in text)


def say(text: str = "") -> None:
    """Print a line; characters that the terminal's encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)  # noqa: T201 - a command's output


def complain(command: str, text: str) -> None:
    """Print a line on stderr, with the command's name."""
    print(f"langchain-quota {command}: {text}", file=sys.stderr)  # noqa: T201 - the same


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> list[str]:
    """The lines of a table; the columns with the headings in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if heading in right else cell.ljust(width)
            for heading, cell, width in zip(headings, row, widths, strict=True)
        ).rstrip()
        for row in (headings, *rows)
    ]


def say_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str], empty: str
) -> None:
    """Print a table, or `empty` if it has no rows."""
    for line in table(headings, rows, right=right) if rows else [empty]:
        say(line)


def when(seconds: float | None) -> str:
    """A time as tables show it."""
    if seconds is None:
        return "reset"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OSError, OverflowError, ValueError):
        return "the end of time"


def escaped(text: str) -> str:
    """The text without characters that could forge a line or change others: they are escaped."""
    return repr(text)[1:-1]
