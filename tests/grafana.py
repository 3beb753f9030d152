"""The dashboards as Grafana reads them: their queries, with the variables replaced."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langchain_quota.monitoring.exports import dashboards

Values = Mapping[str, str | list[str]]
"""What is chosen for each variable: a list where several can be, `ALL` for all."""

ALL = ["$__all"]

RATE_INTERVAL = "10s"
RANGE = "1h"
RANGE_SECONDS = "3600"
INTERVAL_MILLISECONDS = "1000"

_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::(?P<format>\w+))?\}|\$(?P<bare>\w+)")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)", re.DOTALL)
_RESULT = re.compile(r"query_result\((?P<expr>.+)\)", re.DOTALL)


@dataclass(frozen=True)
class Query:
    """A query to Prometheus.

    Attributes:
        where: Whose it is, such as `langchain-quota-overview 6 B`.
        expr: PromQL, with variables.
        over_time: Whether it asks for a range of time.
        exemplar: Whether exemplars are asked for as well.
        legend: The name that its series get.
    """

    where: str
    expr: str
    over_time: bool
    exemplar: bool = False
    legend: str = ""


@dataclass(frozen=True)
class Variable:
    """A variable whose values Prometheus tells.

    Attributes:
        name: Its name.
        label: The label whose values they are.
        several: Whether several values can be chosen.
        selector: The series that have the values, with variables; empty if a query finds them.
        expr: The query whose result has the values, with variables, and
        regex: what takes them out of its lines; empty if a selector finds them.
    """

    name: str
    label: str
    several: bool
    selector: str = ""
    expr: str = ""
    regex: str = ""

    @property
    def asked(self) -> str:
        """The selector or the query."""
        return self.selector or self.expr


@dataclass(frozen=True)
class Board:
    """A dashboard."""

    model: Any

    @property
    def uid(self) -> str:
        uid: str = self.model["uid"]
        return uid

    @property
    def panels(self) -> list[Any]:
        """All panels but the headings."""
        return [panel for panel in self.model["panels"] if panel["type"] != "row"]

    @property
    def queries(self) -> list[Query]:
        """The queries of panels and annotations to Prometheus."""
        return [*self._of_panels(), *self._of_annotations()]

    @property
    def trace_queries(self) -> list[str]:
        """The queries to Tempo."""
        return [
            target["query"]
            for panel in self.panels
            for target in panel["targets"]
            if target["datasource"]["type"] == "tempo"
        ]

    @property
    def variables(self) -> list[Variable]:
        """The variables that Prometheus is asked about, in order."""
        models = self.model["templating"]["list"]
        return [_variable(model) for model in models if model["type"] == "query"]

    def _of_panels(self) -> Iterator[Query]:
        for panel in self.panels:
            for target in panel["targets"]:
                if target["datasource"]["type"] == "prometheus":
                    yield Query(
                        f"{self.uid} {panel['id']} {target['refId']}",
                        target["expr"],
                        over_time=not target.get("instant", False),
                        exemplar=target.get("exemplar", False),
                        legend=target.get("legendFormat", ""),
                    )

    def _of_annotations(self) -> Iterator[Query]:
        for model in self.model["annotations"]["list"]:
            yield Query(
                f"{self.uid} {model['name']}",
                model["expr"],
                over_time=True,
                legend=model["titleFormat"] + model["textFormat"],
            )


def _variable(model: Any) -> Variable:
    asked = _LABEL_VALUES.fullmatch(model["query"])
    if asked is not None:
        return Variable(model["name"], asked["label"], model["multi"], selector=asked["selector"])
    result = _RESULT.fullmatch(model["query"])
    assert result is not None, model["query"]
    regex = model["regex"].removeprefix("/").removesuffix("/")
    label = regex.partition("=")[0]
    return Variable(model["name"], label, model["multi"], expr=result["expr"], regex=regex)


def boards(**options: Any) -> list[Board]:
    """The dashboards as they are exported."""
    return [Board(json.loads(text)) for text in dashboards(**options).values()]


def interpolate(expr: str, values: Values) -> str:
    """Replace variables as Grafana's Prometheus data source does."""
    every: Values = {
        "__rate_interval": RATE_INTERVAL,
        "__range": RANGE,
        "__range_s": RANGE_SECONDS,
        "__interval_ms": INTERVAL_MILLISECONDS,
        **values,
    }

    def replaced(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        if name not in every:
            return match[0]
        value = every[name]
        if value == ALL:
            return ".+"
        if match["format"] == "regex":
            return f"({'|'.join(map(_regex, value))})"
        if isinstance(value, list):
            escaped = [_escaped(each) for each in value]
            return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
        return value if match["format"] == "raw" or name.startswith("__") else _plain(value)

    return _VARIABLE.sub(replaced, expr)


def _regex(value: str) -> str:
    """For a regular expression in a raw string."""
    return re.sub(r"[-\[\]{}()*+!<=:?./\\^$|#\s,]", r"\\\g<0>", value)


def _escaped(value: str) -> str:
    """For a regular expression within a PromQL string."""
    value = value.replace("\\", "\\\\\\\\")
    return re.sub(r"[$^*{}\[\]'+?.()|]", r"\\\\\g<0>", value)


def _plain(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\\\'")
