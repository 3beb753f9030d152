"""The command line: `langchain-quota demo`, `export`, `quotas` and `top`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
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

_MAX_THREADS = 100
_MAX_SECONDS = 3600
_MAX_PORT = 65_535


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: The arguments are wrong (code 2), or ask for help or the version (0).
    """
    arguments = _parser().parse_args(argv)
    command: str = arguments.command
    try:
        code: int = _module(command).run(arguments)
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
    return code


def _module(command: str) -> Any:
    """The module of a command: imported when it is needed, since its extra may be missing.

    Raises:
        CommandError: A package of the extra is missing.
        ModuleNotFoundError: The module itself is missing.
    """
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
    demo = commands.add_parser(
        "demo",
        help="watch agents reach their limits",
        description="Runs agents on several threads at once, and shows how limits stop them.",
    )
    demo.add_argument(
        "--threads",
        type=_whole(1, _MAX_THREADS),
        default=6,
        help="conversations at the same time (default: %(default)s)",
    )
    demo.add_argument(
        "--seconds",
        type=_whole(1, _MAX_SECONDS),
        default=20,
        help="how long the traffic lasts (default: %(default)s)",
    )
    demo.add_argument(
        "--port",
        type=_whole(0, _MAX_PORT),
        default=9464,
        help="where /metrics is served; 0 takes a free port (default: %(default)s)",
    )
    demo.add_argument(
        "--serve", action="store_true", help="go on serving /metrics afterwards, until Ctrl-C"
    )
    demo.add_argument(
        "--db",
        type=Path,
        metavar="FILE",
        help="keep the threads in this SQLite file: a second run goes on with their counts",
    )
    demo.add_argument(
        "--model",
        metavar="PROVIDER:NAME",
        help="a real chat model, such as openai:gpt-5.5, instead of the scripted one",
    )
    export.add_arguments(
        commands.add_parser(
            "export",
            help="write dashboards, alert rules and an example for Alertmanager",
            description="Writes what monitoring needs into a directory.",
        )
    )
    quotas_arguments.add_arguments(
        commands.add_parser(
            "quotas",
            help="see what is used of shared quotas, reset it, grant more",
            description="Shows and resets the counts that agents share in Redis; grants more.",
        )
    )
    top_options.add_arguments(
        commands.add_parser("top", help="watch who is near a limit, and who is refused")
    )
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, not {text!r}"
            )
        return value

    return whole
