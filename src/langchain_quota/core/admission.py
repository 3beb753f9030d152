"""The one rule that admits calls, and the types of its requests and answers.

A count has a name. A threshold is a number that a count must not exceed. `admit` finds for each
call the limits that refuse it, and their scopes. Only `admit`, and a store's copy of it, admits
calls. Only the slots of one process are counted elsewhere, in `runtime/queues.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple

from langchain_quota.limits.call import Scope

MAX_COUNT = 2**53 - 1
"""The largest count, start and amount in all stores: Redis computes in floating point."""

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Threshold(NamedTuple):
    """A number that a count must not exceed.

    Attributes:
        limit: The name of the limit that it belongs to.
        scope: What the count is kept for.
        counter: The name of the counter.
        maximum: The highest count that is allowed, a whole number; a negative one refuses every
            call. `MAX_COUNT` is no limit: only a freeze refuses a call.
        enforced: Whether a refusal blocks the call. In a dry run it is only recorded.
    """

    limit: str
    scope: Scope
    counter: str
    maximum: int
    enforced: bool = True


class Demand(NamedTuple):
    """What one call, or several calls with one id, would add to counts if it is admitted.

    Attributes:
        amounts: The amounts, by the name of the count; whole numbers from 0.
        thresholds: The thresholds over these counts, in the order in which a refusal is attributed.
    """

    amounts: Mapping[str, int]
    thresholds: tuple[Threshold, ...] = ()


class Rollover(NamedTuple):
    """What the window before adds to the limits over a count: what it has left of its limit.

    Attributes:
        previous: The key of that window's count.
        amount: The most that is added.
        limit: The quota's own limit.
        kept_until: When the next window, which reads the count, ends: in seconds since the epoch.
    """

    previous: str
    amount: int
    limit: int
    kept_until: int

    def of(self, used: int) -> int:
        """Return what is added if the window before has used so much."""
        return max(0, min(self.amount, self.limit - used))


class CountRef(NamedTuple):
    """One count, and where it is kept.

    Attributes:
        key: Where a store keeps it; `None` for one that the caller keeps.
        used: The caller's count. A store starts from it if the key is new.
        expires_at: When the key's window ends, in seconds since the Unix epoch; `None` for one
            that lasts until it is reset.
        mirrored: Whether the caller keeps the count, too, and sends it again as `used`. Then a
            full store may drop it.
        lease: How many seconds, from 1, the request reserves what it charges under the key. After
            that the store releases it, unless a correction that `settles` the request comes first.
            `None`: the charge is final.
        rollover: What the window before may add to the limits; `None` for nothing.
    """

    key: str | None = None
    used: int = 0
    expires_at: float | None = None
    mirrored: bool = False
    lease: int | None = None
    rollover: Rollover | None = None


class Correction(NamedTuple):
    """A correction of counts, made once however often it is sent.

    Attributes:
        id: Names the correction.
        amounts: The amounts that are added to the counts under keys; negative for refunds.
        attempt_id: An attempt to acquire whose result is unknown: what it charged is undone, and
            it is refused if it arrives later.
        idempotency_key: The request of this attempt: if another attempt of it was answered, the
            amounts are counted already.
        starts: The caller's counts, by key: where a key begins if nothing is kept under it.
        settles: The idempotency key of a request with reservations under the keys of the amounts.
            What is still reserved there is released first. So the amounts, including 0, replace
            the reservations. They may exceed limits.
        limits: The limits of keys, which a store shows beside their counts.
        mirrored: The keys whose counts the caller keeps, too, as in `CountRef`.
    """

    id: str
    amounts: Mapping[str, int] = _NOTHING
    attempt_id: str | None = None
    idempotency_key: str = ""
    starts: Mapping[str, int] = _NOTHING
    settles: str = ""
    limits: Mapping[str, int] = _NOTHING
    mirrored: AbstractSet[str] = frozenset()


class AcquireRequest(NamedTuple):
    """A batch of calls that is admitted, call by call, in one atomic step.

    Attributes:
        idempotency_key: Names the request: one that was answered before is not charged again.
        attempt_id: Names this attempt to make it.
        counters: The counts, by name.
        demands: What each call, in order, would add to them.
        stops: The limits whose refusals stop the batch, and after how many refused calls. A
            stopped batch charges nothing.
        corrections: The corrections that are made first.
    """

    idempotency_key: str
    attempt_id: str
    counters: Mapping[str, CountRef] = MappingProxyType({})
    demands: tuple[Demand, ...] = ()
    stops: Mapping[str, int] = _NOTHING
    corrections: tuple[Correction, ...] = ()

    def keyed(self, amounts: Mapping[str, int]) -> dict[str, int]:
        """Return the amounts of the counts that a store keeps, by key.

        Args:
            amounts: By the name of the count.
        """
        by_key: dict[str, int] = {}
        for name, amount in amounts.items():
            key = self.counters[name].key
            if key is not None:
                by_key[key] = by_key.get(key, 0) + amount
        return by_key


class AcquireResult(NamedTuple):
    """The answer to a request.

    Attributes:
        used: The counts before the batch, by name.
        refused: For each demand: the limits that refuse it, or would if they were enforced,
            with the exhausted scope of each limit.
        admitted: For each demand, whether no enforced limit refuses it.
        stopped: Whether refusals stopped the batch: nothing of it is charged.
        replayed: Whether the request was answered before, and is not charged again.
        granted: The amounts that grants and rollover added to the thresholds over counts, by name;
            without zeros.
        newly_granted: The grants in it that no earlier request has used.
        drained_in: In how many microseconds each count that drains is 0, by name; before the batch.
        frozen: The names of the counters whose subject is frozen: their thresholds refuse.
        freezes: How many freezes the store has for these keys' prefix.
    """

    used: Mapping[str, int]
    refused: tuple[Mapping[str, Scope], ...] = ()
    admitted: tuple[bool, ...] = ()
    stopped: bool = False
    replayed: bool = False
    granted: Mapping[str, int] = _NOTHING
    newly_granted: Mapping[str, int] = _NOTHING
    drained_in: Mapping[str, int] = _NOTHING
    frozen: tuple[str, ...] = ()
    freezes: int = 0

    def charged(self, demands: Iterable[Demand]) -> dict[str, int]:
        """Return the amounts that the batch adds to each count.

        Args:
            demands: The demands of the request.
        """
        amounts = dict.fromkeys(self.used, 0)
        if not self.stopped:
            for (added, _), admitted in zip(demands, self.admitted, strict=True):
                if admitted:
                    for name, amount in added.items():
                        amounts[name] += amount
        return amounts


def admit(
    demands: Sequence[Demand],
    used: Mapping[str, int],
    stops: Mapping[str, int],
    granted: Mapping[str, int] | None = None,
    frozen: Sequence[str] = (),
) -> AcquireResult:
    """Admit each call against the thresholds over its counts.

    Calls are admitted in order, each against the counts after the ones before it. A blocked call
    is not charged. If refusals stop the batch, none of its calls is charged.

    Args:
        demands: What each call would add to counts.
        used: The counts before the batch, by name.
        stops: The limits whose refusals stop the batch, and after how many refused calls.
        granted: The amounts that are added to the thresholds over counts, by name.
        frozen: The counts whose thresholds refuse every call, before others.
    """
    granted = granted or {}
    counts = dict(used)
    refusals = dict.fromkeys(stops, 0)
    refused: list[Mapping[str, Scope]] = []
    admitted = []
    for amounts, thresholds in demands:
        refusing: dict[str, Scope] = {}
        runs = True
        for limit, scope, counter, maximum, enforced in thresholds:
            if counter in frozen:
                refusing[limit] = scope
            elif counts[counter] + amounts[counter] > maximum + granted.get(counter, 0):
                refusing.setdefault(limit, scope)
            else:
                continue
            runs = runs and not enforced
        if runs:
            for counter, amount in amounts.items():
                counts[counter] += amount
        for limit in refusing:
            if limit in refusals:
                refusals[limit] += 1
        refused.append(refusing)
        admitted.append(runs)
    stopped = any(refusals[limit] >= after for limit, after in stops.items())
    return AcquireResult(
        used, tuple(refused), tuple(admitted), stopped, granted=granted, frozen=tuple(frozen)
    )
