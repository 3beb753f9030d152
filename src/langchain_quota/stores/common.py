"""What all stores share: the validation of requests, and how long counts are kept."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from langchain_quota.core.admission import AcquireRequest, AcquireResult, Demand
from langchain_quota.core.checks import Check
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limits.call import ROOT_RUN, RUN
from langchain_quota.runtime.arguments import validate_type
from langchain_quota.stores import ROOT_RUN_IDLE, RUN_IDLE, QuotaUsage
from langchain_quota.stores.keys import CountKey, dimension_of, drain_time

_IDLE_AT_MOST = {RUN: RUN_IDLE, ROOT_RUN: ROOT_RUN_IDLE}


@dataclass(slots=True)
class Metadata:
    """What is kept beside a count: the smallest enforced limit, the end of its window."""

    limit: int | None = None
    ends: int | None = None
    mirrored: bool = True
    """Whether every counter of the key is mirrored."""


def metadata(request: AcquireRequest) -> dict[str | None, Metadata]:
    """Return what a charge writes beside the counts, by key."""
    by_key: dict[str | None, Metadata] = {}
    counters = request.counters
    for counter in counters.values():
        if counter.key is None:
            continue
        if counter.lease is not None and not request.idempotency_key:
            raise ValueError(
                f"idempotency_key must not be empty: the counter of {counter.key!r} has a "
                "lease, and the key names what is held; give the request one of its own"
            )
        beside = by_key.setdefault(counter.key, Metadata())
        beside.mirrored = beside.mirrored and counter.mirrored
        if counter.expires_at is not None:
            beside.ends = max(math.ceil(counter.expires_at), beside.ends or 0)
    for _, thresholds in request.demands:
        for _, _, name, maximum, enforced in thresholds:
            entry = by_key.get(counters[name].key)
            if entry is not None and enforced and maximum >= 0:
                entry.limit = maximum if entry.limit is None else min(maximum, entry.limit)
    return by_key


def demands_in_drain_time(request: AcquireRequest) -> tuple[Demand, ...]:
    """Return the demands of a request, in microseconds where counts drain."""
    keys = {name: counter.key for name, counter in request.counters.items()}
    return tuple(
        Demand(
            {name: drain_time(keys[name], amount) for name, amount in amounts.items()},
            tuple(
                threshold._replace(maximum=drain_time(keys[threshold.counter], threshold.maximum))
                for threshold in thresholds
            ),
        )
        for amounts, thresholds in request.demands
    )


def replay(remembered: AcquireResult, request: AcquireRequest) -> AcquireResult:
    """Return a remembered result again; the request may have other names for its counters."""
    check_fits(len(remembered.used), len(remembered.admitted), request)
    names = dict(zip(remembered.used, request.counters, strict=True))
    return replace(
        remembered,
        used={names[name]: used for name, used in remembered.used.items()},
        replayed=True,
        granted={names[name]: amount for name, amount in remembered.granted.items()},
        frozen=tuple(names[name] for name in remembered.frozen),
    )


def check_fits(counters: int, calls: int, request: AcquireRequest) -> None:
    """Check that a remembered result has as many counters and calls as the request."""
    if (counters, calls) != (len(request.counters), len(request.demands)):
        raise QuotaStoreError("the idempotency key was given to a batch of another form before")


def keys_of(request: AcquireRequest) -> list[str]:
    """Return the keys that a request and its corrections name."""
    counters = request.counters.values()
    keys = [counter.key for counter in counters if counter.key is not None]
    return [
        *(counter.rollover.previous for counter in counters if counter.rollover is not None),
        *keys,
        *(
            key
            for correction in request.corrections
            for key in (*correction.amounts, *correction.starts)
        ),
    ]


def added_to(checks: Iterable[Check], usages: Mapping[str, QuotaUsage]) -> dict[str, int]:
    """Return what grants and rollover add to limits, by key; what will roll over included."""
    added = {key: usage.granted for key, usage in usages.items()}
    for check in checks:
        usage = usages.get(check.key or "")
        if check.rollover is not None and (usage is None or usage.rolled_over is None):
            previous = usages.get(check.rollover.previous)
            rest = check.rollover.of(previous.used if previous else 0)
            added[check.key or ""] = rest + (usage.granted if usage else 0)
    return added


def idle_time(key: str, idle: int) -> int:
    """Return how long the count of a key is kept without a charge, in seconds."""
    return min(idle, _IDLE_AT_MOST.get(dimension_of(key), idle))


def check_request(request: object) -> None:
    """Check the type of a request to a store."""
    if not isinstance(request, AcquireRequest):
        raise TypeError(f"request must be an AcquireRequest, not {request!r}")


def check_keys(keys: object, *, of_counts: bool = False) -> None:
    """Check that a store is given several keys, and that counts can have them."""
    if (
        isinstance(keys, str)
        or not isinstance(keys, Sequence)
        or not all(isinstance(key, str) for key in keys)
    ):
        raise TypeError(f"keys must be a sequence of strings, not {keys!r}")
    for key in keys if of_counts else ():
        CountKey.parse(key)


def idle_seconds(idle_ttl: timedelta) -> int:
    """Return how long an idle count is kept, in seconds."""
    validate_type("idle_ttl", idle_ttl, timedelta, "a timedelta")
    if idle_ttl < timedelta(seconds=1):
        raise ValueError(f"idle_ttl must be a second or more, not {idle_ttl!r}")
    return math.ceil(idle_ttl.total_seconds())
