"""What tests ask of stores."""

import itertools
from collections.abc import Mapping, Sequence

from langchain_quota.admission import AcquireRequest, Compensation, Counter, Hits, Threshold
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
    compensations: Sequence[Compensation] = (),
    leases: Mapping[str, int] | None = None,
) -> AcquireRequest:
    """Calls that are charged to keys, each of which is the name of its counter, too.

    Args:
        amounts: What each call adds to which keys.
        limits: The limits over keys: each is one of `"limit"`, and its scope is the key.
        used: Where keys begin.
        ends: When their windows end.
        key: The idempotency key; by default one of its own.
        attempt: The attempt's id, likewise.
        stops: After how many refused calls which limit stops the batch.
        compensations: The compensations.
        leases: How long what is charged to keys is held, in seconds.
    """
    over = {each: Threshold("limit", each, each, most) for each, most in (limits or {}).items()}
    return AcquireRequest(
        fresh("key") if key is None else key,
        fresh("attempt") if attempt is None else attempt,
        {
            each: Counter(
                each,
                (used or {}).get(each, 0),
                (ends or {}).get(each),
                lease=(leases or {}).get(each),
            )
            for each in dict.fromkeys(each for added in amounts for each in added)
        },
        tuple(
            Hits(added, tuple(over[each] for each in added if each in over)) for added in amounts
        ),
        stops or {},
        tuple(compensations),
    )


def calls(
    counted: str,
    number: int,
    limit: int = 100,
    *,
    key: str | None = None,
    attempt: str | None = None,
    compensations: Sequence[Compensation] = (),
) -> AcquireRequest:
    """A number of calls, each charged to one key."""
    return batch(
        *[{counted: 1}] * number,
        limits={counted: limit},
        key=key,
        attempt=attempt,
        compensations=compensations,
    )


def settlement(request: AcquireRequest, amounts: Mapping[str, int], name: str = "") -> Compensation:
    """That amounts stand in place of what a request holds; a name is that of the settlement."""
    return Compensation(name or fresh("settlement"), amounts, settles=request.idempotency_key)


def compensating(*compensations: Compensation) -> AcquireRequest:
    """Compensations, and nothing else."""
    return batch(compensations=compensations)


def used(store: QuotaStore, *keys: str) -> list[int | None]:
    """The counts under keys; `None` where there is none."""
    return [None if usage is None else usage.used for usage in store.peek(keys)]
