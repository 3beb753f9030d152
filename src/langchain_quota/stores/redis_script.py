"""The calls of the scripts in Redis, the names of keys there, and the scripts' answers."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha1, sha256
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import (
    COMPENSATED,
    GRACE,
    REMEMBERED,
    QuotaUsage,
    window_end,
)
from langchain_quota.stores.common import check_fits, idle_time, metadata
from langchain_quota.stores.grants import Grant, in_utc

MAX_COUNT = 2**53 - 1
"""The largest count, start and amount: scripts compute in floating point."""

_NONE = -1
_ODD = -2


class Script(NamedTuple):
    """A script, and the name by which a server knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> "Script":
        """The script of a text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _script(name: str) -> Script:
    folder = files("langchain_quota.stores")
    parts = [(folder / each).read_text("utf-8") for each in ("common.lua", name)]
    times = f"local REMEMBERED, COMPENSATED, GRACE = {REMEMBERED}, {COMPENSATED}, {GRACE}"
    return Script.of("\n".join([times, *parts]))


SCRIPTS = {name: _script(f"{name}.lua") for name in ("acquire", "operations")}


class Names(NamedTuple):
    """The names of keys in Redis."""

    prefix: str
    """What all names begin with: the hash tag, by which a cluster finds the node."""
    is_in_keys: bool = False
    """Whether keys begin with it, too."""

    def name(self, kind: str, key: str) -> bytes:
        """The name of what is kept for a key: its "count" or its "grants"."""
        rest = key.removeprefix(f"{self.prefix}/") if self.is_in_keys else key
        return f"{{{self.prefix}}}:{kind}:{rest}".encode(errors="surrogatepass")

    def key(self, kind: str, name: bytes | str) -> str | None:
        """The key of a name in Redis, which the client may have decoded; `None` for another's."""
        try:
            text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
        except UnicodeDecodeError:
            return None
        return text.removeprefix(f"{{{self.prefix}}}:{kind}:")

    def pattern(self, kind: str, keys: str) -> bytes:
        """The pattern for Redis that finds all names whose keys match a glob, and maybe others."""
        # Redis reads character classes and escapes differently.
        simple, *others = re.split(r"[\[\\]", keys, maxsplit=1)
        return self.name(kind, f"{simple}{'*' if others else ''}")

    def marker(self, kind: str, name: str) -> bytes:
        """The name of what remembers something by a name of any length."""
        return f"{{{self.prefix}}}:{kind}:{_digest(name)}".encode()


class ScriptCall:
    """One call of a script: what is asked, and the keys that it may use."""

    def __init__(self, script: str, names: Names, idle: int) -> None:
        self.script = script
        self._names = names
        self._idle = idle
        self._keys: dict[bytes, int] = {}
        self._attempts = 0
        self._asked: dict[str, Any] = {}

    @classmethod
    def of(
        cls, op: str, names: Names, keys: Iterable[str], idle: int = 0, **asked: Any
    ) -> "ScriptCall":
        """The call for another operation than acquiring."""
        call = cls("operations", names, idle)
        counts = [call._count(key) for key in dict.fromkeys(keys)]
        call._asked = {"op": op, "counts": counts, **asked}
        return call

    @classmethod
    def acquire(cls, names: Names, request: AcquireRequest, idle: int) -> "ScriptCall":
        """The call that admits a batch."""
        call = cls("acquire", names, idle)
        beside, counters, hold = metadata(request), [], ""
        for each in request.counters.values():
            if each.key is None:
                counters.append((0, 0, _NONE, 0, _exact(each.used), _NONE, _NONE))
                continue
            kept, lease = beside[each.key], _NONE
            if each.lease is not None:
                lease, hold = _exact(each.lease), f"held:{short(request.idempotency_key)}"
            start, limit = _exact(each.used), _clamped(kept.limit)
            counters.append((*call._count(each.key, _clamped(kept.ends)), start, limit, lease))
        number = {name: number for number, name in enumerate(request.counters, 1)}
        number_of_limit: dict[str, int] = {}
        thresholds: dict[Threshold, int] = {}
        calls = []
        for amounts, over in request.hits:
            hits = [part for name, n in amounts.items() for part in (number[name], _exact(n))]
            calls.append((hits, [thresholds.setdefault(t, len(thresholds) + 1) for t in over]))
        call._asked = {
            "attempt": call._marker("attempt", request.attempt_id),
            "result": call._marker("result", request.idempotency_key),
            "hold": hold,
            "counters": counters,
            "thresholds": [
                (
                    number_of_limit.setdefault(each.limit, len(number_of_limit)),
                    number[each.counter],
                    # It may be below 0, and grants may raise it.
                    max(-MAX_COUNT, min(each.most, MAX_COUNT)),
                    bool(each.enforced),
                    f"{_quoted(each.limit)} {_quoted(each.scope)}",
                )
                for each in thresholds
            ],
            "calls": calls,
            "stops": [(number_of_limit.get(name, _NONE), n) for name, n in request.stops.items()],
            "compensations": [*map(call._compensation, request.compensations)],
        }
        return call

    def arguments(self) -> list[int | bytes | str]:
        """The arguments of `EVALSHA` after the script: number of keys, keys, what is asked."""
        return [len(self._keys), *self._keys, json.dumps(self._asked)]

    def again(self, reply: object) -> bool:
        """Whether the script must be called again, with further keys that it needs."""
        if not isinstance(reply, list) or not reply or _text(reply[0]) != "again":
            return False
        # An attempt's charges are found only once.
        self._attempts -= 1
        if self._attempts < 0:
            raise ValueError("it asks for keys again and again")
        for name in reply[1:]:
            self._index(name if isinstance(name, bytes) else _text(name).encode())
        return True

    def _compensation(self, compensation: Compensation) -> dict[str, Any]:
        self._attempts += compensation.attempt_id is not None
        starts, limits, settles = compensation.starts, compensation.limits, compensation.settles
        kind = "settled" if settles else "compensated"
        return {
            "marker": self._marker(kind, compensation.id),
            "attempt": self._marker("attempt", compensation.attempt_id),
            "result": self._marker("result", compensation.idempotency_key),
            "amounts": [
                (
                    *self._count(key),
                    _exact(starts.get(key, 0)),
                    _exact(amount),
                    _clamped(limits.get(key)),
                )
                for key, amount in compensation.amounts.items()
            ],
            **({"hold": f"held:{short(settles)}"} if settles else {}),
        }

    def _count(self, key: str, ends: int | None = None) -> tuple[int, int, int, int]:
        """What a script is told of a count; where it ends, if not where its text says."""
        count, grants, window_ends, idle = _place(self._names, key, self._idle)
        ends = window_ends if ends is None else ends
        return self._index(count), self._index(grants), ends, idle

    def _marker(self, kind: str, name: str | None) -> int:
        return self._index(self._names.marker(kind, name)) if name else 0

    def _index(self, name: bytes) -> int:
        return self._keys.setdefault(name, len(self._keys) + 1)


@lru_cache(maxsize=4096)
def _place(names: Names, key: str, idle: int) -> tuple[bytes, bytes, int, int]:
    count, grants = (names.name(kind, key) for kind in ("count", "grants"))
    return count, grants, _clamped(window_end(key)), idle_time(key, idle)


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


def uses(keys: Iterable[str], reply: object) -> dict[str, QuotaUsage | None]:
    """The answer to a peek: the counts that there are; `None` for what is something else."""
    found: dict[str, QuotaUsage | None] = {}
    numbers = _numbers(_list(reply))
    for key, *kept, granted in zip(dict.fromkeys(keys), *[iter(numbers)] * 4, strict=True):
        used, limit, ends = (None if each == _NONE else each for each in kept)
        if used is not None:
            ends = window_end(key) if ends is None else ends
            found[key] = None if used == _ODD else QuotaUsage(key, used, limit, ends, granted)
    return found


def grants(keys: Iterable[str], reply: object) -> list[tuple[Grant, bool]]:
    """The answer about grants of keys, and whether each is new."""
    names, found = [*dict.fromkeys(keys)], []
    for index, amount, ends, text, is_new in zip(*[iter(_list(reply))] * 5, strict=True):
        _numbers([index, amount, ends])
        known = json.loads(_text(text))
        times = in_utc(known["at"]), in_utc(ends)
        about = known["reason"], known["by"]
        grant = Grant(names[index - 1], amount, known["id"], *times, *about)
        found.append((grant, _flag(is_new)))
    return found


def details(grant: Grant) -> dict[str, Any]:
    """What a script is told of a grant."""
    given_at = grant.given_at.timestamp()
    kept = {"id": grant.id, "at": given_at, "reason": grant.reason, "by": grant.by}
    amount, ends = _exact(grant.amount), _exact(grant.ends or 0)
    return {"name": short(grant.id), "amount": amount, "ends": ends, "details": json.dumps(kept)}


def _list(reply: object) -> list[Any]:
    if not isinstance(reply, list):
        raise ValueError(f"it is a {type(reply).__name__}, not a list")  # noqa: TRY004 - no caller's mistake
    return reply


def _text(word: object) -> str:
    if not isinstance(word, bytes | str):
        raise ValueError(f"a {type(word).__name__} stands where a word should")  # noqa: TRY004 - the same
    return word if isinstance(word, str) else word.decode()


def _numbers(numbers: list[Any]) -> list[int]:
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


def _digest(name: str) -> str:
    """A name for one that may be long, with any characters."""
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


def short(name: str) -> str:
    """The same for what is kept in a count: a hash is compact while no field has 64 characters."""
    return _digest(name)[:32]


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
