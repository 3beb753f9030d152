"""The output and the errors of all commands."""

import sys
from collections.abc import Collection, Sequence


class CommandError(Exception):
    """A command cannot do its work; the message says why, in one line."""


def printable(text: str) -> str:
    """Return the text with characters escaped that could move the cursor or forge a line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def one_line(error: Exception) -> str:
    """Return an error's text on one line, without characters that could move the cursor."""
    return printable(" ".join(str(error).split()))


def say(text: str = "") -> None:
    """Print a line; characters that the terminal's encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)  # noqa: T201 - a command's output


def complain(command: str, text: str) -> None:
    """Print a line on stderr, with the command's name."""
    print(f"langchain-quota {command}: {text}", file=sys.stderr)  # noqa: T201 - the same


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str]
) -> list[str]:
    """Return the lines of a table; columns with a heading in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    aligns = [str.rjust if heading in right else str.ljust for heading in headings]
    lines = []
    for row in (headings, *rows):
        cells = zip(aligns, row, widths, strict=True)
        lines.append("  ".join(align(cell, width) for align, cell, width in cells).rstrip())
    return lines
