"""Recording and alert rules for Prometheus, rendered as YAML that people can read."""

import re
import textwrap
import warnings
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from langchain_quota.monitoring.alerts import Alert, Group, Record, groups

PROMETHEUS = "2.42"
"""The oldest Prometheus that takes the rules: the first with `keep_firing_for`."""

FILE = "langchain-quota-rules.yaml"
OPERATOR_FILE = "langchain-quota-prometheusrule.yaml"

GRAFANA_URL = "http://localhost:3000"
RUNBOOK_BASE = "http://localhost:8000/runbooks"
"""The defaults lead to what runs on one's own machine, never to a stranger's."""

OWN_LABELS = frozenset(
    {
        *("agent", "limit", "scope", "decision", "kind", "tool", "state", "thread_id"),
        *("component", "error_type", "operation", "outcome", "le", "action", "version"),
        "droppable",
    }
)
"""The labels of the package's own metrics: not all metrics have one, so no selector names it."""

Format = Literal["rules", "prometheusrule"]
FORMATS: tuple[Format, ...] = ("rules", "prometheusrule")

_STRING = r'"((?:[^"\\]|\\(?:[abfnrtv\\"]|x[0-9a-fA-F]{2}|[0-7]{3}|u[0-9a-fA-F]{4}))*)"'
_MATCHER = re.compile(rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*{_STRING}\s*")
_URL = re.compile(r"https?://[!$%&()*+,./0-9:;=A-Z\[\]_a-z~-]+")


def selector_fault(text: str) -> str | None:
    """What is wrong with a selector: matchers, as PromQL has them between braces."""
    fault = f'must be matchers such as job="agents",namespace="prod", not {text!r}'
    if not text.isprintable():
        return fault
    end = 0
    while True:
        matcher = _MATCHER.match(text, end)
        if matcher is None:
            return fault
        name, operator, value = matcher.groups()
        if name in OWN_LABELS or name.startswith("__"):
            return f"must name labels that the scrape adds, such as job, not {name!r}"
        if operator in ("=~", "!~"):
            try:
                with warnings.catch_warnings(action="ignore"):  # on what RE2 reads otherwise
                    re.compile(value.replace(r"\\", "\\"))
            except re.error:
                return f"must have valid regular expressions, not {value!r}"
        end = matcher.end()
        if end == len(text):
            return None
        if text[end] != ",":
            return fault
        end += 1


def url_fault(text: str) -> str | None:
    """What is wrong with an address that links begin with."""
    fault = f"must be an http or https address without query, fragment or user, not {text!r}"
    try:
        parts = urlsplit(text)
        valid = _URL.fullmatch(text) and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        return fault
    return None if valid else fault


@dataclass(frozen=True, slots=True)
class Options:
    """How the rules are rendered.

    Attributes:
        selector: Matchers put into every selector of a metric, such as `job="agents"`; they name
            labels that the scrape adds.
        grafana_url: Where Grafana is, for `dashboard_url`.
        runbook_base: Where the runbooks are; the alert's name is appended, for `runbook_url`.
        per_thread: Whether to alert on single threads that come near their limits.
        format: `"rules"` for a rule file, `"prometheusrule"` for the object of that kind which
            the Prometheus Operator takes.

    Raises:
        ValueError: An argument is wrong. The message names the argument and the value.
    """

    selector: str = ""
    grafana_url: str = GRAFANA_URL
    runbook_base: str = RUNBOOK_BASE
    per_thread: bool = False
    format: Format = "rules"

    def __post_init__(self) -> None:
        faults = {
            "selector": selector_fault(self.selector) if self.selector else None,
            "grafana_url": url_fault(self.grafana_url),
            "runbook_base": url_fault(self.runbook_base),
        }
        for argument, fault in faults.items():
            if fault is not None:
                raise ValueError(f"{argument} {fault}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {self.format!r}")


def files(options: Options | None = None) -> dict[str, str]:
    """The rule file: its text by its name."""
    options = options or Options()
    name = FILE if options.format == "rules" else OPERATOR_FILE
    return {name: render(options)}


def render(options: Options) -> str:
    """The rules as YAML."""
    body = "groups:\n" + "".join(
        _group(group, options) for group in groups(options.selector, per_thread=options.per_thread)
    )
    if options.format == "prometheusrule":
        body = f"{_OPERATOR_HEAD}{textwrap.indent(body, '  ')}"
    return f"{_HEADER}{body}"


_HEADER = f"""\
# Recording and alert rules for the metrics of langchain-quota.
# Needs Prometheus {PROMETHEUS} or newer: older ones refuse keep_firing_for.
# Rendered by `langchain-quota export prometheus`: render again rather than edit.
# Links lead where --grafana-url and --runbook-base say.
"""

_OPERATOR_HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: langchain-quota
spec:
"""

_WIDTH = 100
_TEMPLATE = re.compile(r"\{\{.*?\}\}")


def _group(group: Group, options: Options) -> str:
    interval = f"    interval: {group.interval}\n" if group.interval else ""
    rules = "".join(_rule(rule, options) for rule in group.rules)
    return f"  - name: {group.name}\n{interval}    rules:\n{rules}"


def _rule(rule: Record | Alert, options: Options) -> str:
    if isinstance(rule, Record):
        lines = [f"record: {rule.name}", *_block("expr", rule.expr)]
    else:
        lines = _alert(rule, options)
    return "".join(
        f"      {'- ' if number == 0 else '  '}{line}\n" for number, line in enumerate(lines)
    )


def _alert(alert: Alert, options: Options) -> list[str]:
    grafana, runbooks = (url.rstrip("/") for url in (options.grafana_url, options.runbook_base))
    durations = {"for": alert.hold, "keep_firing_for": alert.keep_firing_for}
    return [
        f"alert: {alert.name}",
        *_block("expr", alert.expr),
        *(f"{key}: {value}" for key, value in durations.items() if value),
        "labels:",
        f"  severity: {alert.severity}",
        "annotations:",
        f"  summary: {_scalar(alert.summary)}",
        "  description: >-",
        *(f"    {line}" for line in _wrapped(alert.description)),
        f"  runbook_url: {_scalar(f'{runbooks}/{alert.name}')}",
        f"  dashboard_url: {_scalar(grafana + alert.dashboard)}",
    ]


def _block(key: str, text: str) -> list[str]:
    return [f"{key}: |", *(f"  {line}" for line in text.splitlines())]


def _scalar(text: str) -> str:
    """A text as YAML's single-quoted scalar, in which only the quote is special."""
    return "'" + text.replace("'", "''") + "'"


def _wrapped(text: str) -> list[str]:
    """Lines that YAML folds back into the text; no template is torn."""
    whole = _TEMPLATE.sub(lambda template: template[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, _WIDTH - 12, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]
