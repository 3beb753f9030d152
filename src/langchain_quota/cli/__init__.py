"""The command line: `langchain-quota demo`, `export`, `quotas`; and how they print."""

import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from langchain_quota.cli.arguments import parser

FAILED = 2
"""The exit code of a command that failed: the same as for wrong arguments."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default with the process's arguments, and return the exit code."""
    command_line = parser()
    if "_ARGCOMPLETE" in os.environ:
        # The shell asks for completions, and only where the package argcomplete is installed.
        import_module("argcomplete").autocomplete(command_line)
    words = sys.argv[1:] if argv is None else argv
    is_alone = [*words] in ([], ["export"], ["quotas"])
    arguments = command_line.parse_args([*words, "--help"] if is_alone else words)
    command: str = arguments.command
    try:
        # Import the command only now: the help and the version need no other package.
        return int(import_module(f"langchain_quota.cli.{command}").run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except CommandError as error:
        complain(command, str(error))
    except OSError as error:
        # The reader of the output is gone, or the disk is full. The interpreter's last flush must
        # not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1
        complain(command, error.strerror or str(error))
    return FAILED


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
