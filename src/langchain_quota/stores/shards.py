"""Shards: a shard is all counts that a store keeps on one node, and changes in one step.

A store with an attribute `shard_by` counts each request in one shard. The keys of its counts begin
with the shard: `acme/search:user_id:ada`. The shard is a value in the caller's `runtime.context`,
or the thread. Every hook reads it. If it is missing, the request fails, and nothing is charged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from langchain_quota.admission import AcquireRequest, Compensation
from langchain_quota.decision import AT_ONCE, ROOT_RUN, RUN, STORE, THREAD
from langchain_quota.limits import Limit
from langchain_quota.stores.keys import CountKey, split_shard

_NO_SHARD = ("agent", "global", ROOT_RUN, RUN, STORE, AT_ONCE)


def check_shards(shard_by: object, within_shard: object) -> None:
    """Check the arguments of a store that are about shards.

    Args:
        shard_by: The name of the value that is the shard; `None` for a store without shards.
        within_shard: What else a quota may be `per`, because it belongs to one shard.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of bounds.
    """
    if shard_by is not None and not isinstance(shard_by, str):
        raise TypeError(f"shard_by must be a string or None, not {shard_by!r}")
    if shard_by is not None and (not shard_by or shard_by in _NO_SHARD):
        raise ValueError(
            "shard_by must be 'thread' or a name in runtime.context, such as 'tenant', not "
            f"{shard_by!r}"
        )
    if (
        isinstance(within_shard, str)
        or not isinstance(within_shard, Sequence)
        or not all(isinstance(each, str) for each in within_shard)
    ):
        raise TypeError(f"within_shard must be a sequence of strings, not {within_shard!r}")
    if within_shard and shard_by is None:
        raise ValueError(f"within_shard={within_shard!r} needs a shard_by, such as 'tenant'")
    if "global" in within_shard:
        raise ValueError("within_shard must not contain 'global', which counts all shards")


def check_within_shards(store: object, limits: Sequence[Limit]) -> None:
    """Check that no quota counts calls of several shards together.

    Args:
        store: The store; one without `shard_by` has no shards.
        limits: The limits.

    Raises:
        ValueError: There is such a quota.
    """
    shard_by = getattr(store, "shard_by", None)
    if shard_by is None:
        return
    within = {THREAD, shard_by} | ({ROOT_RUN} if shard_by != THREAD else set())
    named = getattr(store, "within_shard", ())
    for limit in limits:
        for quota in limit.quotas:
            named_here = isinstance(quota.per, str) and quota.per in within
            if named_here or quota.dimension in named:
                continue
            # An agent has its model limits in one middleware.
            what = "all model limits" if limit.kind == "model" else "the limit"
            way_out = (
                f"put {what} into a second middleware, with a store without shard_by (make it of "
                "a subclass of QuotaMiddleware, so that it has another name); a GraphQuota needs "
                "such a store for all its limits"
            )
            if quota.dimension != "global":
                way_out += (
                    f"; or, if each {quota.dimension!r} belongs to one {shard_by!r}, pass "
                    f"within_shard=({quota.dimension!r},) to the store"
                )
            raise ValueError(
                f"quota {quota.name!r} of limit {limit.name!r} counts calls of several shards, "
                f"but a store with shard_by={shard_by!r} counts within one shard: {way_out}"
            )


def check_names_shard(store: object, key: CountKey) -> None:
    """Check that a key is one under which a store counts.

    Args:
        store: The store; one without `shard_by` counts under keys without a shard.
        key: The key.

    Raises:
        ValueError: It names no shard, and the store has shards.
    """
    shard_by = getattr(store, "shard_by", None)
    if shard_by is not None and not key.shard and key.dimension != AT_ONCE:
        raise ValueError(
            f"key must begin with the shard, since the store has shard_by={shard_by!r}: "
            f"'acme/{key}' if {shard_by} 'acme' is meant, not {str(key)!r}"
        )


def keys_by_shard(keys: Sequence[str]) -> list[Sequence[str]]:
    """Group keys by shard.

    Args:
        keys: The keys.
    """
    if "/" not in "".join(keys):
        return [keys]
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(split_shard(key)[0], []).append(key)
    return [*found.values()]


def requests_by_shard(request: AcquireRequest) -> list[tuple[str, AcquireRequest]]:
    """Split a request by shard: corrections of other shards come first, the request itself last.

    Args:
        request: The request.

    Raises:
        ValueError: The request, or one of its corrections, counts in several shards.
    """
    counted = [each.key for each in request.counters.values() if each.key is not None]
    corrected = [[*each.amounts, *each.starts] for each in request.compensations]
    if "/" not in "".join(chain(counted, *corrected)):
        return [("", request)]
    shards = [_shard(keys) for keys in corrected]
    known = [each for each in (_shard(counted), *shards) if each is not None]
    own = known[0]
    if {*known} == {own}:
        return [(own, request)]
    of: dict[str, list[Compensation]] = {each: [] for each in known if each != own}
    of[own] = []
    for shard, compensation in zip(shards, request.compensations, strict=True):
        of[own if shard is None else shard].append(compensation)
    return [
        (
            shard,
            replace(request, compensations=tuple(made))
            if shard == own
            else AcquireRequest("", "", compensations=tuple(made)),
        )
        for shard, made in of.items()
    ]


def _shard(keys: Iterable[str]) -> str | None:
    """The shard of all keys; `None` without keys.

    Raises:
        ValueError: The keys are in several shards.
    """
    found = {split_shard(key)[0]: key for key in keys}
    if len(found) > 1:
        one, other, *_ = found.values()
        raise ValueError(f"a request must count in one shard, but {one!r} and {other!r} are in two")
    return next(iter(found), None)
