"""The command line: `langchain-quota demo`, `export`, `quotas` and `top`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from langchain_quota._version import __version__
from langchain_quota.cli import export, quotas_arguments, top_options
from langchain_quota.cli.command import CommandError, complain

FAILED = 2
"""The exit code of a command that failed: the same as for wrong arguments."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""

_EXTRAS = {"demo": "demo", "quotas": "redis", "top": "top"}
"""The extra of the package that a command needs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, by default those of the process; the exit code."""
    arguments = _parser().parse_args(argv)
    command: str = arguments.command
    try:
        return int(_module(command).run(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except CommandError as error:
        complain(command, str(error))
        return FAILED
    except OSError as error:
        # The reader of the output is gone, or the disk is full: the interpreter's last flush must
        # not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 1
        complain(command, error.strerror or str(error))
        return FAILED


def _module(command: str) -> Any:
    """The module of a command: imported when it is needed, since its extra may be missing."""
    try:
        return import_module(f"langchain_quota.cli.{command}")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("langchain_quota"):
            raise
        remedy = f'pip install "langchain-quota[{_EXTRAS[command]}]"'
        raise CommandError(f"needs the package {missing}: {remedy}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="langchain-quota",
        description="Limits for LangChain agents: try, monitor and manage them.",
    )
    parser.add_argument("--version", action="version", version=f"langchain-quota {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add_arguments, text, description) in _COMMANDS.items():
        add_arguments(commands.add_parser(name, help=text, description=description))
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    add, default = demo.add_argument, "(default: %(default)s)"
    text = f"conversations at the same time {default}"
    add("--threads", type=_whole(1, 100), default=6, help=text)
    add("--seconds", type=_whole(1, 3600), default=20, help=f"how long the traffic lasts {default}")
    text = f"where /metrics is served; 0 takes a free port {default}"
    add("--port", type=_whole(0, 65_535), default=9464, help=text)
    add("--serve", action="store_true", help="go on serving /metrics afterwards, until Ctrl-C")
    text = "keep the threads in this SQLite file: a second run goes on with their counts"
    add("--db", type=Path, metavar="FILE", help=text)
    text = "a real chat model, such as openai:gpt-5.5, instead of the scripted one"
    add("--model", metavar="PROVIDER:NAME", help=text)


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "demo": (
        _add_demo,
        "watch agents reach their limits",
        "Runs agents on several threads at once, and shows how limits stop them.",
    ),
    "export": (
        export.add_arguments,
        "write dashboards, alert rules and an example for Alertmanager",
        "Writes what monitoring needs into a directory.",
    ),
    "quotas": (
        quotas_arguments.add_arguments,
        "see what is used of shared quotas, reset it, grant more",
        "Shows and resets the counts that agents share in Redis; grants more.",
    ),
    "top": (
        top_options.add_arguments,
        "watch who is near a limit, and who is refused",
        "Shows who is near a limit and who is refused, again and again.",
    ),
}
"""What adds a command's arguments, its help, and its description."""


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        with suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        fault = f"must be a whole number from {least} to {most}, not {text!r}"
        raise argparse.ArgumentTypeError(fault)

    return whole
