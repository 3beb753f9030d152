"""What tests ask of stores."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.stores import QuotaStore

_numbers = itertools.count()


def fresh(what: str) -> str:
    """A name that was not given before."""
    return f"{what}-{next(_numbers)}"


def batch(
    *amounts: Mapping[str, int],
    limits: Mapping[str, int] | None = None,
    used: Mapping[str, int] | None = None,
    ends: Mapping[str, float] | None = None,
    key: str | None = None,
    attempt: str | None = None,
    stops: Mapping[str, int] | None = None,
    corrections: Sequence[Correction] = (),
    leases: Mapping[str, int] | None = None,
) -> AcquireRequest:
    """Calls that add amounts to keys, each of which is the name of its counter and scope, too."""
    used, ends, leases = used or {}, ends or {}, leases or {}
    over = {each: Threshold("limit", each, each, most) for each, most in (limits or {}).items()}
    counters = {
        each: CountRef(each, used.get(each, 0), ends.get(each), lease=leases.get(each))
        for added in amounts
        for each in added
    }
    demands = (
        Demand(added, tuple(over[each] for each in added if each in over)) for added in amounts
    )
    return AcquireRequest(
        fresh("key") if key is None else key,
        fresh("attempt") if attempt is None else attempt,
        counters,
        tuple(demands),
        stops or {},
        tuple(corrections),
    )


def calls(counted: str, number: int, limit: int = 100, **options: Any) -> AcquireRequest:
    """A number of calls, each charged to one key."""
    return batch(*[{counted: 1}] * number, limits={counted: limit}, **options)


def settlement(request: AcquireRequest, amounts: Mapping[str, int], name: str = "") -> Correction:
    """That amounts stand in place of what a request holds; a name is that of the settlement."""
    return Correction(name or fresh("settlement"), amounts, settles=request.idempotency_key)


def correcting(*corrections: Correction) -> AcquireRequest:
    """Corrections, and nothing else."""
    return batch(corrections=corrections)


def used(store: QuotaStore, *keys: str) -> list[int | None]:
    """The counts under keys; `None` where there is none."""
    return [None if usage is None else usage.used for usage in store.peek(keys)]
