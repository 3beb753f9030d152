"""The dashboards, the rules, a route for Alertmanager and a base for kustomize, as exported.

They are data files that work unchanged: for all jobs, with links to a Grafana on the same machine.
"""

import json
import re
import textwrap
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

GRAFANA_URL = "http://localhost:3000"
"""Where links to dashboards lead in the data: only the user knows where Grafana is."""

RUNBOOKS = "https://github.com/langchain-quota/langchain-quota/blob/main/docs/runbooks"
"""Where links to runbooks lead in the data; a page there is named as its alert, and ends in .md."""

RULES = "langchain-quota-rules.yaml"
"""The name of the exported rules."""

_DATA = resources.files(__package__)
_PER_THREAD = "# Only with --per-thread-alerts"
"""The rules after this comment are about single threads."""

_ALERT_OF_ROW = re.escape("${__data.fields.alertname:percentencode}")
# The places to fill in: a metric, with the brace of its matchers if it has any; the beginning of a
# link to a dashboard; a link to a runbook. A name after a colon is part of a recorded series, which
# is not changed.
_PLACE = re.compile(
    r"(?<!:)(?:langchain_quota_\w+|scrape_duration_seconds)\{?"
    rf"|{re.escape(GRAFANA_URL)}|{re.escape(RUNBOOKS)}/(?P<runbook>\w+|{_ALERT_OF_ROW})\.md"
)


def dashboards(*, selector: str = "", runbooks: str | None = None) -> dict[str, str]:
    """The dashboards' JSON, by the names of their files."""
    # In the package, or in the source tree that it runs from.
    carried = _DATA / "dashboards"
    boards = carried if carried.is_dir() else Path(__file__).parents[3] / "dashboards" / "grafana"
    files = [file for file in boards.iterdir() if file.name.endswith(".json")]
    matchers, pages = _in_json(selector), _in_json(runbooks or "")
    texts = {file.name: _filled(_read(file), selector=matchers, runbooks=pages) for file in files}
    return dict(sorted(texts.items()))


def rules(
    *,
    selector: str = "",
    grafana_url: str = GRAFANA_URL,
    runbooks: str | None = None,
    per_thread: bool = False,
) -> dict[str, str]:
    """The recording and alert rules, by the name of their file."""
    text = _read(_DATA / "rules.yaml")
    if not per_thread:
        text = text[: text.index(_PER_THREAD)].rstrip() + "\n"
    return {RULES: _filled(text, selector=selector, grafana_url=grafana_url, runbooks=runbooks)}


def alertmanager() -> dict[str, str]:
    """The part of Alertmanager's configuration about the alerts, by the name of its file."""
    return {"langchain-quota-route.yaml": _read(_DATA / "route.yaml")}


def kubernetes(
    *, selector: str = "", runbooks: str | None = None, **options: Any
) -> dict[str, str]:
    """A base for kustomize, by the names of its files: what scrapes agents, rules, dashboards."""
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


def _read(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _in_json(given: str) -> str:
    """The user's text in the form that it has within a string of JSON."""
    return json.dumps(given, ensure_ascii=False)[1:-1]


def _filled(
    text: str, *, selector: str, grafana_url: str = GRAFANA_URL, runbooks: str | None
) -> str:
    """The text with the user's matchers and addresses; one pass never changes the user's text."""
    grafana, own_pages = grafana_url.rstrip("/"), (runbooks or "").rstrip("/")

    def put(place: re.Match[str]) -> str:
        found = place[0]
        if found == GRAFANA_URL:
            return grafana
        if place["runbook"]:
            return f"{own_pages}/{place['runbook']}" if own_pages else found
        if not selector:
            return found
        return f"{found}{selector}," if found.endswith("{") else f"{found}{{{selector}}}"

    return _PLACE.sub(put, text)
