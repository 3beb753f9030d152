"""The command that writes dashboards, rules, examples and a base for kustomize into a directory."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from langchain_quota.cli.command import CommandError, say
from langchain_quota.monitoring import checks, exports


def _checked(fault: Callable[[str], str | None], metavar: str, text: str) -> dict[str, Any]:
    """The arguments of an option with a text that is checked."""

    def checked(text: str) -> str:
        found = fault(text)
        if found is not None:
            raise argparse.ArgumentTypeError(found)
        return text

    return {"type": checked, "metavar": metavar, "help": text}


def _directory(text: str) -> Path:
    if not text:  # Path would take it for the current directory
        raise argparse.ArgumentTypeError("must be a directory, not ''")
    return Path(text)


_ALERTS = ("--selector", "--grafana-url", "--runbooks", "--per-thread-alerts")
_WHATS: dict[str, tuple[Callable[..., Mapping[str, str]], str, Sequence[str]]] = {
    "grafana": (exports.dashboards, "dashboards", ("--datasource", "--selector", "--runbooks")),
    "prometheus": (exports.rules, "recording and alert rules", (*_ALERTS, "--format")),
    "kubernetes": (
        exports.kubernetes,
        "scraping, rules and dashboards for kustomize",
        ("--namespace", *_ALERTS),
    ),
    "alertmanager": (exports.alertmanager, "an example of a route", ()),
}
"""What can be written: by which function, the help, and the options that the function takes."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "--datasource": _checked(
        checks.datasource_fault, "UID", "the Prometheus data source that the dashboards open with"
    ),
    "--selector": _checked(
        checks.selector_fault, "MATCHERS", "matchers for every query, such as 'job=\"agents\"'"
    ),
    "--grafana-url": _checked(
        checks.url_fault,
        "URL",
        f"where Grafana is, for the alerts' links (default: {exports.GRAFANA_URL})",
    ),
    "--runbooks": _checked(
        checks.url_fault,
        "URL",
        "where your runbooks are; the alert's name is appended (default: the project's own)",
    ),
    "--per-thread-alerts": {
        "dest": "per_thread",
        "action": "store_true",
        "help": "add alerts about single threads that are near their limits",
    },
    "--format": {
        "choices": exports.RULES_FILES,
        "help": "a rule file, or the object for the Prometheus Operator (default: rules)",
    },
    "--namespace": _checked(
        checks.namespace_fault, "NAME", "the namespace of the objects (default: kubectl's own)"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments: to a subcommand only the options that apply to it."""
    whats = parser.add_subparsers(dest="what", required=True)
    for what, (_, text, options) in _WHATS.items():
        add = whats.add_parser(what, help=text).add_argument
        for option in options:
            add(option, default=argparse.SUPPRESS, **_OPTIONS[option])
        where = "the directory to write to"
        add("--to", type=_directory, required=True, metavar="DIR", help=where)
        add("--force", action="store_true", help="overwrite files that exist")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their names; without an address of Grafana, print the default."""
    given = vars(arguments)
    _, what, to, force = (given.pop(each) for each in ("command", "what", "to", "force"))
    made, _, options = _WHATS[what]
    note = f" (needs Prometheus {exports.PROMETHEUS} or newer)" if what == "prometheus" else ""
    _write(made(**given), to, note, force=force)
    if "--grafana-url" in options and "grafana_url" not in given:
        say(f"dashboard_url of the alerts leads to {exports.GRAFANA_URL}: set --grafana-url")
    return 0


def _write(files: Mapping[str, str], directory: Path, note: str, *, force: bool) -> None:
    """Write all files, or none if one of them may not be written."""
    remedy = "name a directory that you can write to"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in the way" if in_the_way else error.strerror
        raise CommandError(f"cannot use --to {str(directory)!r}: {reason}; {remedy}") from error
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
        fault = f"cannot write {str(path)!r}: {error.strerror}; {remedy} with --to"
        raise CommandError(fault) from error
    for path in paths:
        say(f"{path}{note}")
