"""Checks what users put into exported files, as types of arguments."""

import re
import warnings
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
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


def selector(text: str) -> str:
    """A selector: matchers, as PromQL has them between braces."""
    fault = ArgumentTypeError(
        f'must be matchers such as job="agents",namespace="prod", not {text!r}'
    )
    end = -1
    while end < len(text):
        matcher = _MATCHER.match(text, end + 1)
        if matcher is None or not text.isprintable() or text[matcher.end() :][:1] not in ("", ","):
            raise fault
        end = matcher.end()
        name, operator, value = matcher.groups()
        if name in OWN_LABELS or name.startswith("__"):
            raise ArgumentTypeError(
                f"must name labels that the scrape adds, such as job, not {name!r}"
            )
        if operator in ("=~", "!~"):
            try:
                with warnings.catch_warnings(action="ignore"):  # RE2 reads some differently
                    re.compile(value.replace(r"\\", "\\"))
            except re.error:
                wrong = f"must have valid regular expressions, not {value!r}"
                raise ArgumentTypeError(wrong) from None
    return text


def url(text: str) -> str:
    """An address that links begin with."""
    with suppress(ValueError):  # a port that is no number, a broken IPv6 address
        parts = urlsplit(text)
        if _URL.fullmatch(text) and parts.hostname and parts.port != 0:
            return text
    raise ArgumentTypeError(
        f"must be an http or https address without query, fragment or user, not {text!r}"
    )


def _text(pattern: str, what: str) -> Callable[[str], str]:
    def text(given: str) -> str:
        if re.fullmatch(pattern, given):
            return given
        raise ArgumentTypeError(f"must be {what}, not {given!r}")

    return text


datasource = _text(r"[A-Za-z0-9_-]{1,40}", "1 to 40 letters, digits, - and _")
"""The UID of a data source in Grafana."""
namespace = _text(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "1 to 63 lower-case letters, digits and - between them",
)
"""The name of a namespace in Kubernetes."""
