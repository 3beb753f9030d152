"""The dashboards, the rules and the example for Alertmanager, as an export writes them.

They are data beside this module, and good as they stand: for all jobs, with links to one's own
machine.
"""

import json
import re
import textwrap
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

PROMETHEUS = "2.42"
"""The oldest Prometheus that takes the rules: the first with `keep_firing_for`."""

GRAFANA_URL = "http://localhost:3000"
RUNBOOK_BASE = "http://localhost:8000/runbooks"
"""Where links in the data lead: to what runs on one's own machine, never to a stranger's."""

Format = Literal["rules", "prometheusrule"]
RULES_FILES: dict[Format, str] = {
    "rules": "langchain-quota-rules.yaml",
    "prometheusrule": "langchain-quota-prometheusrule.yaml",
}
"""The name of the exported rules, by their format."""

_DATA = resources.files(__package__)
_PER_THREAD = "# Only with --per-thread-alerts"
"""From this comment on the rules are alerts on single threads."""

# Where something is put in: at a metric, with the brace of its matchers if it has any, and at the
# beginning of a link. With a colon before it a name is that of a recorded series, which stays.
_PLACE = re.compile(
    r"(?<!:)(?:langchain_quota_\w+|scrape_duration_seconds)\{?"
    rf"|{re.escape(GRAFANA_URL)}|{re.escape(RUNBOOK_BASE)}"
)


def dashboards(*, datasource: str | None = None, selector: str = "") -> dict[str, str]:
    """The dashboards' JSON, by the names of their files.

    Args:
        datasource: The UID of the Prometheus data source that the dashboards begin with; without
            it Grafana's default one.
        selector: Matchers put into every query, such as `job="agents"`.
    """
    files = [file for file in _boards().iterdir() if file.name.endswith(".json")]
    escaped = json.dumps(selector, ensure_ascii=False)[1:-1]
    texts = {file.name: _filled(_read(file), escaped) for file in files}
    if datasource:
        texts = {name: _begun_with(text, datasource) for name, text in texts.items()}
    return dict(sorted(texts.items()))


def rules(
    *,
    selector: str = "",
    grafana_url: str = GRAFANA_URL,
    runbook_base: str = RUNBOOK_BASE,
    per_thread: bool = False,
    format: Format = "rules",  # noqa: A002 - the option's name
) -> dict[str, str]:
    """The recording and alert rules, by the name of their file.

    Args:
        selector: Matchers put into every selector of a metric, such as `job="agents"`.
        grafana_url: Where Grafana is, for `dashboard_url`.
        runbook_base: Where the runbooks are; the alert's name is appended, for `runbook_url`.
        per_thread: Whether to alert on single threads that come near their limits.
        format: `"rules"` for a rule file, `"prometheusrule"` for the object of that kind which
            the Prometheus Operator takes.
    """
    text = _read(_DATA / "rules.yaml")
    if not per_thread:
        text = text[: text.index(_PER_THREAD)].rstrip() + "\n"
    text = _filled(text, selector, grafana_url.rstrip("/"), runbook_base.rstrip("/"))
    if format == "prometheusrule":
        text = _read(_DATA / "prometheusrule.yaml") + textwrap.indent(text, "  ")
    return {RULES_FILES[format]: text}


def alertmanager() -> dict[str, str]:
    """The example of Alertmanager's configuration, by the name of its file."""
    file = _DATA / "alertmanager.yaml"
    return {file.name: _read(file)}


def _boards() -> Traversable:
    """Where the generated files are: in the package, or in the source tree that it runs from."""
    carried = _DATA / "dashboards"
    return carried if carried.is_dir() else Path(__file__).parents[3] / "dashboards" / "grafana"


def _read(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _filled(
    text: str, selector: str, grafana_url: str = GRAFANA_URL, runbook_base: str = RUNBOOK_BASE
) -> str:
    """The text with the user's matchers and addresses.

    All in one pass, so that nothing is put into what the user gave.
    """
    addresses = {GRAFANA_URL: grafana_url, RUNBOOK_BASE: runbook_base}

    def put(place: re.Match[str]) -> str:
        found = place[0]
        if found in addresses:
            return addresses[found]
        if not selector:
            return found
        return f"{found}{selector}," if found.endswith("{") else f"{found}{{{selector}}}"

    return _PLACE.sub(put, text)


def _begun_with(text: str, uid: str) -> str:
    board = json.loads(text)
    for variable in board["templating"]["list"]:
        if variable["name"] == "datasource":
            variable["current"] = {"selected": True, "text": uid, "value": uid}
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
