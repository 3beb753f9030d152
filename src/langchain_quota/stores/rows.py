"""The rows of a store in a database. A `MemoryStore` computes how they change."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.stores.counts import Count, ExpiringDict
from langchain_quota.stores.grants import Grant
from langchain_quota.stores.keys import FREEZES, keys_of
from langchain_quota.stores.memory import REFUSED, Attempt, MemoryStore
from langchain_quota.stores.server import Answers, Argument

Name = tuple[str, str]
"""A kind of what is kept, and the name under which it is kept."""

COUNT, GRANTS, RESULT, ATTEMPT = "count", "grants", "result", "attempt"
CORRECTED, SETTLED = "corrected", "settled"
_CONSTANTS = {"Infinity": math.inf}  # and no NaN, which no limit refuses


class Rows(MemoryStore):
    """A `MemoryStore` of the rows that one operation names, at the time of their server.

    So what an operation does is written once, and every store with rows agrees with it.
    """

    def __init__(self, idle: int, time: float, read: Mapping[Name, str]) -> None:
        super().__init__(max_keys=sys.maxsize, idle_ttl=timedelta(seconds=idle), clock=lambda: time)
        self._tables: dict[str, ExpiringDict[Any]] = {
            COUNT: self._counts,
            GRANTS: self._grants,
            RESULT: self._results,
            ATTEMPT: self._attempts,
            CORRECTED: self._corrected,
            SETTLED: self._settled,
        }
        self._read = dict(read)
        # What cannot be read, whatever others have written there.
        self._odd: set[Name] = set()
        for (kind, name), text in read.items():
            try:
                expires, value = json.loads(text, parse_constant=_CONSTANTS.__getitem__)
                self._tables[kind].all[name] = _read(kind, name, value), +expires
            except (TypeError, ValueError, LookupError):
                self._odd.add((kind, name))
                del self._read[kind, name]

    def answer(self, request: AcquireRequest) -> AcquireResult | Exception:
        """As `acquire`, if all that it needs can be read; what fails is an answer, too."""
        try:
            if self._odd:
                self._check_readable(names_of(request) | self.undone([request]))
            return self.acquire(request)
        except Exception as error:  # noqa: BLE001 - it is raised for the caller of this request
            return error

    def operate(self, op: str, keys: Sequence[str], argument: Argument) -> Answers:
        """Run an operation and return its result; see `ServerStore`."""
        odd = [name for kind, name in self._odd if kind == COUNT]
        self._check_readable({name for name in self._odd if name[0] != COUNT})
        if op == "peek":
            uses = {**dict(zip(keys, self.peek(keys), strict=True)), **dict.fromkeys(odd)}
            return [(key, use) for key, use in uses.items() if use or key in odd]
        if isinstance(argument, Grant):
            return [run_sync(self._grant("", argument))]
        if isinstance(argument, str):
            return [(run_sync(self._revoke("", keys[0], argument)), False)]
        if isinstance(argument, int):
            run_sync(self._delay("", keys[0], argument))
            return []
        if op == "grants":
            return [(grant, False) for grant in self.grants()]
        self.reset(keys)
        return []

    def undone(self, requests: Sequence[AcquireRequest]) -> set[Name]:
        """Return what changes where corrections of the requests undo one of these attempts."""
        names: set[Name] = set()
        for correction in chain.from_iterable(request.corrections for request in requests):
            attempt, _ = self._attempts.all.get(correction.attempt_id or "", (REFUSED, 0))
            names.update(names_of_keys(key for key, *_ in attempt.charged))
            names.update({(RESULT, attempt.request)} if attempt.request else ())
        return names

    def changed(self) -> Iterator[tuple[Name, str | None, float]]:
        """Return each changed row, and when it expires; `None` for one that is gone."""
        for kind, table in self._tables.items():
            for name, (value, expires) in table.all.items():
                text = json.dumps([expires, value], default=_plain)
                if text != self._read.get((kind, name)):
                    yield (kind, name), text, expires
        for kind, name in self._read:
            if name not in self._tables[kind].all:
                yield (kind, name), None, 0

    def _check_readable(self, names: set[Name]) -> None:
        for kind, name in self._odd & names:
            raise QuotaStoreError(f"no {kind} is kept under {name!r}")


def names_of(request: AcquireRequest) -> set[Name]:
    """Return the names of what a request reads or may change."""
    names = names_of_keys(keys_of(request))
    names |= {(RESULT, request.idempotency_key), (ATTEMPT, request.attempt_id)}
    for correction in request.corrections:
        names |= {
            (SETTLED if correction.settles else CORRECTED, correction.id),
            (RESULT, correction.idempotency_key),
            (ATTEMPT, correction.attempt_id or ""),
        }
    names = {name for name in names if name[1] or name[0] in (COUNT, GRANTS)}
    return names | {(GRANTS, FREEZES)}


def names_of_keys(keys: Iterable[str]) -> set[Name]:
    """Return the names of a count and its grants for each key."""
    return {(kind, key) for key in keys for kind in (COUNT, GRANTS)}


def _read(kind: str, name: str, value: Any) -> Any:
    if kind == COUNT:
        return _count(**value)
    if kind == GRANTS:
        return {
            grant["id"]: (_grant(name, grant), bool(is_new)) for grant, is_new in value.values()
        }
    if kind == RESULT:
        lists = {field: tuple(value[field]) for field in ("refused", "admitted", "frozen")}
        return AcquireResult(**{**value, **lists})
    if kind == ATTEMPT:
        request, charged = value
        charges = [(str(key), int(amount), bool(is_held)) for key, amount, is_held in charged]
        return Attempt(str(request), charges)
    return value


def _count(**value: Any) -> Count:
    """Return the count of a row, which others can write, too; `ValueError` if it is none."""
    count = Count(**value)
    optional = (count.limit or 0, count.ends or 0, count.rolled_over or 0)
    whole = [count.used, *optional, *chain(*(count.holds or {}).values())]
    if {*map(type, whole)} != {int} or min(count.used, count.next_end) < 0:
        raise ValueError("it is no count")
    return count


def _plain(value: Any) -> object:
    """Return a dataclass or a time as JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat()
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _grant(key: str, value: Mapping[str, Any]) -> Grant:
    times = {field: datetime.fromisoformat(value[field]) for field in ("given_at", "until")}
    return Grant(**{**value, **times, "key": key})
