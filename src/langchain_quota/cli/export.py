"""The command that writes dashboards, rules, examples and a base for kustomize into a directory."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from langchain_quota.cli.printing import CommandError, say
from langchain_quota.monitoring import exports

_MADE_BY: dict[str, Callable[..., dict[str, str]]] = {
    "grafana": exports.dashboards,
    "prometheus": exports.rules,
    "kubernetes": exports.kubernetes,
    "alertmanager": exports.alertmanager,
}


def run(arguments: Namespace) -> int:
    """Write all files, or none if one of them may not be written, and print their names."""
    options = vars(arguments)
    _, what, directory, force = (options.pop(each) for each in ("command", "what", "to", "force"))
    made = _MADE_BY[what](**options)
    paths: dict[Path, str] = {directory / name: text for name, text in made.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = [path for path in paths if os.path.lexists(path)]
        if taken and not force:
            names = ", ".join(path.name for path in taken)
            raise CommandError(f"{str(directory)!r} has {names}; --force overwrites")
        for path in filter(Path.is_dir, taken):
            raise CommandError(f"cannot overwrite {str(path)!r}: it is a directory")
        for path, text in paths.items():
            # What a link leads to is left alone: the file takes the link's place.
            path.unlink(missing_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        remedy = "name a directory that you can write to"
        fault = f"cannot use --to {str(directory)!r}: {error.strerror}; {remedy}"
        raise CommandError(fault) from error
    for path in paths:
        say(str(path))
    if what in {"prometheus", "kubernetes"} and "grafana_url" not in options:
        say(f"dashboard_url of the alerts leads to {exports.GRAFANA_URL}: set --grafana-url")
    return 0
