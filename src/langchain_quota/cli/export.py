"""The command that writes dashboards, rules, examples and a base for kustomize into a directory.

The data in `monitoring/` work unchanged, for all jobs and with links to a Grafana on the same
machine.
"""

import json
import os
import re
import textwrap
from argparse import Namespace
from collections.abc import Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from langchain_quota.cli import CommandError, say
from langchain_quota.cli.arguments import GRAFANA_URL

RUNBOOKS = "https://github.com/langchain-quota/langchain-quota/blob/main/docs/runbooks"
"""The address of links to runbooks in the data; the name of a page is its alert's, and `.md`."""

RULES = "langchain-quota-rules.yaml"

_DATA = resources.files("langchain_quota") / "monitoring"
_OPTIONAL = "\n  # Only with --"
"""The beginning of the comment above a group of rules that an option adds."""

_ALERT_OF_ROW = re.escape("${__data.fields.alert:percentencode}")
# The pattern finds what is replaced: a metric, with the brace of its matchers if it has any; the
# beginning of a link to a dashboard; a link to a runbook. A name after a colon is not replaced,
# because it is part of a recorded series.
_PLACEHOLDER = re.compile(
    r"(?<!:)(?:langchain_quota_\w+|scrape_duration_seconds)\{?"
    rf"|{re.escape(GRAFANA_URL)}|{re.escape(RUNBOOKS)}/(?P<runbook>\w+(?:{_ALERT_OF_ROW})?)\.md"
)


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
        say(f"alerts link to Grafana at {GRAFANA_URL}: --grafana-url changes it")
    return 0


def dashboards(*, selector: str = "", runbooks: str | None = None) -> dict[str, str]:
    """Return the dashboards' JSON, by the names of their files."""
    # A built package has the dashboards in it; in the source tree they are beside it.
    packaged = _DATA / "dashboards"
    boards = packaged if packaged.is_dir() else Path(__file__).parents[3] / "dashboards" / "grafana"
    files = [file for file in boards.iterdir() if file.name.endswith(".json")]
    matchers, pages = _escape_json(selector), _escape_json(runbooks or "")
    texts = {file.name: _fill(_read(file), selector=matchers, runbooks=pages) for file in files}
    return dict(sorted(texts.items()))


def rules(
    *,
    selector: str = "",
    grafana_url: str = GRAFANA_URL,
    runbooks: str | None = None,
    per_thread: bool = False,
    spend: bool = False,
) -> dict[str, str]:
    """Return the recording and alert rules, by the name of their file."""
    text, *groups = _read(_DATA / "rules.yaml").split(_OPTIONAL)
    wanted = zip((per_thread, spend), groups, strict=True)
    text = _OPTIONAL.join([text, *(group for is_wanted, group in wanted if is_wanted)])
    return {RULES: _fill(text, selector=selector, grafana_url=grafana_url, runbooks=runbooks)}


def alertmanager() -> dict[str, str]:
    """Return the part of Alertmanager's configuration about the alerts, by its file's name."""
    return {"langchain-quota-route.yaml": _read(_DATA / "route.yaml")}


def kubernetes(
    *, selector: str = "", runbooks: str | None = None, **options: Any
) -> dict[str, str]:
    """Return a base for kustomize: scraping, rules and dashboards, by the names of its files."""
    [groups] = rules(selector=selector, runbooks=runbooks, **options).values()
    rules_object = _read(_DATA / "prometheusrule.yaml") + textwrap.indent(groups, "  ")
    objects = {
        "langchain-quota-podmonitor.yaml": _read(_DATA / "podmonitor.yaml"),
        "langchain-quota-prometheusrule.yaml": rules_object,
    }
    for file, board in dashboards(selector=selector, runbooks=runbooks).items():
        name = file.removesuffix(".json")
        head = _read(_DATA / "configmap.yaml").replace("DASHBOARD", name)
        objects[f"{name}-configmap.yaml"] = head + textwrap.indent(board, "    ")
    base = _read(_DATA / "kustomization.yaml") + "".join(f"  - {file}\n" for file in objects)
    return {"kustomization.yaml": base, **objects}


_EXPORTS: dict[str, Callable[..., dict[str, str]]] = {
    "grafana": dashboards,
    "prometheus": rules,
    "kubernetes": kubernetes,
    "alertmanager": alertmanager,
}


def _read(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _escape_json(text: str) -> str:
    """Return the user's text escaped for use within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _fill(text: str, *, selector: str, grafana_url: str = GRAFANA_URL, runbooks: str | None) -> str:
    """Insert the user's matchers and addresses, in one pass that never changes inserted text."""
    grafana, pages = grafana_url.rstrip("/"), (runbooks or "").rstrip("/")

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        if text == GRAFANA_URL:
            return grafana
        if match["runbook"]:
            return f"{pages}/{match['runbook']}" if pages else text
        if not selector:
            return text
        return f"{text}{selector}," if text.endswith("{") else f"{text}{{{selector}}}"

    return _PLACEHOLDER.sub(replace, text)
