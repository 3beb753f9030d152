"""The page that shows the quotas of all conversations, and its data: `/` and `/quota.json`."""

import asyncio
import gzip
import hashlib
import json
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from prometheus_client import REGISTRY, CollectorRegistry

from langchain_quota import __version__
from langchain_quota.limits.call import THREAD
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.runtime.sync_async import fork_safe_lock
from langchain_quota.runtime.units import NANODOLLARS, UNIT_LABELS, Level, in_base_unit
from langchain_quota.telemetry.instruments import usage_of
from langchain_quota.telemetry.labels import limit_label
from langchain_quota.telemetry.logs import logger
from langchain_quota.telemetry.reading import EVERYBODY, KINDS, Reading, UsageReader, rate
from langchain_quota.telemetry.refusals import still_refuses
from langchain_quota.telemetry.workers import (
    BLOCKED_NOW,
    CALLS,
    Subject,
    Use,
    in_slices,
    shared_directory,
)

SCHEMA = 1
"""The version of `/quota.json`: it changes when a field is changed or removed."""

_MAX_AGE = 25.0
"""The seconds after which figures are computed again, however long that takes."""

_STATES: tuple[str, ...] = ("blocked", Level.EXHAUSTED, Level.NEAR, Level.OK)
"""The states of a row, the most urgent first."""

_SORTS = ("state", "name", "used", "resets", "blocked", "last_blocked", "cost")

_PARAMETERS = {
    "find": re.compile(".*", re.DOTALL),
    "state": re.compile("|".join(("", *_STATES, "waiting"))),
    "sort": re.compile(f"-?({'|'.join(_SORTS)})"),
    "rows": re.compile("[1-9][0-9]?|[1-4][0-9][0-9]|500"),
}
"""The parameters of `/quota.json`, and the values that they may have."""

Json = dict[str, Any]
Response = tuple[str, dict[str, str], bytes]
"""Status, headers and body."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_as_json = json.JSONEncoder(separators=(",", ":")).encode


class _Row(NamedTuple):
    """A conversation with all its agents, or the subject of a quota."""

    kind: str
    # The garbage collector would stop all threads for many objects, so JSON is kept as text.
    json: str
    text: str
    """What the filter searches."""
    states: tuple[str, ...]
    keys: tuple[Any, ...]
    """The sort keys, in the order of `_SORTS`."""


def _rows_of(reading: Reading, shown: Sequence[Subject]) -> Iterator[_Row]:
    """Return the rows of subjects; a conversation of several agents is one row."""
    merged: dict[tuple[str, str], list[Subject]] = {}
    refusals = reading.last_refusals()
    for part in shown:
        agent, scope, subject = part.key
        name = part.label or ("" if subject == EVERYBODY else agent)
        merged.setdefault((scope, name), []).append(part)
    for (scope, name), parts in merged.items():
        yield _row_of(scope, name, parts, reading, refusals[scope, name][:10])


def _row_of(
    scope: str, name: str, parts: list[Subject], reading: Reading, last: list[Json]
) -> _Row:
    limits = [
        _limit_of(part, limit, use, reading)
        for part in parts
        for limit, use in list(part.uses.items())
    ]
    # The tightest enforced limit comes first.
    limits.sort(
        key=lambda limit: (limit["state"] is not None, _share(limit), limit["limit"]), reverse=True
    )
    refused = [limit for limit in limits if limit["blocked_by"]]
    blocked_at = max((limit["blocked_at"] for limit in refused), default=None)
    # A refusal that still holds says more than a newer one that does not.
    refused.sort(key=lambda limit: (not limit["blocked_by"]["holds"], -limit["blocked_at"]))
    by = {"limit": refused[0]["limit"], **refused[0]["blocked_by"]} if refused else None
    reached = {limit["state"] for limit in limits}
    if blocked_at and reading.now - blocked_at < BLOCKED_NOW:
        reached.add("blocked")
    states = [state for state in _STATES if state in reached]
    row: Json = {
        "id": name,
        "scope": scope,
        "agents": [part.key[0] for part in parts],
        "state": states[0] if states else None,
        "blocked": sum(limit["blocked"] for limit in limits),
        "blocked_at": blocked_at,
        "blocked_by": by,
        "waiting": sum(limit["waiting"] for limit in limits),
        "last_call_at": max(part.last for part in parts),
        "cost": sum(part.cost for part in parts) / NANODOLLARS or None,
        "limits": limits,
        "refusals": last,
    }
    if row["waiting"]:
        states.append("waiting")
    share, numbers = (_share(limits[0]), limits[0]["numbers"]) if limits else (-1.0, ())
    urgency = _STATES.index(row["state"]) - bool(by and by["holds"]) if row["state"] else 9
    keys = (
        (urgency, -share, -row["last_call_at"], name),
        (name.casefold(), scope),
        -share,
        (numbers and numbers[0]["resets_at"]) or float("inf"),
        -row["blocked"],
        -(blocked_at or 0),
        -(row["cost"] or 0),
    )
    words = (name, scope, *row["agents"], *(limit["limit"] for limit in limits))
    kind, text = KINDS[scope != THREAD], "\n".join(words).casefold()
    return _Row(kind, _as_json(row), text, tuple(states), keys)


def _limit_of(subject: Subject, limit: str, use: Use, reading: Reading) -> Json:
    agent, scope, name = subject.key
    numbers, state = rate(use, reading.now, is_thread=scope == THREAD)
    return {
        "limit": limit_label(limit),
        "agent": agent,
        "unit": UNIT_LABELS[use.unit],
        "state": state,
        "numbers": [
            {
                "scope": limit_label(scope),
                "used": in_base_unit(used, use.unit),
                "allowed": in_base_unit(allowed, use.unit),
                "resets_at": ends,
            }
            for used, allowed, ends, scope in numbers
        ],
        "blocked": sum(use.blocked.values()),
        "blocked_at": use.refused,
        "blocked_by": use.refusal and {**use.refusal, "holds": still_refuses(use, reading.now)},
        "waiting": reading.waiting[agent, name, limit] if scope == THREAD else 0,
        "checked_at": use.decided or None,
    }


def _share(limit: Json) -> float:
    """Return the used share of a limit's tightest number; -1 without one."""
    if not limit["numbers"]:
        return -1.0
    used, allowed = limit["numbers"][0]["used"], limit["numbers"][0]["allowed"]
    # Round, so that the same share is equal in dollars, whose amounts are floats, and in calls.
    return round(float(used / allowed), 12)


def log_unreadable(error: Exception) -> None:
    """Log an error where no telemetry counts errors yet."""
    logger.error("the metrics of other workers cannot be read", exc_info=error)


def _figures(reading: Reading, dashboards_url: str | None) -> Json:
    """Return what the page shows of all rows."""
    totals: Json = {
        state: {kind: len(reading.states[kind][state]) for kind in KINDS} for state in _STATES[:-1]
    }
    totals["waiting"], totals["frozen"] = reading.waiting.total(), len(reading.frozen)
    totals["calls"] = {name: reading.periods(name) for name in CALLS}
    hours = [max(0, cost) / NANODOLLARS for cost in reading.periods("nanodollars")]
    is_paid = bool(reading.totals["nanodollars"])
    totals["cost"] = {"dollars": sum(hours), "hours": hours} if is_paid else None
    return {
        "schema": SCHEMA,
        "version": __version__,
        "at": reading.now,
        "started_at": reading.started if reading.processes else None,
        "processes": reading.processes,
        "blocked_now_seconds": BLOCKED_NOW,
        "dashboards_url": dashboards_url,
        "totals": totals,
        "unnamed": sorted(reading.unnamed),
    }


_PAGE = Path(__file__).with_name("page.html").read_bytes()


def _hash_of(tag: str) -> str:
    """Return the hash of the page's only script or style, for its Content-Security-Policy."""
    [text] = re.findall(f"<{tag}>(.*?)</{tag}>".encode(), _PAGE, re.DOTALL)
    return f"'sha256-{b64encode(hashlib.sha256(text).digest()).decode()}'"


_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept, Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


class Page:
    """The page and its data, for a server of any kind; an instance is an ASGI app."""

    def __init__(self, registry: CollectorRegistry, *, dashboards_url: str | None = None) -> None:
        validate_type("registry", registry, CollectorRegistry, "a CollectorRegistry")
        validate_type("dashboards_url", dashboards_url, str | None, "an address or None")
        if dashboards_url is not None and not dashboards_url.startswith(("https://", "http://")):
            must = "must begin with https:// or http://"
            raise ValueError(f"dashboards_url {must}, not {dashboards_url!r}")
        self._registry = registry
        self._dashboards_url = dashboards_url
        # In a process that checks no calls, this table reads what the workers write.
        self._others = UsageReader(shared_directory(), log_unreadable)
        self._lock = fork_safe_lock()
        self._until = 0.0

    def answer(self, name: str, query: str, encoding: str) -> Response:
        """Return the page for the name `""`, and its data for `"quota.json"`."""
        status, body, kind = "200 OK", _PAGE, "text/html; charset=utf-8"
        if name:
            values = dict(parse_qsl(query[:2_000]))
            valid = {key for key in _PARAMETERS if _PARAMETERS[key].fullmatch(values.get(key, ""))}
            wrong = [key for key in values if key not in valid]
            if wrong:
                status, kind = "400 Bad Request", "text/plain"
                patterns = ((key, _PARAMETERS[key].pattern) for key in _PARAMETERS)
                possible = "; ".join(map("=".join, patterns))
                body = f"{wrong[0]} is wrong. Possible are: {possible}\n".encode()
            else:
                body, kind = self._read(values).encode("ascii"), "application/json"
        headers = {**_HEADERS, "Content-Type": kind}
        if accepts_gzip(encoding):
            headers["Content-Encoding"], body = "gzip", gzip.compress(body, 1)
        return status, {**headers, "Content-Length": str(len(body))}, body

    def _read(self, values: dict[str, str]) -> str:
        """Return the figures, and the rows that a reader asks for, as JSON."""
        with self._lock:
            # All readers share the figures. However many subjects there are, they take at most a
            # tenth of a core.
            began = time.monotonic()
            if began >= self._until:
                self._reading = reading = (usage_of(self._registry) or self._others).read()
                # What is exported, and what else readers have searched for.
                self._rows = {"": [*in_slices(_rows_of(reading, reading.rows))]}
                self._figures = _figures(reading, self._dashboards_url)
                took = time.monotonic() - began
                self._until = began + took + min(max(1.0, 9 * took), _MAX_AGE)
            rows, reading = self._rows, self._reading
            figures = {**self._figures, "now": time.time()}
        find, state = values.get("find", "").casefold(), values.get("state")
        sort, count = values.get("sort", "state"), int(values.get("rows", 50))
        index = _SORTS.index(sort.removeprefix("-"))
        parts = [_as_json(figures)[:-1]]
        if find not in rows:
            rows[find] = [*_rows_of(reading, reading.search(find))]
        matching = [
            row
            for row in (*rows[""], *(rows[find] if find else ()))
            if find in row.text and (not state or state in row.states)
        ]
        matching.sort(key=lambda row: row.keys[index], reverse=sort.startswith("-"))
        for kind in KINDS:
            of_kind = [row.json for row in matching if row.kind == kind]
            part = {
                "exported": sum(row.kind == kind for row in rows[""]),
                "hidden": reading.hidden[kind],
                "found": len(of_kind),
            }
            shown = ",".join(of_kind[:count])
            parts.append(f'"{kind}":{_as_json(part)[:-1]},"rows":[{shown}]}}')
        return ",".join(parts) + "}"

    async def __call__(self, scope: MutableMapping[str, Any], _: object, send: Send) -> None:
        """Answer one request, off the event loop."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        name = scope["path"].rpartition("/")[2]
        encoding = dict(scope["headers"]).get(b"accept-encoding", b"").decode("latin-1")
        status, headers, body = "404 Not Found", _HEADERS, b""
        if scope["method"] in {"GET", "HEAD"} and name in {"", "quota.json"}:
            query = scope["query_string"].decode("latin-1")
            answer = await asyncio.to_thread(self.answer, name, query, encoding)
            status, headers, body = answer
        raw = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": int(status[:3]), "headers": raw})
        sent = b"" if scope["method"] == "HEAD" else body
        await send({"type": "http.response.body", "body": sent})


def accepts_gzip(header: str) -> bool:
    """Return whether an `Accept-Encoding` names gzip, and not with the weight 0."""
    codings = (coding.partition(";q=") for coding in header.lower().replace(" ", "").split(","))
    return any(name == "gzip" and (not q or q.strip("0.")) for name, _, q in codings)


# By Starlette's types, `mount` takes an app of its own types, so the arguments are open.
def quota_app(
    registry: CollectorRegistry = REGISTRY, *, dashboards_url: str | None = None
) -> Callable[..., Any]:
    """Return an ASGI app with the page of all conversations and their quotas, and its data.

    Mount it behind your application's own login; in FastAPI with
    `app.mount("/quota", quota_app())`, and open `/quota/`. It has no access control of its own:
    everybody who can reach it can read thread ids. It shows what `/metrics` exports, no more.

    Args:
        registry: The metrics.
        dashboards_url: Where your Grafana is, for a link on the page.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `dashboards_url` is no address of the web; in multi-process mode, if the
            directory does not exist.

    Examples:
        >>> from starlette.applications import Starlette
        >>> from langchain_quota import quota_app
        >>> app = Starlette()
        >>> app.mount("/quota", quota_app())
    """
    return Page(registry, dashboards_url=dashboards_url)
