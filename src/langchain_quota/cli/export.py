"""The command that writes dashboards, rules, examples and a base for kustomize into a directory."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from langchain_quota.cli.printing import CommandError, say
from langchain_quota.monitoring import exports

_MADE_BY: dict[str, Callable[..., dict[str, str]]] = {
    "grafana": exports.dashboards,
    "prometheus": exports.rules,
    "kubernetes": exports.kubernetes,
    "alertmanager": exports.alertmanager,
}
_REMEDY = "name a directory that you can write to"


def run(arguments: Namespace) -> int:
    """Write all files, or none if one of them may not be written, and print their names."""
    options = vars(arguments)
    _, what, directory, force = (options.pop(each) for each in ("command", "what", "to", "force"))
    made = _MADE_BY[what](**options)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "a file is in the way" if in_the_way else error.strerror
        raise CommandError(f"cannot use --to {str(directory)!r}: {reason}; {_REMEDY}") from error
    paths: dict[Path, str] = {directory / name: text for name, text in made.items()}
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
        fault = f"cannot write {str(path)!r}: {error.strerror}; {_REMEDY} with --to"
        raise CommandError(fault) from error
    note = f" (needs Prometheus {exports.PROMETHEUS} or newer)" if what == "prometheus" else ""
    for path in paths:
        say(f"{path}{note}")
    if what in {"prometheus", "kubernetes"} and "grafana_url" not in options:
        say(f"dashboard_url of the alerts leads to {exports.GRAFANA_URL}: set --grafana-url")
    return 0
