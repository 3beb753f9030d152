"""The command that writes dashboards, rules, examples and a base for kustomize into a directory."""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from langchain_quota.cli.command import CommandError, say
from langchain_quota.monitoring import checks, exports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: to a subcommand only the options that apply to it."""
    whats = parser.add_subparsers(dest="what", required=True)
    boards = whats.add_parser("grafana", help="dashboards")
    boards.add_argument(
        "--datasource",
        type=_checked(checks.datasource_fault),
        metavar="UID",
        help="the Prometheus data source that the dashboards open with",
    )
    _add_selector(boards)
    _add_runbooks(boards)
    prometheus = whats.add_parser("prometheus", help="recording and alert rules")
    _add_selector(prometheus)
    _add_alert_options(prometheus)
    prometheus.add_argument(
        "--format",
        choices=exports.RULES_FILES,
        default="rules",
        help="a rule file, or the object for the Prometheus Operator (default: %(default)s)",
    )
    kubernetes = whats.add_parser("kubernetes", help="scraping, rules and dashboards for kustomize")
    kubernetes.add_argument(
        "--namespace",
        type=_checked(checks.namespace_fault),
        metavar="NAME",
        help="the namespace of the objects (default: kubectl's own)",
    )
    _add_selector(kubernetes)
    _add_alert_options(kubernetes)
    example = whats.add_parser("alertmanager", help="an example of a route")
    for each in (boards, prometheus, example, kubernetes):
        each.add_argument(
            "--to", type=_directory, required=True, metavar="DIR", help="the directory to write to"
        )
        each.add_argument("--force", action="store_true", help="overwrite files that exist")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their names; without an address of Grafana, print the default.

    Raises:
        CommandError: A file exists, or cannot be written.
    """
    note = ""
    if arguments.what == "grafana":
        files = exports.dashboards(
            datasource=arguments.datasource,
            selector=arguments.selector or "",
            runbooks=arguments.runbooks,
        )
    elif arguments.what == "prometheus":
        note = f" (needs Prometheus {exports.PROMETHEUS} or newer)"
        files = exports.rules(format=arguments.format, **_alert_options(arguments))
    elif arguments.what == "kubernetes":
        files = exports.kubernetes(namespace=arguments.namespace, **_alert_options(arguments))
    else:
        files = exports.alertmanager()
    _write(files, arguments.to, note, force=arguments.force)
    if arguments.what in ("prometheus", "kubernetes") and arguments.grafana_url is None:
        say(f"dashboard_url of the alerts leads to {exports.GRAFANA_URL}: set --grafana-url")
    return 0


def _alert_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "selector": arguments.selector or "",
        "grafana_url": arguments.grafana_url or exports.GRAFANA_URL,
        "runbooks": arguments.runbooks,
        "per_thread": arguments.per_thread_alerts,
    }


def _write(files: Mapping[str, str], directory: Path, note: str, *, force: bool) -> None:
    """Write all files, or none if one of them may not be written.

    Raises:
        CommandError: One of them may not, or cannot, be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in the way" if in_the_way else error.strerror
        raise CommandError(
            f"cannot use --to {str(directory)!r}: {reason}; name a directory that you can write to"
        ) from error
    paths = {directory / name: text for name, text in files.items()}
    taken = [path for path in paths if os.path.lexists(path)]
    if taken and not force:
        names = ", ".join(path.name for path in taken)
        raise CommandError(f"{str(directory)!r} has {names}; --force overwrites")
    for path in filter(Path.is_dir, taken):
        raise CommandError(f"cannot overwrite {str(path)!r}: it is a directory")
    path = directory
    try:
        with TemporaryDirectory(prefix=".langchain-quota-", dir=directory) as unfinished:
            for path, text in paths.items():
                Path(unfinished, path.name).write_text(text, encoding="utf-8", newline="\n")
            for path in paths:
                # What a link leads to is left alone: the file takes the link's place.
                Path(unfinished, path.name).replace(path)
    except OSError as error:
        raise CommandError(
            f"cannot write {str(path)!r}: {error.strerror}; name a directory that you can write to "
            "with --to"
        ) from error
    for path in paths:
        say(f"{path}{note}")


def _add_selector(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--selector",
        type=_checked(checks.selector_fault),
        metavar="MATCHERS",
        help="matchers for every query, such as 'job=\"agents\"'",
    )


def _add_alert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grafana-url",
        type=_checked(checks.url_fault),
        metavar="URL",
        help=f"where Grafana is, for the alerts' links (default: {exports.GRAFANA_URL})",
    )
    _add_runbooks(parser)
    parser.add_argument(
        "--per-thread-alerts",
        action="store_true",
        help="add alerts about single threads that are near their limits",
    )


def _add_runbooks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runbooks",
        type=_checked(checks.url_fault),
        metavar="URL",
        help="where your runbooks are; the alert's name is appended (default: the project's own)",
    )


def _checked(fault: Callable[[str], str | None]) -> Callable[[str], str]:
    def checked(text: str) -> str:
        found = fault(text)
        if found is not None:
            raise argparse.ArgumentTypeError(found)
        return text

    return checked


def _directory(text: str) -> Path:
    if not text:  # Path would take it for the current directory
        raise argparse.ArgumentTypeError("must be a directory, not ''")
    return Path(text)
