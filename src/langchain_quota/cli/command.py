"""What the commands have in common: how they fail, and how they print."""

import sys


class CommandError(Exception):
    """A command cannot do what was asked; the message says why, in one line."""


def say(text: str = "") -> None:
    """Print a line; what the terminal's encoding does not have is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)  # noqa: T201 - a command's output


def complain(command: str, text: str) -> None:
    """Print a line on stderr, with the command's name."""
    print(f"langchain-quota {command}: {text}", file=sys.stderr)  # noqa: T201 - the same
