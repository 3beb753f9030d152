"""The requests to the script in Redis, the names of keys there, and the script's answers."""

import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha1, sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import (
    COMPENSATED,
    GRACE,
    REMEMBERED,
    QuotaUsage,
    check_fits,
    idle_time,
    metadata,
    window_end,
)
from langchain_quota.stores.grants import Grant, details, read_grant

_PARTS = [
    (files("langchain_quota.stores") / name).read_text("utf-8")
    for name in ("acquire.lua", "operations.lua")
]
_TIMES = f"local REMEMBERED, COMPENSATED, GRACE = {REMEMBERED}, {COMPENSATED}, {GRACE}"
SCRIPT = "\n".join([_TIMES, *_PARTS])
SHA = sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()

MAX_COUNT = 2**53 - 1
"""The largest count, start and amount: scripts compute in floating point."""

_NONE = -1
_ODD = -2


@dataclass(frozen=True, slots=True)
class Names:
    """The names of keys in Redis."""

    prefix: str
    """What all names begin with: the hash tag, by which a cluster finds the node."""
    is_in_keys: bool = False
    """Whether keys begin with it, too."""

    def count(self, key: str) -> bytes:
        """The name of a count in Redis."""
        rest = key.removeprefix(f"{self.prefix}/") if self.is_in_keys else key
        return f"{{{self.prefix}}}:count:{rest}".encode(errors="surrogatepass")

    def key(self, name: bytes | str) -> str:
        """The key of a count, by its name in Redis; the client may have decoded the name."""
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
        before, found, key = text.partition(f"{{{self.prefix}}}:count:")
        if before or not found:
            raise ValueError(f"not the name of a count: {text!r}")
        return key

    def pattern(self, keys: str) -> bytes:
        """The pattern for Redis that finds all counts whose keys match a glob, and maybe others."""
        # Redis reads character classes and escapes differently.
        simple, *others = re.split(r"[\[\\]", keys, maxsplit=1)
        found = f"{{{self.prefix}}}:count:{simple}{'*' if others else ''}"
        return found.encode(errors="surrogatepass")

    def marker(self, kind: str, name: str) -> bytes:
        """The key in Redis that remembers something by a name of any length."""
        return f"{{{self.prefix}}}:{kind}:{_digest(name)}".encode()


class ScriptCall:
    """One call of the script: its operation, its arguments, and the keys that it may use."""

    def __init__(self, names: Names, op: str, idle: int) -> None:
        self._names = names
        self._idle = idle
        self._keys: dict[bytes, int] = {}
        self._attempts = 0
        self._op = op
        self._values: dict[str, Any] = {}
        self._more: tuple[bytes | str, ...] = ()

    @classmethod
    def reading(cls, op: str, names: Names, keys: Iterable[str]) -> "ScriptCall":
        """The call that reads what is kept under keys: "peek" or "grants"."""
        call = cls(names, op, 0)
        for key in keys:
            call._index(names.count(key))
        return call

    @classmethod
    def reset(cls, names: Names, keys: Sequence[str], idle: int) -> "ScriptCall":
        """The call that sets counts to 0."""
        call = cls(names, "reset", idle)
        call._values["counts"] = [
            call._count(key, window_end(key), 0) for key in dict.fromkeys(keys)
        ]
        return call

    @classmethod
    def grant(cls, names: Names, grant: Grant, idle: int) -> "ScriptCall":
        """The call that gives a grant."""
        call = cls(names, "grant", idle)
        call._values["grant"] = [
            *call._count(grant.key, window_end(grant.key), 0),
            _digest(grant.id)[:32],
            _exact(grant.amount),
            _exact(grant.ends or 0),
            details(grant),
        ]
        return call

    @classmethod
    def revoke(cls, names: Names, key: str, name: str) -> "ScriptCall":
        """The call that ends a grant."""
        call = cls(names, "revoke", 0)
        call._values["grant"] = [call._index(names.count(key)), _digest(name)[:32]]
        return call

    @classmethod
    def acquire(cls, names: Names, request: AcquireRequest, idle: int) -> "ScriptCall":
        """The call that admits a batch."""
        call = cls(names, "acquire", idle)
        beside = metadata(request)
        numbers: list[int] = []
        for counter in request.counters.values():
            limit, lease = _NONE, _NONE
            if counter.key is not None:
                kept = beside[counter.key]
                numbers += call._count(counter.key, kept.ends, counter.used)
                if counter.lease is not None:
                    lease = _exact(counter.lease)
                    call._values["hold"] = _hold(request.idempotency_key)
                limit = _clamped(kept.limit)
            else:
                numbers += (0, _NONE, 0, _exact(counter.used))
            numbers += (limit, lease)
        number = {name: number for number, name in enumerate(request.counters, 1)}
        number_of_limit: dict[str, int] = {}
        thresholds: dict[Threshold, int] = {}
        calls: list[int] = []
        for amounts, over in request.hits:
            calls += (len(amounts), len(over))
            for name, amount in amounts.items():
                calls += (number[name], _exact(amount))
            calls += [thresholds.setdefault(each, len(thresholds) + 1) for each in over]
        for over_limit, _, counted, most, enforced in thresholds:
            of_limit = number_of_limit.setdefault(over_limit, len(number_of_limit))
            # It may be below 0, and grants may raise it.
            bounded = max(-MAX_COUNT, min(most, MAX_COUNT))
            numbers += (of_limit, number[counted], bounded, enforced)
        for stopping, after in request.stops.items():
            calls += (number_of_limit.get(stopping, _NONE), after)
        if request.compensations:
            call._values["compensations"] = [*map(call._compensation, request.compensations)]
        numbers = [
            call._marker("attempt", request.attempt_id),
            call._marker("result", request.idempotency_key),
            *(len(request.counters), len(thresholds), len(request.hits), len(request.stops)),
            *numbers,
            *calls,
        ]
        names_of = [_quoted(name) for each in thresholds for name in each[:2]]
        call._more = (struct.pack(f">{len(numbers)}d", *numbers), " ".join([*names_of, ""]))
        return call

    def arguments(self) -> tuple[int, *tuple[bytes | str, ...]]:
        """The arguments of `EVALSHA` after the script: number of keys, keys, values."""
        values = json.dumps(self._values) if self._values else ""
        others: tuple[bytes | str, ...] = (*self._keys, self._op, values, *self._more)
        return (len(self._keys), *others)

    def again(self, reply: object) -> bool:
        """Whether the script must be called again, with further keys that it needs."""
        if not isinstance(reply, list) or not reply or _text(reply[0]) != "again":
            return False
        names = reply[1:]
        # An attempt's charges are found only once.
        self._attempts -= 1
        if self._attempts < 0:
            raise ValueError("it asks for keys again and again")
        for name in names:
            self._index(name if isinstance(name, bytes) else _text(name).encode())
        return True

    def _compensation(self, compensation: Compensation) -> dict[str, Any]:
        self._attempts += compensation.attempt_id is not None
        settling = {"hold": _hold(compensation.settles)} if compensation.settles else {}
        kind, starts = "settled" if settling else "compensated", compensation.starts
        return {
            "marker": self._index(self._names.marker(kind, compensation.id)),
            "attempt": self._marker("attempt", compensation.attempt_id),
            "result": self._marker("result", compensation.idempotency_key),
            "amounts": [
                [
                    *self._count(key, window_end(key), starts.get(key, 0)),
                    _exact(amount),
                    *([_clamped(compensation.limits[key])] if key in compensation.limits else ()),
                ]
                for key, amount in compensation.amounts.items()
            ],
            **settling,
        }

    def _count(self, key: str, ends: int | None, start: int) -> tuple[int, ...]:
        name, idle = _place(self._names, key, self._idle)
        return (self._index(name), _clamped(ends), idle, _exact(start))

    def _marker(self, kind: str, name: str | None) -> int:
        return self._index(self._names.marker(kind, name)) if name else 0

    def _index(self, name: bytes) -> int:
        return self._keys.setdefault(name, len(self._keys) + 1)


@lru_cache(maxsize=4096)
def _place(names: Names, key: str, idle: int) -> tuple[bytes, int]:
    """The name of a count in Redis, and for how many seconds it is kept without a charge."""
    return names.count(key), idle_time(key, idle)


def result(reply: object, request: AcquireRequest) -> AcquireResult:
    """The answer to a request."""
    text = _text(reply)
    if text == "refused":
        raise QuotaStoreError("the attempt was compensated before it arrived")
    head, counts, calls, *grants = text.split("\n")
    word, is_replayed, is_stopped = head.split(" ")
    used = _counts(counts)
    admitted, refused = [], []
    for call in calls.split(",") if calls else ():
        runs, *names = call.split(" ")
        texts = [unquote(name, errors="surrogatepass") for name in names]
        admitted.append(_flag(runs))
        refused.append(dict(zip(texts[::2], texts[1::2], strict=True)))
    replayed = _flag(is_replayed)
    if replayed:
        check_fits(len(used), len(admitted), request)
    if word != "acquired" or len(admitted) != len(request.hits):
        raise ValueError("it is no result of this request")
    granted, newly = [*grants, *[""] * (2 - len(grants))]
    return AcquireResult(
        dict(zip(request.counters, used, strict=True)),
        tuple(refused),
        tuple(admitted),
        stopped=_flag(is_stopped),
        replayed=replayed,
        granted=_amounts(request, granted),
        newly_granted=_amounts(request, newly),
    )


def uses(keys: Iterable[str], reply: object) -> tuple[dict[str, QuotaUsage], list[str]]:
    """The answer to a peek: the counts that there are, and the keys that hold something else."""
    names = [*dict.fromkeys(keys)]
    numbers = _numbers(reply)
    found, odd = {}, []
    for key, *kept, granted in zip(names, *[iter(numbers)] * 4, strict=True):
        used, limit, ends = (None if each == _NONE else each for each in kept)
        if used == _ODD:
            odd.append(key)
        elif used is not None:
            ends = window_end(key) if ends is None else ends
            found[key] = QuotaUsage(key, used, limit, ends, granted)
    return found, odd


def given(key: str, reply: object) -> tuple[Grant | None, bool]:
    """The answer to a grant: what is kept, and whether it is new."""
    parts = _list(reply)
    if not parts:
        return None, False
    is_new, *kept = parts
    return _grant(key, kept), _flag(is_new)


def revoked(key: str, reply: object) -> Grant | None:
    """The answer to a revocation."""
    kept = _list(reply)
    return _grant(key, kept) if kept else None


def listed(keys: Iterable[str], reply: object) -> list[Grant]:
    """The answer to a question for the grants of keys."""
    names = [*dict.fromkeys(keys)]
    parts = _list(reply)
    return [
        _grant(names[index - 1], kept)
        for index, *kept in zip(*[iter(parts)] * 4, strict=True)
        if 1 <= index <= len(names)
    ]


def _grant(key: str, kept: Sequence[Any]) -> Grant:
    amount, ends, text = kept
    _numbers([amount, ends])
    return read_grant(key, amount, ends, _text(text))


def done(reply: object) -> None:
    """The answer to a reset."""
    if _list(reply):
        raise ValueError("it is not empty")


def _list(reply: object) -> list[Any]:
    if not isinstance(reply, list):
        raise ValueError(f"it is a {type(reply).__name__}, not a list")  # noqa: TRY004 - no caller's mistake
    return reply


def _text(word: object) -> str:
    if not isinstance(word, bytes | str):
        raise ValueError(f"a {type(word).__name__} stands where a word should")  # noqa: TRY004 - the same
    return word if isinstance(word, str) else word.decode()


def _numbers(reply: object) -> list[int]:
    numbers = _list(reply)
    if not all(type(each) is int for each in numbers):
        raise ValueError("there is something else than a number in it")
    return numbers


def _counts(text: str) -> list[int]:
    if not text.replace(" ", "0").isdecimal() and text:
        raise ValueError("there is something else than counts in it")
    return [*map(int, text.split(" "))] if text else []


def _amounts(request: AcquireRequest, text: str) -> dict[str, int]:
    """The amount of each counter, by name; without zeros."""
    named = zip(request.counters, _counts(text), strict=bool(text))
    return {name: amount for name, amount in named if amount}


def _flag(number: object) -> bool:
    if number not in (0, 1, "0", "1"):
        raise ValueError(f"{number!r:.20} stands where 0 or 1 should")
    return number in (1, "1")


def _hold(name: str) -> str:
    """The field of a count that has what a request holds, by the request's name."""
    # A hash keeps its compact form while no field is longer than 64 characters.
    return f"held:{_digest(name)[:32]}"


def _digest(name: str) -> str:
    """A name for one that may be long, with any characters."""
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


def _exact(number: int) -> int:
    if abs(number) > MAX_COUNT:
        raise QuotaStoreError(f"Redis counts to {MAX_COUNT}, which {number} exceeds")
    return number


def _clamped(number: int | None) -> int:
    """A number within the script's bounds: no count is above them."""
    return _NONE if number is None else max(_NONE, min(number, MAX_COUNT))


@lru_cache(maxsize=1024)
def _quoted(name: str) -> str:
    """Encode a name of any characters, so that it has no spaces and no commas."""
    return quote(name, errors="surrogatepass")
