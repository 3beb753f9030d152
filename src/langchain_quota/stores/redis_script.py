"""The scripts in Redis: the names of their keys, requests to them as JSON, and their replies.

The scripts say what each part is: `acquire.lua` and `operations.lua`. Numbers are whole, and -1
stands for none.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha1, sha256
from importlib.resources import files
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Correction, Threshold
from langchain_quota.runtime.store_errors import QuotaStoreError
from langchain_quota.stores import CORRECTED, GRACE, REMEMBERED, QuotaUsage
from langchain_quota.stores.counts import check_fits, demands_in_drain_time, smallest_limits
from langchain_quota.stores.grants import Grant, in_utc
from langchain_quota.stores.keys import (
    FREEZES,
    drain_time,
    drained_amount,
    idle_time,
    read_emission_interval,
    window_end,
)
from langchain_quota.stores.server import Argument

MAX_COUNT = 2**53 - 1
"""The largest count, start and amount: scripts compute in floating point."""

Place = Callable[[str, str], int]
"""How a script finds what is kept of a kind under a name: by a number in `KEYS`."""

T = TypeVar("T")

_NONE = -1
_ODD = -2

_NUMBERS = "(?:[0-9]+(?: [0-9]+)*)?"
_CALL = r"[01](?: [^\s,]+ [^\s,]+)*"
_RESULT = re.compile(
    rf"acquired ([01]) ([01])(?: ([0-9]+) ([0-9,]*))?\n({_NUMBERS})\n((?:{_CALL}(?:,{_CALL})*)?)"
    rf"(?:\n({_NUMBERS}))?(?:\n({_NUMBERS}))?"
)
"""The text of an answer, as acquire.lua says it."""


class Script(NamedTuple):
    """A script, and the name by which a server knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> "Script":
        """Return the script of a text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _source(name: str) -> str:
    return (files("langchain_quota.stores") / f"{name}.lua").read_text("utf-8")


_TIMES = f"local REMEMBERED, CORRECTED, GRACE = {REMEMBERED}, {CORRECTED}, {GRACE}"
SCRIPTS = {
    name: Script.of("\n".join([_TIMES, _source("common"), _source(name)]))
    for name in ("acquire", "operations")
}


def name_of(prefix: str, kind: str, key: str) -> bytes:
    """Return the name of what is kept of a kind for a key, which may begin with the prefix."""
    # The prefix is the hash tag, by which a cluster finds the node.
    return f"{{{prefix}}}:{kind}:{key.removeprefix(f'{prefix}/')}".encode(errors="surrogatepass")


def key_of(prefix: str, kind: str, name: bytes | str) -> str | None:
    """Return the key of a name in Redis, which may be decoded; `None` for another's name."""
    try:
        text = name if isinstance(name, str) else name.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        return None
    return text.removeprefix(f"{{{prefix}}}:{kind}:")


def pattern_of(prefix: str, kind: str, keys: str) -> bytes:
    """Return a pattern that finds all names whose keys match a glob, and maybe others."""
    # Redis reads character classes and escapes differently.
    simple, *rest = re.split(r"[\[\\]", keys, maxsplit=1)
    return name_of(prefix, kind, f"{simple}{'*' if rest else ''}")


def missing_keys(reply: object) -> list[bytes]:
    """Return the keys with which a script must be called again; none if it has answered."""
    if not (isinstance(reply, list) and reply and reply[0] in (b"again", "again")):
        return []
    return [name if isinstance(name, bytes) else str(name).encode() for name in reply[1:]]


def write_acquire(request: AcquireRequest, idle: int, place: Place) -> str:
    """Return the request that admits a batch."""
    smallest, hold = smallest_limits(request), ""
    counters, thresholds, names = list[str](), list[str](), list[str]()
    rollovers: list[list[int]] = []
    for counter in request.counters.values():
        if counter.key is None:
            counters.append(f"0,0,{_NONE},0,false,{_exact(counter.used)},{_NONE},{_NONE}")
            continue
        lease = _NONE
        if counter.lease is not None:
            lease, hold = _exact(counter.lease), _hold(request.idempotency_key)
        start = _exact(counter.used and drain_time(counter.key, counter.used))
        ends = None if counter.expires_at is None else math.ceil(counter.expires_at)
        kept, limit = _count(counter.key, idle, place, ends), _clamped(smallest.get(counter.key))
        counters.append(f"{kept},{start},{limit},{lease}")
        if (rollover := counter.rollover) is not None:
            previous = place("count", rollover.previous)
            rollovers.append([len(counters), previous, *map(_clamped, rollover[1:])])
    drains = any("~" in (counter.key or "") for counter in request.counters.values())
    number = {name: number for number, name in enumerate(request.counters, 1)}
    limits: dict[str, int] = {}
    indexes: dict[Threshold, int] = {}
    calls = []
    for amounts, over in demands_in_drain_time(request) if drains else request.demands:
        added = [part for name in amounts for part in (number[name], _exact(amounts[name]))]
        calls.append([added, [indexes.setdefault(each, len(indexes) + 1) for each in over]])
    for threshold in indexes:
        limit = limits.setdefault(threshold.limit, len(limits))
        bound, limit_and_scope = _threshold(threshold)
        thresholds.append(f"{limit},{number[threshold.counter]},{bound}")
        names.append(limit_and_scope)
    stops = [[limits.get(name, _NONE), after] for name, after in request.stops.items()]
    corrections = [_correction(correction, idle, place) for correction in request.corrections]
    return (
        f'{{"attempt":{_marker("attempt", request.attempt_id, place)},'
        f'"result":{_marker("result", request.idempotency_key, place)},"hold":"{hold}",'
        f'"counters":[{",".join(counters)}],"thresholds":[{",".join(thresholds)}],'
        f'"names":[{",".join(names)}],"calls":{calls},"stops":{stops},'
        f'"frozen":{place("grants", FREEZES)},"rollovers":{rollovers},'
        f'"corrections":[{",".join(corrections)}]}}'
    )


def write_operation(
    op: str, keys: Iterable[str], argument: Argument, idle: int, place: Place
) -> str:
    """Return the request for any other operation on counts."""
    counts = [f"[{_count(key, idle, place, window_end(key))}]" for key in dict.fromkeys(keys)]
    message: dict[str, object] = {"op": op}
    if isinstance(argument, str):
        message["name"] = _short(argument)
    if isinstance(argument, int):
        message["amount"] = _exact(argument)
    if isinstance(argument, Grant):
        given_at = argument.given_at.timestamp()
        fields = {"id": argument.id, "at": given_at, "reason": argument.reason, "by": argument.by}
        message |= {"name": _short(argument.id), "details": json.dumps(fields)}
        message |= {"amount": _exact(argument.amount), "ends": _exact(argument.ends or 0)}
    return f'{{"counts":[{",".join(counts)}],{json.dumps(message)[1:]}'


def _correction(correction: Correction, idle: int, place: Place) -> str:
    starts, limits, settles = correction.starts, correction.limits, correction.settles
    amounts = [
        f"[{_count(key, idle, place, window_end(key))},"
        f"{_exact(drain_time(key, starts.get(key, 0)))},{_exact(drain_time(key, amount))},"
        f"{_clamped(limits.get(key))}]"
        for key, amount in correction.amounts.items()
    ]
    hold = f',"hold":"{_hold(settles)}"' if settles else ""
    return (
        f'{{"marker":{_marker("settled" if settles else "corrected", correction.id, place)},'
        f'"attempt":{_marker("attempt", correction.attempt_id, place)},'
        f'"result":{_marker("result", correction.idempotency_key, place)},'
        f'"amounts":[{",".join(amounts)}]{hold}}}'
    )


def _count(key: str, idle: int, place: Place, ends: int | None) -> str:
    """Return what a script needs to know of a count."""
    return f"{place('count', key)},{place('grants', key)},{_clamped(ends)},{_kept(key, idle)}"


@lru_cache(maxsize=4096)
def _kept(key: str, idle: int) -> str:
    """Return how long a count is kept without a charge, and whether it drains."""
    return f"{idle_time(key, idle)},{'true' if read_emission_interval(key) else 'false'}"


@lru_cache(maxsize=1024)
def _threshold(threshold: Threshold) -> tuple[str, str]:
    """Return the maximum of a threshold with whether it is enforced, and its names."""
    limit, scope, _, maximum, enforced = threshold
    # It may be below 0, and grants may raise it.
    bound = max(-MAX_COUNT, min(maximum, MAX_COUNT))
    return f"{bound},{'true' if enforced else 'false'}", f'"{_quoted(limit)} {_quoted(scope)}"'


def _marker(kind: str, name: str | None, place: Place) -> int:
    """Return where something is remembered by a name of any length."""
    return place(kind, _digest(name)) if name else 0


def _hold(request: str) -> str:
    return f"held:{_short(request)}"


def read_result(request: AcquireRequest, reply: object) -> AcquireResult:
    """Return the result of a request from its reply."""
    text = _text(reply)
    if text == "refused":
        raise QuotaStoreError("the attempt was corrected before it arrived")
    match = _RESULT.fullmatch(text)
    if match is None:
        raise ValueError("it is no result")
    replayed, stopped, freezes, frozen, counts, refusals, granted, newly = match.groups("")
    used, calls = _counts(counts), refusals.split(",") if refusals else []
    if replayed == "1":
        check_fits(len(used), len(calls), request)
    if len(calls) != len(request.demands):
        raise ValueError("it is the result of another request")
    admitted, refused = [], []
    for call in calls:
        runs, *refusing = call.split(" ")
        texts = [unquote(name, errors="surrogatepass") for name in refusing]
        admitted.append(runs == "1")
        refused.append(dict(zip(texts[::2], texts[1::2], strict=True)))
    names = [*request.counters]
    kept = dict(zip(names, used, strict=True))
    keys = {
        name: counter.key
        for name, counter in request.counters.items()
        if "~" in (counter.key or "")
    }
    drained_in = {name: kept[name] for name in keys if read_emission_interval(keys[name])}
    drained = {name: drained_amount(keys[name], time) for name, time in drained_in.items()}
    return AcquireResult(
        {**kept, **drained},
        tuple(refused),
        tuple(admitted),
        stopped=stopped == "1",
        replayed=replayed == "1",
        granted=_amounts(request.counters, granted),
        newly_granted=_amounts(request.counters, newly),
        drained_in=drained_in,
        frozen=tuple(names[int(number) - 1] for number in frozen.split(",") if number),
        freezes=int(freezes or 0),
    )


def read_usages(keys: Iterable[str], reply: object) -> list[tuple[str, QuotaUsage | None]]:
    """Return the counts under keys; `None` for what is something else."""
    usages: list[tuple[str, QuotaUsage | None]] = []
    numbers = [_of(int, row) for row in _of(list, reply)]
    for key, granted, *value in zip(dict.fromkeys(keys), *[iter(numbers)] * 5, strict=True):
        used, limit, ends, rolled_over = (None if row == _NONE else row for row in value)
        if used is not None:
            ends = window_end(key) if ends is None else ends
            amount = drained_amount(key, used)
            usage = QuotaUsage(key, amount, limit, ends, granted, rolled_over)
            usages.append((key, None if used == _ODD else usage))
    return usages


def read_grants(keys: Iterable[str], reply: object) -> list[tuple[Grant, bool]]:
    """Return the grants of keys, and whether each is new; none after a reset."""
    names, stored = [*dict.fromkeys(keys)], []
    for index, amount, ends, text, is_new in zip(*[iter(_of(list, reply))] * 5, strict=True):
        fields = json.loads(_text(text))
        grant = Grant(
            names[_of(int, index) - 1],
            _of(int, amount),
            fields["id"],
            in_utc(fields["at"]),
            in_utc(_of(int, ends)),
            fields["reason"],
            fields["by"],
        )
        stored.append((grant, is_new == 1))
    return stored


def _of(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} should")
    return value


def _text(word: object) -> str:
    return _of(bytes, word).decode() if isinstance(word, bytes) else _of(str, word)


def _counts(text: str) -> list[int]:
    return [*map(int, text.split(" "))] if text else []


def _amounts(counters: Mapping[str, object], text: str) -> dict[str, int]:
    """Return the amount of each counter, by name, without zeros."""
    if not text:
        return {}
    named = zip(counters, _counts(text), strict=True)
    return {name: amount for name, amount in named if amount}


def _digest(name: str) -> str:
    """Return a name for one that may be long, with any characters."""
    return sha256(name.encode(errors="surrogatepass")).hexdigest()


def _short(name: str) -> str:
    """Return a short name: a hash is compact while no field has 64 characters."""
    return _digest(name)[:32]


def _exact(number: int) -> int:
    if abs(number) > MAX_COUNT:
        raise QuotaStoreError(f"Redis counts to {MAX_COUNT}, which {number} exceeds")
    return number


def _clamped(number: int | None) -> int:
    """Return a number within the script's bounds: no count is above them."""
    return _NONE if number is None else max(_NONE, min(number, MAX_COUNT))


def _quoted(name: str) -> str:
    """Encode a name of any characters, so that it has no spaces and no commas."""
    return quote(name, errors="surrogatepass")
