"""What a store's server is told of a request, as JSON, and how its answers are read.

The scripts say what each part is: `acquire.lua` and `operations.lua`. Numbers are whole, and -1
stands for none.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from langchain_quota.admission import AcquireRequest, AcquireResult, Compensation, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaUsage, window_end
from langchain_quota.stores.common import check_fits, idle_time, metadata
from langchain_quota.stores.grants import Grant, in_utc
from langchain_quota.stores.keys import spacing_of, unit_in

MAX_COUNT = 2**53 - 1
"""The largest count, start and amount: scripts compute in floating point."""

Place = Callable[[str, str], int | str]
"""How a script finds what is kept of a kind under a name: in Redis by a number in `KEYS`."""

T = TypeVar("T")
Asked = dict[str, Any]
Ask = Callable[[Place], Asked]

_NONE = -1
_ODD = -2


def acquire(request: AcquireRequest, idle: int, place: Place) -> Asked:
    """What is asked to admit a batch."""
    beside, hold = metadata(request), ""
    counters: list[tuple[int | str, ...]] = []
    for each in request.counters.values():
        if each.key is None:
            counters.append((0, 0, _NONE, 0, _exact(each.used), _NONE, _NONE, False))
            continue
        kept, lease = beside[each.key], _NONE
        if each.lease is not None:
            lease, hold = _exact(each.lease), _hold(request.idempotency_key)
        start, limit = _exact(each.used * unit_in(each.key)), _clamped(kept.limit)
        count = _count(each.key, idle, place, _clamped(kept.ends))
        counters.append((*count, start, limit, lease, bool(spacing_of(each.key))))
    units = {name: unit_in(each.key) for name, each in request.counters.items()}
    number = {name: number for number, name in enumerate(request.counters, 1)}
    limits: dict[str, int] = {}
    thresholds: dict[Threshold, int] = {}
    calls = []
    for amounts, over in request.hits:
        added = [(number[name], _exact(n * units[name])) for name, n in amounts.items()]
        hits = [part for each in added for part in each]
        calls.append((hits, [thresholds.setdefault(t, len(thresholds) + 1) for t in over]))
    return {
        "attempt": _marker("attempt", request.attempt_id, place),
        "result": _marker("result", request.idempotency_key, place),
        "hold": hold,
        "counters": counters,
        "thresholds": [
            (
                limits.setdefault(each.limit, len(limits)),
                number[each.counter],
                # It may be below 0, and grants may raise it.
                max(-MAX_COUNT, min(each.most * units[each.counter], MAX_COUNT)),
                bool(each.enforced),
                f"{_quoted(each.limit)} {_quoted(each.scope)}",
            )
            for each in thresholds
        ],
        "calls": calls,
        "stops": [(limits.get(name, _NONE), after) for name, after in request.stops.items()],
        "compensations": [_compensation(each, idle, place) for each in request.compensations],
    }


def operation(op: str, keys: Iterable[str], more: Asked, idle: int, place: Place) -> Asked:
    """What is asked of counts, other than to admit a batch."""
    counts = [(*_count(key, idle, place), bool(spacing_of(key))) for key in dict.fromkeys(keys)]
    return {"op": op, "counts": counts, **more}


def of_grant(grant: Grant) -> Asked:
    """What is asked to keep a grant."""
    given_at = grant.given_at.timestamp()
    kept = {"id": grant.id, "at": given_at, "reason": grant.reason, "by": grant.by}
    amount, ends = _exact(grant.amount), _exact(grant.ends or 0)
    return {"name": short(grant.id), "amount": amount, "ends": ends, "details": json.dumps(kept)}


def _compensation(compensation: Compensation, idle: int, place: Place) -> Asked:
    starts, limits, settles = compensation.starts, compensation.limits, compensation.settles
    asked = {
        "marker": _marker("settled" if settles else "compensated", compensation.id, place),
        "attempt": _marker("attempt", compensation.attempt_id, place),
        "result": _marker("result", compensation.idempotency_key, place),
        "amounts": [
            (
                *_count(key, idle, place),
                _exact(starts.get(key, 0) * unit_in(key)),
                _exact(amount * unit_in(key)),
                _clamped(limits.get(key)),
                bool(spacing_of(key)),
            )
            for key, amount in compensation.amounts.items()
        ],
    }
    return {**asked, "hold": _hold(settles)} if settles else asked


def _count(
    key: str, idle: int, place: Place, ends: int | None = None
) -> tuple[int | str, int | str, int, int]:
    """What a script is told of a count; where it ends, if not where its text says."""
    window_ends, seconds = _times(key, idle)
    ends = window_ends if ends is None else ends
    return place("count", key), place("grants", key), ends, seconds


@lru_cache(maxsize=4096)
def _times(key: str, idle: int) -> tuple[int, int]:
    return _clamped(window_end(key)), idle_time(key, idle)


def _marker(kind: str, name: str | None, place: Place) -> int | str:
    """Where something is remembered by a name of any length."""
    return place(kind, _digest(name)) if name else 0


def _hold(request: str) -> str:
    return f"held:{short(request)}"


def result(request: AcquireRequest, reply: object) -> AcquireResult:
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
    found = dict(zip(request.counters, used, strict=True))
    spacing = {name: spacing_of(each.key) for name, each in request.counters.items()}
    return AcquireResult(
        {name: -(-amount // (spacing[name] or 1)) for name, amount in found.items()},
        tuple(refused),
        tuple(admitted),
        stopped=_flag(is_stopped),
        replayed=replayed,
        granted=_amounts(request.counters, granted),
        newly_granted=_amounts(request.counters, newly),
        empty_in={name: amount for name, amount in found.items() if spacing[name]},
    )


def uses(keys: Iterable[str], reply: object) -> list[tuple[str, QuotaUsage | None]]:
    """The counts that there are under keys; `None` for what is something else."""
    found: list[tuple[str, QuotaUsage | None]] = []
    numbers = [_of(int, each) for each in _of(list, reply)]
    for key, *kept, granted in zip(dict.fromkeys(keys), *[iter(numbers)] * 4, strict=True):
        used, limit, ends = (None if each == _NONE else each for each in kept)
        if used is not None:
            ends = window_end(key) if ends is None else ends
            calls = -(-used // unit_in(key))
            usage = None if used == _ODD else QuotaUsage(key, calls, limit, ends, granted)
            found.append((key, usage))
    return found


def grants(keys: Iterable[str], reply: object) -> list[tuple[Grant, bool]]:
    """The grants of keys, and whether each is new."""
    names, found = [*dict.fromkeys(keys)], []
    for index, amount, ends, text, is_new in zip(*[iter(_of(list, reply))] * 5, strict=True):
        known = json.loads(_text(text))
        grant = Grant(
            names[_of(int, index) - 1],
            _of(int, amount),
            known["id"],
            in_utc(known["at"]),
            in_utc(_of(int, ends)),
            known["reason"],
            known["by"],
        )
        found.append((grant, _flag(is_new)))
    return found


def nothing(_: Iterable[str], reply: object) -> list[object]:
    """The answer where there is none."""
    if reply != []:
        raise ValueError("it is not empty")
    return []


def _of(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} should")
    return value


def _text(word: object) -> str:
    return _of(bytes, word).decode() if isinstance(word, bytes) else _of(str, word)


def _counts(text: str) -> list[int]:
    if not text.replace(" ", "0").isdecimal() and text:
        raise ValueError("there is something else than counts in it")
    return [*map(int, text.split(" "))] if text else []


def _amounts(counters: Mapping[str, object], text: str) -> dict[str, int]:
    """The amount of each counter, by name; without zeros."""
    named = zip(counters, _counts(text), strict=bool(text))
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
