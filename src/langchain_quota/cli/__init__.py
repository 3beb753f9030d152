"""The command line: `langchain-quota demo`, `export`, `quotas` and `replay`."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from langchain_quota.cli.arguments import parser
from langchain_quota.cli.printing import CommandError, complain

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
    arguments = command_line.parse_args(argv)
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
