"""The command line: `langchain-quota demo`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from langchain_quota._version import __version__

FAILED = 2
"""The exit code of a command that could not do its work, as of a wrong argument."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""

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
    try:
        return _demo(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter's last flush must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="langchain-quota", description=__doc__)
    parser.add_argument("--version", action="version", version=f"langchain-quota {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="watch agents be held to their limits",
        description="Runs agents on several threads at once, and shows how limits hold them.",
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


def _demo(arguments: argparse.Namespace) -> int:
    try:
        # The command line works without the extra; only the demo needs it.
        from langchain_quota.cli import demo  # noqa: PLC0415 - the same
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("langchain_quota"):
            raise
        return _failed(f'needs the package {missing}: pip install "langchain-quota[demo]"')
    options = demo.Options(
        threads=arguments.threads,
        seconds=arguments.seconds,
        port=arguments.port,
        serve=arguments.serve,
        db=arguments.db,
        model=arguments.model,
    )
    try:
        demo.run(options)
    except demo.DemoError as error:
        return _failed(str(error))
    return 0


def _failed(reason: str) -> int:
    print(f"langchain-quota demo: {reason}", file=sys.stderr)  # noqa: T201 - a command's output
    return FAILED
