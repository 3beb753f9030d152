"""All stores and the rule itself agree on random requests, call by call, over time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import inf
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import MemoryStore, Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.core.admission import (
    AcquireRequest,
    AcquireResult,
    Correction,
    CountRef,
    Demand,
    Rollover,
    Threshold,
    admit,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import CORRECTED, GRACE, REMEMBERED, QuotaStore
from tests.examples import examples
from tests.store.conftest import Place
from tests.telemetry import telling

GREETING = "Gr%C3%BC%C3%9Fe%3A%7B%2A%7D"
"""How keys write `Grüße:{*}`."""
START = 3 * 10**9
"""When a history begins: so late that Redis, by its own clock, forgets nothing meanwhile."""
IDLE = 300
"""How long a count without a window is kept, in seconds."""
WINDOWS: dict[str, int | None] = {
    "plain": None,
    "search:user_id:ada": None,
    f"search:user_id:ada:86400:{START // 86_400}": START // 86_400 * 86_400 + 86_400,
    f"__all__:tenant:{GREETING}:3600:{START // 3600}": START // 3600 * 3600 + 3600,
    f"search:tenant:acme:86400:{START + 60}-18000": START + 60,
    "search:user_id:ada:600~100": None,
}
"""Keys, and when their windows end."""
KEYS = (*WINDOWS,)
SMOOTH, INTERVAL = KEYS[-1], 6 * 10**6
"""The key of a count that drains, and in how many microseconds it falls by one."""
COUNTERS = ("a", "b", "c", "d", "Zähler %2F\ud800")
TELEMETRY = telling().telemetry
V = TypeVar("V")
LIMITS = ("one", "two", "drei: 100 %\n", "\ud800")
SCOPES = ("thread", "run", "%41 ü")
ATTEMPTS = ("", "x", "y", "z")
REQUESTS = ("", "i", "j", "k")


rollovers = st.builds(
    Rollover,
    previous=st.sampled_from(KEYS),
    amount=st.sampled_from([1, 3, 10**12]),
    limit=st.sampled_from([0, 2, 5, 2**53 - 1]),
    kept_until=st.sampled_from([START + 60, START + 90_000, START + 2 * CORRECTED]),
)


@st.composite
def counters(draw: st.DrawFn, *, named: bool) -> CountRef:
    """A counter; whose request has a name, it may have a lease."""
    key = draw(st.none() | st.sampled_from(KEYS))
    ends = WINDOWS.get(key or "")
    return CountRef(
        key,
        draw(st.integers(0, 3) | st.just(3 if key == SMOOTH else 8 * 10**15)),
        None if ends is None else ends - draw(st.sampled_from([0, 0.5])),
        mirrored=draw(st.booleans()),
        lease=draw(st.sampled_from([None, 5, 5, 60, 10_000])) if named else None,
        rollover=None if ends is None else draw(st.none() | rollovers),
    )


corrections = st.builds(
    Correction,
    id=st.sampled_from("stuvwxyz"),
    amounts=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([-7, -1, 0, 2]), max_size=3),
    attempt_id=st.none() | st.sampled_from(ATTEMPTS),
    idempotency_key=st.sampled_from(REQUESTS),
    starts=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9), max_size=2),
    settles=st.sampled_from(REQUESTS),
)


@st.composite
def requests(draw: st.DrawFn) -> AcquireRequest:
    """A request; keys, names and attempts are few, so that they meet again, in any order."""
    names = draw(st.lists(st.sampled_from(COUNTERS), unique=True, min_size=1, max_size=4))
    over = st.builds(
        Threshold,
        limit=st.sampled_from(LIMITS),
        scope=st.sampled_from(SCOPES),
        counter=st.sampled_from(names),
        maximum=st.sampled_from([0, 1, 2, 3, 4, 5, -2, 8 * 10**15 + 10**12, 2**53 - 1]),
        enforced=st.booleans(),
    )
    thresholds = draw(st.lists(over, max_size=4))
    key = draw(st.sampled_from(REQUESTS))
    counted = {name: draw(counters(named=bool(key))) for name in names}
    demands = []
    for _ in range(draw(st.integers(0, 4))):
        amount = draw(st.sampled_from([1, 1, 2, 0, 10**12]))
        amounts = {
            name: min(amount, 9) if counted[name].key == SMOOTH else amount
            for name in draw(st.sampled_from([names, names[:1], names[1:]]))
        }
        order = thresholds if draw(st.booleans()) else thresholds[::-1]
        demands.append(Demand(amounts, tuple(each for each in order if each.counter in amounts)))
    return AcquireRequest(
        key,
        draw(st.sampled_from(ATTEMPTS)),
        counted,
        tuple(demands),
        draw(st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 3), max_size=2)),
        tuple(draw(st.lists(corrections, max_size=2))),
    )


@st.composite
def holding(draw: st.DrawFn) -> AcquireRequest:
    """A request that is always admitted, and holds something for a while."""
    lease = st.sampled_from([5, 5, 60, 10_000])
    counters = {
        name: CountRef(key, expires_at=WINDOWS[key], lease=draw(lease))
        for name, key in zip("ab", draw(st.permutations(KEYS)), strict=False)
    }
    return AcquireRequest(
        draw(st.sampled_from(REQUESTS[1:])),
        draw(st.sampled_from(ATTEMPTS)),
        counters,
        (Demand({"a": draw(st.integers(1, 9)), "b": draw(st.integers(1, 9))}),),
        corrections=tuple(draw(st.lists(corrections, max_size=1))),
    )


class Give(NamedTuple):
    """A grant that is given: for how many seconds; `None` for as long as a store likes."""

    key: str
    amount: int
    seconds: int | None
    id: str


class Revoke(NamedTuple):
    """A grant that is ended."""

    key: str
    id: str


class Freeze(NamedTuple):
    """A subject, or all, that is frozen for so many seconds or until it is thawed."""

    name: str
    seconds: int | None


class Thaw(Freeze):
    """A subject, or all, that is thawed."""


FREEZABLE = {
    "::": {},
    ":user_id:ada": {"user_id": "ada"},
    f":tenant:{GREETING}": {"tenant": "Grüße:{*}"},
}
Operation = AcquireRequest | list[str] | Give | Revoke | Freeze
Step = Operation | int
"""What is asked, the keys that are reset, how many seconds pass, what is granted or frozen."""

gives = st.builds(
    Give,
    st.sampled_from(KEYS[1:-1]),
    st.sampled_from([1, 2, 5, 10**12]),
    st.sampled_from([None, -1, 0, 5, 60, 4000, 90_000]),
    st.sampled_from("gh"),
)
revokes = st.builds(Revoke, st.sampled_from(KEYS[1:-1]), st.sampled_from("gh"))
freezes = st.builds(
    lambda kind, name, seconds: kind(name, seconds),
    st.sampled_from([Freeze, Thaw]),
    st.sampled_from([*FREEZABLE]),
    st.sampled_from([None, -1, 5, 4000]),
)

resets = st.lists(st.sampled_from(KEYS[1:]), min_size=1, max_size=2)
waits = st.sampled_from([1, 5, 6, 61]) | st.sampled_from(
    [IDLE, 2400, GRACE, REMEMBERED, 86_400, CORRECTED]
)


def drains(key: str, leases: Sequence[int | None], amount: int, most: int) -> AcquireRequest:
    """A request that holds or charges something in a count that drains, perhaps twice."""
    names = "ab"[: len(leases)]
    counters = dict(zip(names, (CountRef(SMOOTH, lease=lease) for lease in leases), strict=True))
    demand = Demand(dict.fromkeys(names, amount), (Threshold("one", "run", "a", most),))
    return AcquireRequest(key, f"{key}!", counters, (demand,))


def ends(name: str, settles: str, amount: int, attempt: str | None) -> AcquireRequest:
    """A correction alone: it settles, undoes or refunds."""
    corrected = Correction(name, {SMOOTH: amount}, attempt, settles=settles)
    return AcquireRequest("", "", corrections=(corrected,))


leases = st.lists(st.sampled_from([None, 5, 60, 10_000, 10_000]), min_size=1, max_size=2)
holds = st.builds(
    drains, st.sampled_from("ijklmn"), leases, st.integers(1, 9), st.sampled_from([20, 20, 9])
)
corrects = st.builds(
    ends,
    st.sampled_from("opqrstuvwxyz"),
    st.sampled_from(["", *"ijklmn"]),
    st.sampled_from([0, 1, 2, 12, -3]),
    st.sampled_from([None, None, "i!"]),
)
passes = st.sampled_from([1, 1, 6, 7, 30, 61, 600, GRACE, REMEMBERED])
draining = st.lists(holds | corrects | holds | corrects | passes | st.just([SMOOTH]), max_size=15)
"""Requests to a count that drains, which end in any order."""


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    """Requests; some are tried again, with what a caller may have changed, undoes or settles."""
    made: list[AcquireRequest] = []
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 10))):
        others = resets | waits | gives | revokes | freezes | holds | corrects
        steps.extend(draw(st.lists(others, max_size=3)))
        asked = draw(requests() | holding())
        if draw(st.booleans()) and made:
            earlier = draw(st.sampled_from(made))
            undone = draw(corrections)._replace(
                attempt_id=earlier.attempt_id, idempotency_key=earlier.idempotency_key
            )
            settled = draw(corrections)._replace(
                attempt_id=None,
                amounts={each.key: 1 for each in earlier.counters.values() if each.key},
                settles=earlier.idempotency_key,
            )
            again = (
                earlier,
                earlier._replace(counters=dict(draw(st.permutations([*earlier.counters.items()])))),
                earlier._replace(attempt_id=asked.attempt_id, corrections=(undone,)),
                asked._replace(idempotency_key=earlier.idempotency_key),
                asked._replace(corrections=(undone,)),
                asked._replace(corrections=(settled,)),
                asked._replace(corrections=(settled, undone)),
            )
            asked = draw(st.sampled_from(again))
            if not asked.idempotency_key:
                asked = asked._replace(
                    counters={
                        name: each._replace(lease=None) for name, each in asked.counters.items()
                    }
                )
        made.append(asked)
        steps.append(asked)
    return steps


class Known(dict[str, tuple[V, float]]):
    """What is remembered, each with the time when it is forgotten."""

    def of(self, name: str) -> V | None:
        return self[name][0] if name in self else None

    def forget(self, now: float) -> None:
        for name in [name for name, (_, until) in self.items() if until <= now]:
            del self[name]


@dataclass
class Hold:
    """What a request holds under a key, when its lease ends, and what drains behind it."""

    key: str
    request: str
    amount: int
    ends: int
    behind: int = 0


@dataclass
class Granted:
    """A grant, when it ends, and whether no call has been checked by it."""

    key: str
    id: str
    amount: int
    ends: int
    is_new: bool = True


@dataclass
class Model:
    """What stores promise, said as plainly as can be."""

    now: int = START
    counts: Known[int | None] = field(default_factory=Known)
    """What is used under keys; `None` before the first charge, where something is granted."""
    holds: list[Hold] = field(default_factory=list)
    results: Known[AcquireResult] = field(default_factory=Known)
    made: Known[tuple[str, list[tuple[str, int, bool]]]] = field(default_factory=Known)
    refused: Known[bool] = field(default_factory=Known)
    corrected: Known[bool] = field(default_factory=Known)
    settled: Known[bool] = field(default_factory=Known)
    grants: list[Granted] = field(default_factory=list)
    frozen: dict[str, float] = field(default_factory=dict)
    rolled: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What rolled over to counts, and until when they are kept for it."""

    def wait(self, seconds: int) -> None:
        self.now += seconds
        for known in (self.results, self.made, self.refused, self.corrected, self.settled):
            known.forget(self.now)
        self.counts.forget(self.now)
        self.rolled = {key: self.rolled[key] for key in self.rolled if key in self.counts}
        self.grants = [each for each in self.grants if each.ends + CORRECTED > self.now]
        self.frozen = {name: ends for name, ends in self.frozen.items() if ends > self.now}
        self.holds = [each for each in self.holds if each.key in self.counts]
        ended = [each for each in self.holds if each.ends <= self.now]
        for hold in sorted(ended, key=lambda hold: (hold.ends, -hold.behind)):
            self.give_back(hold, at=hold.ends)

    def level(self, key: str) -> int | None:
        """What is counted under a key, in microseconds if it drains; `None` for nothing."""
        used = self.counts.of(key)
        return used if used is None or key != SMOOTH else max(0, used - self.now * 10**6)

    def grant(self, asked: Give) -> tuple[int, int] | None:
        for each in self.granted(asked.key):
            if each.id == asked.id:
                return each.amount, each.ends
        ends = self.now + IDLE if asked.seconds is None else self.now + asked.seconds
        window = WINDOWS[asked.key]
        if window is not None:
            ends = window if asked.seconds is None else min(ends, window)
        if ends <= self.now:
            return None
        self.grants.append(Granted(asked.key, asked.id, asked.amount, ends))
        self.put(asked.key, self.counts.of(asked.key), ends)
        return asked.amount, ends

    def revoke(self, asked: Revoke) -> int | None:
        for each in self.granted(asked.key):
            if each.id == asked.id and each.ends > self.now:
                each.ends = self.now
                return each.amount
        return None

    def freeze(self, asked: Freeze) -> bool:
        """Freeze or thaw; whether that changes anything."""
        if isinstance(asked, Thaw):
            return self.frozen.pop(asked.name, None) is not None
        ends = inf if asked.seconds is None else self.now + asked.seconds
        if ends > self.now:
            self.frozen[asked.name] = ends
        return ends > self.now

    def is_frozen(self, key: str | None) -> bool:
        _, *subject = (key or "").split(":")
        return bool(subject) and not {"::", ":" + ":".join(subject[:2])}.isdisjoint(self.frozen)

    def granted(self, key: str | None) -> list[Granted]:
        return [each for each in self.grants if each.key == key]

    def more(self, key: str | None) -> int:
        granted = sum(each.amount for each in self.granted(key) if each.ends > self.now)
        return granted + self.rolled.get(key or "", (0, 0))[0]

    def roll_over(self, request: AcquireRequest) -> None:
        for counter in request.counters.values():
            key, rollover = counter.key or "", counter.rollover
            if rollover is not None and key not in self.rolled:
                left = rollover.limit - (self.counts.of(rollover.previous) or 0)
                used = self.counts.of(key)
                self.rolled[key] = max(0, min(left, rollover.amount)), rollover.kept_until
                self.put(key, counter.used if used is None else used)

    def reset(self, keys: Sequence[str]) -> None:
        self.holds = [each for each in self.holds if each.key not in keys]
        for key in keys:
            self.put(key, 0)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        for correction in request.corrections:
            made = self.settled if correction.settles else self.corrected
            if correction.id not in made:
                kept = REMEMBERED if correction.settles else CORRECTED
                made[correction.id] = True, self.now + kept
                self.correct(correction)
        if request.attempt_id in self.refused:
            raise QuotaStoreError("corrected")
        known = self.results.of(request.idempotency_key)
        if known is None:
            return self.admit(request)
        if (len(known.used), len(known.admitted)) != (len(request.counters), len(request.demands)):
            raise QuotaStoreError("form")
        granted = dict(zip(request.counters, [*known.granted.values()], strict=True))
        names = dict(zip(known.used, request.counters, strict=True))
        return known._replace(
            used=dict(zip(request.counters, known.used.values(), strict=True)),
            replayed=True,
            granted={name: amount for name, amount in granted.items() if amount},
            newly_granted={},
            frozen=tuple(names[name] for name in known.frozen),
            drained_in={names[name]: time for name, time in known.drained_in.items()},
        )

    def admit(self, request: AcquireRequest) -> AcquireResult:
        used, granted = {}, {}
        self.roll_over(request)
        for name, counter in request.counters.items():
            kept = self.level(counter.key or "")
            used[name] = counter.used * cost_of(counter.key) if kept is None else kept
            granted[name] = self.more(counter.key)
        news = {
            name: [
                each for each in self.granted(counter.key) if each.is_new and each.ends > self.now
            ]
            for name, counter in request.counters.items()
        }
        for grant in chain(*news.values()):
            grant.is_new = False
        cost = {name: cost_of(each.key) for name, each in request.counters.items()}
        demands = [
            Demand(
                {name: amount * cost[name] for name, amount in each.amounts.items()},
                tuple(
                    over._replace(maximum=over.maximum * cost[over.counter] + granted[over.counter])
                    for over in each.thresholds
                ),
            )
            for each in request.demands
        ]
        frozen = [name for name, each in request.counters.items() if self.is_frozen(each.key)]
        result = admit(demands, used, request.stops, frozen=frozen)
        drained_in = {name: used[name] for name in used if cost[name] > 1}
        used = {name: -(-amount // cost[name]) for name, amount in used.items()}
        result = result._replace(used=used, granted=granted, freezes=len(self.frozen))
        result = result._replace(drained_in=drained_in)
        charged: list[tuple[str, int, bool]] = []
        for name, amount in result.charged(demands).items():
            counter = request.counters[name]
            if counter.key and amount:
                charged.append((counter.key, amount, counter.lease is not None))
                self.add(counter.key, amount, counter.used)
                if counter.lease is not None:
                    self.hold(counter.key, request.idempotency_key, amount, counter.lease)
        until = self.now + REMEMBERED
        if charged:
            if request.idempotency_key:
                self.results[request.idempotency_key] = result, until
            if request.attempt_id:
                self.made[request.attempt_id] = (request.idempotency_key, charged), until
        return result._replace(
            granted={name: amount for name, amount in granted.items() if amount},
            newly_granted={name: sum(e.amount for e in new) for name, new in news.items() if new},
        )

    def hold(self, key: str, request: str, amount: int, lease: int) -> None:
        ends = self.now + lease + 1
        for each in self.held(key, request):
            each.amount += amount
            each.ends = max(each.ends, ends)
            # If nothing was charged in between, or that has drained, all of it drains together.
            each.behind = 0 if amount in {each.behind, self.level(key)} else each.behind
            return
        self.holds.append(Hold(key, request, amount, ends))

    def held(self, key: str, request: str) -> list[Hold]:
        return [each for each in self.holds if (each.key, each.request) == (key, request)]

    def give_back(self, hold: Hold, most: float = inf, at: int | None = None) -> int:
        """Give back what a hold has left; how much of it has drained."""
        amount = left = int(min(hold.amount, most))
        if hold.key == SMOOTH:
            # It drains in the order of charges. What is before it has less behind it then.
            ends = (self.counts[hold.key][0] or 0) - hold.behind
            left = max(0, min(amount, ends - (self.now if at is None else at) * 10**6))
            for each in self.holds:
                if each is not hold and each.key == hold.key and each.behind >= hold.behind:
                    each.behind -= left
        hold.amount -= amount
        self.add(hold.key, -left)
        if not hold.amount:
            self.holds.remove(hold)
        return amount - left

    def correct(self, correction: Correction) -> None:
        if correction.attempt_id:
            self.refused[correction.attempt_id] = True, self.now + REMEMBERED
            if correction.attempt_id in self.made:
                (name, charged), _ = self.made.pop(correction.attempt_id)
                self.results.pop(name, None)
                for key, amount, leased in charged:
                    if leased:
                        for hold in self.held(key, name):
                            self.give_back(hold, amount)
                    else:
                        self.add(key, -amount)
        if correction.idempotency_key not in self.results:
            for key, amount in correction.amounts.items():
                drained = sum(map(self.give_back, self.held(key, correction.settles)))
                added = amount * cost_of(key)
                added = max(0, added - drained) if added > 0 else added
                self.add(key, added, correction.starts.get(key, 0))

    def add(self, key: str, amount: int, start: int = 0) -> None:
        used = self.level(key)
        if amount > 0:
            self.put(key, amount + (start * cost_of(key) if used is None else used))
            for hold in self.holds:
                hold.behind += amount if hold.key == key else 0
        elif used is not None:
            kept, until = self.counts[key]
            self.counts[key] = max(0, (kept or 0) + amount), until

    def put(self, key: str, used: int | None, least: float = 0) -> None:
        ends, (_, last) = WINDOWS.get(key), self.rolled.get(key, (0, 0))
        until: float = self.now + IDLE if ends is None else max(ends, self.now, last) + GRACE
        # As long as a grant lasts, which may be revoked, its count is kept.
        until = max(until, least, self.counts.get(key, (None, 0))[1])
        if key == SMOOTH and used is not None:
            used, until = used + self.now * 10**6, self.now + used / 10**6 + GRACE
        self.counts[key] = used, until


def cost_of(key: str | None) -> int:
    """What one call adds to the count under a key."""
    return INTERVAL if key == SMOOTH else 1


def outcome(store: Model | QuotaStore, request: AcquireRequest) -> AcquireResult | None:
    """The answer; `None` for a refusal of the whole."""
    try:
        return store.acquire(request)
    except QuotaStoreError:
        return None


def end_of(asked: Give | Freeze, now: float) -> datetime | None:
    """When what is granted or frozen ends."""
    return None if asked.seconds is None else datetime.fromtimestamp(now + asked.seconds, UTC)


def given_by(store: Any, asked: Give, now: float) -> tuple[int, int | None] | None:
    """What is granted, and until when; `None` if that time is over."""
    until = end_of(asked, now)
    try:
        grant = store.grant(asked.key, asked.amount, window=None, until=until, id=asked.id)
    except ValueError:
        return None
    return grant.amount, grant.ends


def frozen_by(store: Any, asked: Freeze, now: float) -> bool:
    """Freeze or thaw; whether that changes anything."""
    limit = ToolCallLimit(quotas=[Quota(1, per="user_id"), Quota(1, per="tenant")])
    quota: Any = QuotaMiddleware([limit], store=store, telemetry=TELEMETRY)
    subject = FREEZABLE[asked.name]
    if isinstance(asked, Thaw):
        return bool(quota.thaw(**subject))
    try:
        quota.freeze(until=end_of(asked, now), **subject)
    except ValueError:
        return False
    return True


def _held_twice() -> list[Step]:
    """A request holds again when its answer is forgotten; then it is undone alone, or reset."""
    key = KEYS[2]
    held = CountRef(key, expires_at=WINDOWS[key], lease=10_000)
    first = AcquireRequest("i", "x", {"a": held}, (Demand({"a": 5}),))
    undo = AcquireRequest("", "", corrections=(Correction("s", attempt_id="y"),))
    settle = AcquireRequest("", "", corrections=(Correction("t", {key: 1}, settles="i"),))
    again = first._replace(attempt_id="y")
    charge = AcquireRequest("c", "z", {"a": held._replace(lease=None)}, (Demand({"a": 2}),))
    return [first, REMEMBERED, again, undo, again, [key], charge, settle]


def _held_longest() -> list[Step]:
    """Of two leases of one request under one key the longer one holds."""
    counters = {name: CountRef(KEYS[0], lease=lease) for name, lease in (("a", 60), ("b", 5))}
    return [AcquireRequest("i", "x", counters, (Demand({"a": 1, "b": 2}),)), 6, 55]


def _granted_again() -> list[Step]:
    """A week after its end the name of a grant is free, though another grant keeps the count."""
    key = KEYS[1]
    gone = Give(key, 1, 5, "g")
    return [gone, Give(key, 2, 2 * CORRECTED, "h"), CORRECTED + 4, gone, 1, gone]


def _kept_for_the_next_window() -> list[Step]:
    """A count is kept for the next window, even if it is reset."""
    rollover = Rollover(KEYS[3], 3, 2, START + 90_000)
    count = CountRef(KEYS[2], expires_at=WINDOWS[KEYS[2]], rollover=rollover)
    request = AcquireRequest("i", "x", {"a": count}, (Demand({"a": 1}),))
    again = AcquireRequest("j", "y", {"b": count})
    return [request, [KEYS[2]], 86_400, again]


def _refunded_too_much() -> list[Step]:
    """No count falls below 0."""
    request = AcquireRequest("i", "x", {"a": CountRef(KEYS[1])}, (Demand({"a": 2}),))
    refund = AcquireRequest("", "", corrections=(Correction("s", {KEYS[1]: -3}),))
    return [request, refund]


def _ended_in_reverse() -> list[Step]:
    """Holds of a count that drains are settled in another order than they began."""
    held: list[Step] = [drains(name, [10_000], 9, 99) for name in "ijk"]
    return [*held, *(ends(f"{name}!", name, 1, None) for name in "kji")]


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
@examples(400)
@given(steps=histories() | draining)
@example(steps=_held_twice())
@example(steps=_held_longest())
@example(steps=_granted_again())
@example(steps=_kept_for_the_next_window())
@example(steps=_refunded_too_much())
@example(steps=_ended_in_reverse())
def test_all_agree(place: Place, steps: list[Step]) -> None:
    """The same requests get the same answers, and leave the same counts, limits and windows."""
    idle = timedelta(seconds=IDLE)
    with place.stores(START) as make:
        memory, shared, model = (
            MemoryStore(idle_ttl=idle, clock=make.clock),
            make(idle_ttl=idle),
            Model(),
        )
        # Without an end a grant ends by the clock of who gives it.
        shared.clock = make.clock
        make.wait(0)
        for step in steps:
            if isinstance(step, int):
                model.wait(step)
                make.wait(step)
            else:
                play(step, model, memory, shared)
            compare(model, memory, shared)


def play(step: Operation, model: Model, memory: MemoryStore, shared: Any) -> None:
    """Do a step everywhere: all say the same of it."""
    stores, now = (memory, shared), model.now
    if isinstance(step, Give):
        given = model.grant(step)
        assert [given_by(store, step, now) for store in stores] == [given] * 2
    elif isinstance(step, Revoke):
        ended, revoked = model.revoke(step), [store.revoke(*step) for store in stores]
        assert [grant and grant.amount for grant in revoked] == [ended] * 2
    elif isinstance(step, Freeze):
        changed = model.freeze(step)
        assert [frozen_by(store, step, now) for store in stores] == [changed] * 2
    elif isinstance(step, list):
        for store in (model, *stores):
            store.reset(step)
    else:
        expected = outcome(model, step)
        assert [outcome(store, step) for store in stores] == [expected] * 2


def compare(model: Model, memory: MemoryStore, shared: Any) -> None:
    """All keep the same."""
    kept = memory.peek(KEYS)
    assert shared.peek(KEYS) == kept
    for key, use in zip(KEYS, kept, strict=True):
        level, more = model.level(key), model.more(key)
        count = None if level is None else -(-level // cost_of(key))
        found = (None, 0, None) if use is None else (use.used, use.granted, use.rolled_over)
        rolled = model.rolled[key][0] if key in model.rolled else None
        assert found == (0 if count is None and more else count, more, rolled)


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
@examples(200)
@given(steps=histories(), alone=st.integers(0, 5))
def test_postgres_agrees_on_a_batch(place: Place, steps: list[Step], alone: int) -> None:
    """Requests that share a transaction get the answers that they get one after the other."""
    idle = timedelta(seconds=IDLE)
    sent = [step for step in steps if isinstance(step, AcquireRequest)]
    with place.stores(START) as make:
        make.wait(0)
        shared, memory = make(idle_ttl=idle), MemoryStore(idle_ttl=idle, clock=make.clock)

        async def together() -> list[Any]:
            asked = [shared.aacquire(request) for request in sent[alone:]]
            return await asyncio.gather(*asked, return_exceptions=True)

        answers = [outcome(shared, request) for request in sent[:alone]]
        for answer in asyncio.run(together()):
            assert isinstance(answer, AcquireResult | QuotaStoreError)
            answers.append(None if isinstance(answer, QuotaStoreError) else answer)
        assert answers == [outcome(memory, request) for request in sent]
        assert shared.peek(KEYS) == memory.peek(KEYS)
