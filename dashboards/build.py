"""Generates the Grafana dashboards: `python -m dashboards.build`."""

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import budgets, overview, settings, thread
from dashboards.queries import select

FOLDER = Path(__file__).parent / "grafana"

_RESTARTS = {
    "name": "Restarts",
    "datasource": {"type": "prometheus", "uid": "${datasource}"},
    "enable": True,
    "expr": select("job_instance:langchain_quota_start_time:restarted"),
    "iconColor": settings.NEUTRAL,
    "textFormat": "",
    "titleFormat": "{{instance}} restarted",
    "step": "15s",
}

# The SDK writes them into every variable; they belong to those of intervals.
_OF_INTERVALS = ("auto", "auto_count", "auto_min")


def render() -> dict[str, str]:
    """The dashboards' JSON by the names of their files."""
    return {
        f"{settings.BUDGETS_UID}.json": _json(budgets.build()),
        f"{settings.OVERVIEW_UID}.json": _json(overview.build()),
        f"{settings.THREAD_UID}.json": _json(thread.build()),
    }


def main() -> None:
    """Write the files."""
    for name, text in render().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _json(board: Dashboard) -> str:
    made: dict[str, Any] = json.loads(JSONEncoder().encode(board.build()))
    made["annotations"] = {"list": [_RESTARTS]}
    for variable in made["templating"]["list"]:
        for name in _OF_INTERVALS:
            variable.pop(name, None)
        variable["skipUrlSync"] = False
    return json.dumps(made, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
