"""Checks what users put into exported files: selector, address, data source, namespace."""

import re
import warnings
from urllib.parse import urlsplit

OWN_LABELS = frozenset(
    {
        *("agent", "limit", "scope", "decision", "kind", "tool", "state", "thread_id"),
        *("subject", "counts", "component", "error_type", "droppable", "operation", "outcome"),
        *("le", "action", "version", "model", "usage", "answer", "cause"),
    }
)
"""The labels of the package's own metrics. Not every metric has all, so no selector names one."""

_STRING = r'"((?:[^"\\]|\\(?:[abfnrtv\\"]|x[0-9a-fA-F]{2}|[0-7]{3}|u[0-9a-fA-F]{4}))*)"'
_MATCHER = re.compile(rf"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*{_STRING}\s*")
_URL = re.compile(r"https?://[!$%&()*+,./0-9:;=A-Z\[\]_a-z~-]+")
_UID = re.compile(r"[A-Za-z0-9_-]{1,40}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


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
                with warnings.catch_warnings(action="ignore"):  # RE2 reads some differently
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


def datasource_fault(text: str) -> str | None:
    """What is wrong with the UID of a data source in Grafana."""
    return (
        None if _UID.fullmatch(text) else f"must be 1 to 40 letters, digits, - and _, not {text!r}"
    )


def namespace_fault(text: str) -> str | None:
    """What is wrong with the name of a namespace in Kubernetes."""
    fault = f"must be 1 to 63 lower-case letters, digits and - between them, not {text!r}"
    return None if _NAMESPACE.fullmatch(text) else fault
