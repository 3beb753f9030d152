"""The Grafana dashboards, as a user wants them."""

import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from langchain_quota.monitoring.rules import selector_fault

DATASOURCE = "datasource"
"""The dashboards' variable that chooses the Prometheus data source."""

# With it every selector of the generated queries begins, and nothing else contains it: whatever
# comes between the brace and the job narrows the query.
_SELECTOR = '{job=~"'

_UID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def dashboards(*, datasource: str | None = None, selector: str = "") -> dict[str, str]:
    """The dashboards' JSON, by the names of their files.

    Args:
        datasource: The UID of the Prometheus data source that the dashboards begin with; without
            it Grafana's default one.
        selector: Matchers put into every query, such as `job="agents"`; they name labels that the
            scrape adds.

    Raises:
        ValueError: An argument is wrong. The message names the argument and the value.
    """
    if datasource and not _UID.fullmatch(datasource):
        raise ValueError(f"datasource must be 1 to 40 letters, digits, - and _, not {datasource!r}")
    fault = selector_fault(selector) if selector else None
    if fault is not None:
        raise ValueError(f"selector {fault}")
    adapted = {}
    for file in sorted(_folder().iterdir(), key=lambda file: file.name):
        if not file.name.endswith(".json"):
            continue
        board = json.loads(file.read_text(encoding="utf-8"))
        if selector:
            board = _narrowed(board, selector)
        if datasource:
            _begin_with(board, datasource)
        adapted[file.name] = json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return adapted


def _folder() -> Traversable:
    """Where the generated files are: in the package, or in the source tree that it runs from."""
    carried = files(__package__) / "dashboards"
    return carried if carried.is_dir() else Path(__file__).parents[3] / "dashboards" / "grafana"


def _narrowed(value: Any, selector: str) -> Any:
    """The same with the matchers in every selector of every text."""
    if isinstance(value, str):
        return value.replace(_SELECTOR, f"{{{selector},{_SELECTOR[1:]}")
    if isinstance(value, list):
        return [_narrowed(each, selector) for each in value]
    if isinstance(value, dict):
        return {key: _narrowed(each, selector) for key, each in value.items()}
    return value


def _begin_with(board: Any, uid: str) -> None:
    for variable in board["templating"]["list"]:
        if variable["name"] == DATASOURCE:
            variable["current"] = {"selected": True, "text": uid, "value": uid}
