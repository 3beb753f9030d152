"""The command that writes dashboards, rules, examples and a base for kustomize into a directory."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from langchain_quota.cli.printing import CommandError, say
from langchain_quota.monitoring import exports

_EXPORTS: dict[str, Callable[..., dict[str, str]]] = {
    "grafana": exports.dashboards,
    "prometheus": exports.rules,
    "kubernetes": exports.kubernetes,
    "alertmanager": exports.alertmanager,
}


def run(arguments: Namespace) -> int:
    """Write all files, or none if one of them may not be written, and print their names."""
    options = vars(arguments)
    names = ("command", "what", "to", "force")
    _, target, directory, force = (options.pop(name) for name in names)
    files = _EXPORTS[target](**options)
    paths: dict[Path, str] = {directory / name: text for name, text in files.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        existing = [path for path in paths if os.path.lexists(path)]
        if existing and not force:
            text = ", ".join(path.name for path in existing)
            raise CommandError(f"{str(directory)!r} has {text}; --force overwrites")
        for path in filter(Path.is_dir, existing):
            raise CommandError(f"cannot overwrite {str(path)!r}: it is a directory")
        for path, text in paths.items():
            # Replace a link, so that the file to which it leads stays as it is.
            path.unlink(missing_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        remedy = "name a directory that you can write to"
        fault = f"cannot use --to {str(directory)!r}: {error.strerror}; {remedy}"
        raise CommandError(fault) from error
    for path in paths:
        say(str(path))
    if target in {"prometheus", "kubernetes"} and "grafana_url" not in options:
        say(f"dashboard_url of the alerts leads to {exports.GRAFANA_URL}: set --grafana-url")
    return 0
