"""The rows of a store in a server, from which tables are made for one operation."""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from itertools import chain
from typing import Any

from langchain_quota.core.admission import AcquireRequest, AcquireResult
from langchain_quota.stores import QuotaUsage
from langchain_quota.stores.counts import Count, Entry
from langchain_quota.stores.grants import Grant
from langchain_quota.stores.keys import COUNT, FREEZES, NOTES, is_freezes, keys_of
from langchain_quota.stores.memory import ATTEMPT, CORRECTION, RESULT, SETTLEMENT, Attempt, Tables
from langchain_quota.stores.server import unreadable

Name = tuple[str, str]
"""A kind of what is kept, and the name under which it is kept."""

OLD_GRANTS = "grants"
"""Where an older edition of this package kept grants and freezes, which stop no calls now."""
FROZEN = {(COUNT, FREEZES), (OLD_GRANTS, FREEZES)}
"""What requests only read: who freezes has the lock of the notes beside them."""
_CONSTANTS = {"Infinity": math.inf}  # and no NaN, which no limit refuses


class Rows(Tables):
    """The tables of the rows that one operation needs, at the time of their server.

    An operation is run on what has been read, and again on more while it looks for more: so it is
    written once, every store with rows agrees with it, and nobody need say what it needs.
    """

    def __init__(self, idle: int, now: float = 0.0, read: Mapping[Name, Any] | None = None) -> None:
        super().__init__(sys.maxsize, idle)
        self.idle, self.now = idle, now
        self.names: set[Name] = set()
        """The names of what was looked for."""
        self.read: dict[Name, Any] = {}
        """What was read, as the server keeps it; without what cannot be read."""
        self.odd: set[Name] = set()
        for kind, table in self.by_kind.items():
            table.all = _Table(kind, self.names, self.odd)
        for (kind, name), row in (read or {}).items():
            try:
                expires, value = self.decode(kind, row)
                if kind == NOTES:
                    # A store whose prefix is a function has it in its keys.
                    value = {note: replace(grant, key=name) for note, grant in value.items()}
                self.by_kind[kind].all[name] = value, +expires
                self.read[kind, name] = row
            except (TypeError, ValueError, LookupError):
                self.odd.add((kind, name))

    def decode(self, kind: str, row: Any) -> tuple[float, Any]:
        """Return when a row expires, and what it keeps; fail if others have written it."""
        expires, value = json.loads(row, parse_constant=_CONSTANTS.__getitem__)
        return expires, read_value(kind, value)

    def encode(self, kind: str, expires: float, value: Any) -> Any:  # noqa: ARG002 - of a subclass
        """Return a row as the server keeps it."""
        kept = value._asdict() if isinstance(value, AcquireResult) else value
        return json.dumps([expires, kept], default=plain)

    def answer(self, request: AcquireRequest) -> AcquireResult | Exception:
        """As `acquire`, if all that it needs can be read; what fails is an answer, too."""
        try:
            if self.odd:
                # What cannot be read fails before anything is changed for the request.
                rows = {**self.read, **dict.fromkeys(self.odd)}
                type(self)(self.idle, self.now, rows).acquire(request)
            return self.acquire(request)
        except Exception as error:  # noqa: BLE001 - it is raised for the caller of this request
            return error

    def entries(self, keys: Iterable[str]) -> dict[str, QuotaUsage | None]:
        """Return what is counted under keys; `None` for what is no count."""
        odd = [key for key in keys if (COUNT, key) in self.odd]
        return {**super().entries(key for key in keys if key not in odd), **dict.fromkeys(odd)}

    def reset(self, keys: Sequence[str]) -> None:
        """Set counts to 0, and what is no count, too."""
        odd = self.odd.copy()
        self.odd.clear()
        super().reset(keys)
        self.odd.update(odd)

    def changed(self) -> Iterator[tuple[Name, Any, float]]:
        """Return each changed row, and when it expires; `None` for one that is gone."""
        for kind, table in self.by_kind.items():
            for name, (value, expires) in table.all.items():
                row = self.encode(kind, expires, value)
                if row != self.read.get((kind, name)):
                    yield (kind, name), row, expires
        for kind, name in self.read:
            if name not in self.by_kind[kind].all:
                yield (kind, name), None, 0


class _Table(dict[str, Any]):
    """Rows of a kind: says what was looked for, and fails for what others have written there."""

    def __init__(self, kind: str, names: set[Name], odd: set[Name]) -> None:
        super().__init__()
        # Not the rows themselves: without a cycle, they need no garbage collector.
        self._kind, self._names, self._odd = kind, names, odd

    def get(self, name: str, default: Any = None) -> Any:
        """Return a row that was read."""
        if name or self._kind == COUNT:
            kinds = (self._kind, OLD_GRANTS) if self._kind == NOTES or is_freezes(name) else ()
            for kind in kinds or (self._kind,):
                self._names.add((kind, name))
                if (kind, name) in self._odd:
                    raise unreadable(kind, name)
        return super().get(name, default)


def names_of(request: AcquireRequest) -> set[Name]:
    """Return the names of what a request looks for, mostly: what else it needs is read later."""
    names = {(RESULT, request.idempotency_key), (ATTEMPT, request.attempt_id)}
    for correction in request.corrections:
        names |= {
            (SETTLEMENT if correction.settles else CORRECTION, correction.id),
            (RESULT, correction.idempotency_key),
            (ATTEMPT, correction.attempt_id or ""),
        }
    names |= {(COUNT, key) for key in keys_of(request)}
    return {name for name in names if name[1]} | FROZEN


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


def plain(value: Any) -> Any:
    """Return a dataclass, a mapping or a time as JSON has it."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {**value}
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _grant(**value: Any) -> Grant:
    times = {field: datetime.fromisoformat(value[field]) for field in ("given_at", "until")}
    return Grant(**{**value, **times})
