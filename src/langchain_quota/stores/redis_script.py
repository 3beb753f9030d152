"""The script that acquires in Redis: requests to it as JSON, and its replies; see `acquire.lua`."""

import json
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from itertools import chain
from math import ceil
from typing import Any, NamedTuple

from langchain_quota.core.admission import (
    MAX_COUNT,
    AcquireRequest,
    AcquireResult,
    Correction,
    Threshold,
)
from langchain_quota.runtime.store_errors import AttemptCorrectedError, QuotaStoreError
from langchain_quota.stores import CORRECTED, GRACE, REMEMBERED
from langchain_quota.stores.counts import (
    MAX_HELD,
    check_fits,
    check_held,
    demands_in_drain_time,
    smallest_limits,
)
from langchain_quota.stores.keys import (
    COUNT,
    FREEZES,
    digest,
    drain_time,
    drained_amount,
    freeze_entry,
    grant_entry,
    hold_entry,
    idle_time,
    read_emission_interval,
    window_end,
)
from langchain_quota.stores.memory import REFUSED
from langchain_quota.stores.redis_rows import FIELDS, name_of
from langchain_quota.stores.rows import OLD_GRANTS
from langchain_quota.stores.server import ANOTHER_FORM

_NONE = -1
_Number = Callable[..., int]
"""Returns the number of a key of the script."""


class Script(NamedTuple):
    """A script, and the name by which a server knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> "Script":
        """Return the script of a text."""
        return cls(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _script(name: str) -> Script:
    constants = (
        f"local REMEMBERED, GRACE, MAX_HELD = {REMEMBERED}, {GRACE}, {MAX_HELD}\n"
        f"local REFUSED, FREEZE_OF_ALL = '{json.dumps(REFUSED)}', '{grant_entry(FREEZES)}'\n"
        f"local ODD = '{ANOTHER_FORM}'\n"
        f"local FIELDS = {{{str([*FIELDS])[1:-1]}}}\n"
    )
    source = (files("langchain_quota.stores") / f"{name}.lua").read_text("utf-8")
    return Script.of(constants + source)


SCRIPTS = {name: _script(name) for name in ("acquire", "rows")}


def write_acquire(prefix: str, request: AcquireRequest, idle: int) -> list[int | bytes | str]:
    """Return the number of keys, the keys and the arguments of acquire.lua for a request."""
    # The freezes come first, and counts last, with numbers of their own.
    places = {name_of(prefix, COUNT, FREEZES): 1, name_of(prefix, OLD_GRANTS, FREEZES): 2}
    counts: dict[bytes, int] = {}
    rules: list[str] = []
    counters: list[str] = []
    drains: list[str] = []
    charges: list[str] = []

    def place(kind: str, name: str | None) -> int:
        if not name:
            return 0
        return places.setdefault(name_of(prefix, kind, digest(name)), len(places) + 1)

    def count(key: str, ends: int | None) -> int:
        number = counts.setdefault(name_of(prefix, COUNT, key), len(counts) + 1)
        if number > len(rules):
            rules.append(f"{_clamped(ends)},{_rule(key, idle)}")
        return number

    attempt = place("attempt", request.attempt_id)
    result = place("result", request.idempotency_key)
    smallest, hold = smallest_limits(request), ""
    for number, counter in enumerate(request.counters.values()):
        key, lease = counter.key, _NONE
        if key is None:
            counters.append(f"0,{_exact(counter.used)},{_NONE},{_NONE},false")
            continue
        if counter.lease is not None:
            lease, hold = _exact(counter.lease), hold or hold_entry(request.idempotency_key)
        if "~" in key and read_emission_interval(key):
            drains.append(f"[{number},{json.dumps(key)}]")
        ends = None if counter.expires_at is None else ceil(counter.expires_at)
        start = _exact(counter.used and drain_time(key, counter.used))
        rolls = "false" if counter.rollover is None else "true"
        limit = _clamped(smallest.get(key))
        counters.append(f"{count(key, ends)},{start},{limit},{lease},{rolls}")
        charges.append(_charge(key, lease != _NONE))
    names, calls = _calls(request, bool(drains))
    corrections = [_correction(correction, count, place) for correction in request.corrections]
    for correction in request.corrections:
        hold = hold or (hold_entry(correction.settles) if correction.settles else "")
    ask = (
        f'[{attempt},{result},"{hold}",[{",".join(rules)}],[{",".join(corrections)}],'
        f"[{','.join(counters)}],{calls}]"
    )
    # Not one argument for each: without a password, Redis reads ten and reports the eleventh.
    lines = (
        f"[{','.join(names)}]\n[{','.join(drains)}]\n"
        f"[{_format(request.idempotency_key)}, [{', '.join(charges)}]]"
    )
    return [len(places) + len(counts), *places, *counts, ask, lines]


def _calls(request: AcquireRequest, drains: bool) -> tuple[list[str], str]:  # noqa: FBT001
    """Return the names of thresholds, and what the script is told of them, calls and stops."""
    number = {name: number for number, name in enumerate(request.counters, 1)}
    limits: dict[str, int] = {}
    indexes: dict[Threshold, int] = {}
    calls, thresholds, names = [], [], []
    for amounts, over in demands_in_drain_time(request) if drains else request.demands:
        added = [f"{number[name]},{_exact(amounts[name])}" for name in amounts]
        checked = [str(indexes.setdefault(each, len(indexes) + 1)) for each in over]
        calls.append(f"[[{','.join(added)}],[{','.join(checked)}]]")
    for threshold in indexes:
        limit = limits.setdefault(threshold.limit, len(limits))
        bound, limit_and_scope = _threshold(threshold)
        thresholds.append(f"{limit},{number[threshold.counter]},{bound}")
        names.append(limit_and_scope)
    stops = [[limits.get(name, _NONE), after] for name, after in request.stops.items()]
    return names, f"[{','.join(thresholds)}],[{','.join(calls)}],{stops}"


def _correction(correction: Correction, count: _Number, place: _Number) -> str:
    settles, starts = correction.settles, correction.starts
    parts = [
        [
            count(key, window_end(key)),
            _exact(drain_time(key, starts.get(key, 0))),
            _exact(drain_time(key, amount)),
            _clamped(correction.limits.get(key)),
        ]
        for key, amount in correction.amounts.items()
    ]
    marker = place("settled" if settles else "corrected", correction.id)
    lasts, entry = (REMEMBERED, hold_entry(settles)) if settles else (CORRECTED, "")
    answered = place("result", correction.idempotency_key)
    return f'[{marker},{answered},{lasts},"{entry}",{parts}]'


@lru_cache(maxsize=4096)
def _rule(key: str, idle: int) -> str:
    """Return how long a count is kept without a charge, whether it drains, and what freezes it."""
    drains = "true" if read_emission_interval(key) else "false"
    return f'{idle_time(key, idle)},{drains},"{freeze_entry(key)}"'


@lru_cache(maxsize=1024)
def _threshold(threshold: Threshold) -> tuple[str, str]:
    """Return the maximum of a threshold with whether it is enforced, and its names."""
    limit, scope, _, maximum, enforced = threshold
    # It may be below 0, and grants may raise it.
    bound = max(-MAX_COUNT, min(maximum, MAX_COUNT))
    return f"{bound},{'true' if enforced else 'false'}", json.dumps([limit, scope])


@lru_cache(maxsize=4096)
def _charge(key: str, is_held: bool) -> str:  # noqa: FBT001
    """Return a charge of an attempt, without its amount."""
    return f"[{_format(key)}, %s, {'true' if is_held else 'false'}]"


def _format(text: str) -> str:
    """Return a text as JSON, as a format of Lua has it."""
    return json.dumps(text).replace("%", "%%")


def _exact(number: int) -> int:
    if abs(number) > MAX_COUNT:
        raise QuotaStoreError(f"Redis counts to {MAX_COUNT}, which {number} exceeds")
    return number


def _clamped(number: int | None) -> int:
    """Return a number within the script's bounds: no count is above them."""
    return _NONE if number is None else max(_NONE, min(number, MAX_COUNT))


def read_result(request: AcquireRequest, reply: Any) -> AcquireResult | None:
    """Return the result of a request from its reply; `None` if something is to roll over first."""
    said = json.loads(reply if isinstance(reply, str) else reply.decode())
    counters = [*request.counters]
    if said == "refused":
        raise AttemptCorrectedError
    if said == "rollover":
        return None
    if len(said) == 1:
        check_held(request.counters[counters[said[0]]].key or "", MAX_HELD)
    replayed, names, drains, stopped, used, raised, calls, freezes, frozen, fresh = said
    flags = [replayed, stopped, *[call[0] for call in calls]]
    numbers = [*flags, *used, *raised, *chain(*calls), freezes, *frozen, *chain(*fresh)]
    if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(flags) > 1:
        raise ValueError("it is no result")
    if replayed:
        check_fits(len(used), len(calls), request)
    if len(calls) != len(request.demands):
        raise ValueError("it is the result of another request")
    kept = dict(zip(counters, used, strict=True))
    drained_in = {counters[number]: used[number] for number, _ in drains}
    for number, key in drains:
        kept[counters[number]] = drained_amount(key, used[number])
    return AcquireResult(
        kept,
        tuple([dict([names[number] for number in call[1:]]) for call in calls]),
        tuple([call[0] == 1 for call in calls]),
        stopped=stopped == 1,
        replayed=replayed == 1,
        granted={name: more for name, more in zip(counters, raised, strict=True) if more},
        newly_granted={counters[number]: amount for number, amount in fresh},
        drained_in=drained_in,
        frozen=tuple([counters[number] for number in frozen]),
        freezes=freezes,
    )
