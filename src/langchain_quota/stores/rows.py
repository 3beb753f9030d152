"""The rows of a store in a database. A `MemoryStore` computes how they change."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.runtime.sync_async import run_sync
from langchain_quota.stores.counts import Count, Entry, ExpiringDict
from langchain_quota.stores.grants import Grant
from langchain_quota.stores.keys import FREEZES, keys_of
from langchain_quota.stores.memory import REFUSED, Attempt, MemoryStore
from langchain_quota.stores.server import Answers, Argument, unreadable

Name = tuple[str, str]
"""A kind of what is kept, and the name under which it is kept."""

COUNT, NOTES, RESULT, ATTEMPT = "count", "notes", "result", "attempt"
CORRECTED, SETTLED = "corrected", "settled"
OLD_GRANTS = "grants"
"""Where an older edition of this package kept grants and freezes, which stop no calls now."""
FROZEN = {(COUNT, FREEZES), (OLD_GRANTS, FREEZES)}
"""What requests only read: who freezes has the lock of the notes beside them."""
READING = ("peek", "grants")
"""Operations that change nothing."""
_CONSTANTS = {"Infinity": math.inf}  # and no NaN, which no limit refuses


class Rows(MemoryStore):
    """A `MemoryStore` of the rows that one operation names, at the time of their server.

    So what an operation does is written once, and every store with rows agrees with it.
    """

    def __init__(self, idle: int, time: float, read: Mapping[Name, Any]) -> None:
        super().__init__(max_keys=sys.maxsize, idle_ttl=timedelta(seconds=idle), clock=lambda: time)
        self._tables: dict[str, ExpiringDict[Any]] = {
            COUNT: self._counts,
            NOTES: self._notes,
            RESULT: self._results,
            ATTEMPT: self._attempts,
            CORRECTED: self._corrected,
            SETTLED: self._settled,
        }
        self.read = dict(read)
        """What was read, as the server keeps it; without what cannot be read."""
        self._odd: set[Name] = set()
        for (kind, name), row in read.items():
            try:
                expires, value = self.decode(kind, row)
                if kind == NOTES:
                    # A store whose prefix is a function has it in its keys.
                    value = {note: replace(grant, key=name) for note, grant in value.items()}
                self._tables[kind].all[name] = value, +expires
            except (TypeError, ValueError, LookupError):
                self._odd.add((kind, name))
                del self.read[kind, name]

    def decode(self, kind: str, row: Any) -> tuple[float, Any]:
        """Return when a row expires, and what it keeps; fail if others have written it."""
        expires, value = json.loads(row, parse_constant=_CONSTANTS.__getitem__)
        return expires, read_value(kind, value)

    def encode(self, kind: str, expires: float, value: Any) -> Any:  # noqa: ARG002 - of a subclass
        """Return a row as the server keeps it."""
        return json.dumps([expires, value], default=plain)

    def answer(self, request: AcquireRequest) -> AcquireResult | Exception:
        """As `acquire`, if all that it needs can be read; what fails is an answer, too."""
        try:
            if self._odd:
                self._check_readable(names_of(request) | self.undone([request]))
            return self.acquire(request)
        except Exception as error:  # noqa: BLE001 - it is raised for the caller of this request
            return error

    def roll_over(self, request: AcquireRequest) -> None:
        """Fix what rolls over to the counts of a request."""
        self._check_readable(self._odd)
        self._roll_over(request, self.clock())

    def operate(self, op: str, keys: Sequence[str], argument: Argument) -> Answers:
        """Run an operation and return its result; see `ServerStore`."""
        if op == "peek":
            odd = [name for _, name in self._odd]
            uses = {**dict(zip(keys, self.peek(keys), strict=True)), **dict.fromkeys(odd)}
            return [(key, use) for key, use in uses.items() if use or key in odd]
        if op == "reset":
            self.reset(keys)
            return []
        self._check_readable(self._odd)
        if isinstance(argument, Grant):
            return [run_sync(self._grant("", argument))]
        if isinstance(argument, str):
            return [(run_sync(self._revoke("", keys[0], argument)), False)]
        if isinstance(argument, int):
            run_sync(self._delay("", keys[0], argument))
            return []
        return [(grant, False) for grant in self.grants()]

    def undone(self, requests: Sequence[AcquireRequest]) -> set[Name]:
        """Return what changes where corrections of the requests undo one of these attempts."""
        names: set[Name] = set()
        for correction in chain.from_iterable(request.corrections for request in requests):
            attempt, _ = self._attempts.all.get(correction.attempt_id or "", (REFUSED, 0))
            names.update(names_of_keys(key for key, *_ in attempt.charged))
            names.update({(RESULT, attempt.request)} if attempt.request else ())
        return names

    def changed(self) -> Iterator[tuple[Name, Any, float]]:
        """Return each changed row, and when it expires; `None` for one that is gone."""
        for kind, table in self._tables.items():
            for name, (value, expires) in table.all.items():
                row = self.encode(kind, expires, value)
                if row != self.read.get((kind, name)):
                    yield (kind, name), row, expires
        for kind, name in self.read:
            if name not in self._tables[kind].all:
                yield (kind, name), None, 0

    def _check_readable(self, names: set[Name]) -> None:
        for kind, name in self._odd & names:
            raise unreadable(kind, name)


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
    return {name for name in names if name[1] or name[0] == COUNT} | FROZEN


def names_of_keys(keys: Iterable[str]) -> set[Name]:
    """Return the names of the counts of keys."""
    return {(COUNT, key) for key in keys}


def names_of_operation(op: str, keys: Sequence[str]) -> set[Name]:
    """Return the names of what another operation reads or may change."""
    kinds = (NOTES, OLD_GRANTS) if op in ("grant", "revoke", "grants") else ()
    notes = {(kind, key) for key in keys for kind in kinds}
    return notes if op == "grants" else notes | names_of_keys(keys)


def read_value(kind: str, value: Any) -> Any:
    """Return what a row keeps, from its JSON."""
    if kind == COUNT:
        return _count(**value)
    if kind == NOTES:
        return {name: _grant(**note) for name, note in value.items()}
    if kind == RESULT:
        lists = {field: tuple(value[field]) for field in ("refused", "admitted", "frozen")}
        return AcquireResult(**{**value, **lists})
    if kind == ATTEMPT:
        request, charged = value
        charges = [(str(key), int(amount), bool(is_held)) for key, amount, is_held in charged]
        return Attempt(str(request), charges)
    return value


def check_count(count: Count) -> Count:
    """Return a count that others may have written; `ValueError` if it is none."""
    optional = (count.used or 0, count.limit or 0, count.ends or 0, count.changed_at or 0)
    whole = [*optional, count.raised, count.fresh, count.checked, *chain(*count.entries.values())]
    if {*map(type, whole)} != {int} or min(count.used or 0, count.next_end) < 0:
        raise ValueError("it is no count")
    return count


def _count(*, entries: Mapping[str, Sequence[int]], **value: Any) -> Count:
    return check_count(Count(**value, entries={n: Entry(*each) for n, each in entries.items()}))


def plain(value: Any) -> object:
    """Return a dataclass or a time as JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat()
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _grant(**value: Any) -> Grant:
    times = {field: datetime.fromisoformat(value[field]) for field in ("given_at", "until")}
    return Grant(**{**value, **times})
