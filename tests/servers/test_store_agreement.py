"""MemoryStore, RedisStore and the rule itself agree on random requests, call by call."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from uuid import uuid4

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
    Threshold,
    admit,
)
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.redis import RedisServer
from tests.servers.stores import used

KEYS = (
    "plain",
    str(CountKey("search", "user_id", "ada")),
    str(CountKey("search", "user_id", "ada", 86_400, 40_000)),
    str(CountKey("__all__", "tenant", "Grüße:{*}", 3600, 900_000)),
)
COUNTERS = ("a", "b", "c", "d", "Zähler %2F\ud800")
LIMITS = ("one", "two", "drei: 100 %\n", "\ud800")
SCOPES = ("thread", "run", "%41 ü")
ATTEMPTS = ("", "x", "y", "z")
REQUESTS = ("", "i", "j", "k")

counters = st.builds(
    Counter,
    key=st.none() | st.sampled_from(KEYS),
    used=st.integers(0, 3) | st.just(10**15),
    expires_at=st.none() | st.sampled_from([5e9, 5e9 + 0.5]),
    mirrored=st.booleans(),
)
compensations = st.builds(
    Compensation,
    id=st.sampled_from(["s", "t", "u", "v"]),
    amounts=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([-7, -1, 0, 2]), max_size=3),
    attempt_id=st.none() | st.sampled_from(ATTEMPTS),
    idempotency_key=st.sampled_from(REQUESTS),
    starts=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9), max_size=2),
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
        most=st.sampled_from([0, 1, 2, 3, 4, 5, -2, 10**15, 2**53 - 1]),
        enforced=st.booleans(),
    )
    thresholds = draw(st.lists(over, max_size=4))
    hits = []
    for _ in range(draw(st.integers(0, 4))):
        amount = draw(st.sampled_from([1, 1, 2, 0, 10**14]))
        amounts = dict.fromkeys(draw(st.sampled_from([names, names[:1], names[1:]])), amount)
        order = thresholds if draw(st.booleans()) else thresholds[::-1]
        hits.append(Hits(amounts, tuple(each for each in order if each.counter in amounts)))
    return AcquireRequest(
        draw(st.sampled_from(REQUESTS)),
        draw(st.sampled_from(ATTEMPTS)),
        {name: draw(counters) for name in names},
        tuple(hits),
        draw(st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 3), max_size=2)),
        tuple(draw(st.lists(compensations, max_size=2))),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[AcquireRequest]:
    """Requests; some are tried again, with what a caller may have changed or compensates."""
    made: list[AcquireRequest] = []
    for _ in range(draw(st.integers(1, 8))):
        asked = draw(requests())
        if draw(st.booleans()) and made:
            earlier = draw(st.sampled_from(made))
            undone = replace(
                draw(compensations),
                attempt_id=earlier.attempt_id,
                idempotency_key=earlier.idempotency_key,
            )
            again = (
                earlier,
                replace(earlier, counters=dict(draw(st.permutations([*earlier.counters.items()])))),
                replace(earlier, attempt_id=asked.attempt_id, compensations=(undone,)),
                replace(asked, idempotency_key=earlier.idempotency_key),
                replace(asked, compensations=(undone,)),
            )
            asked = draw(st.sampled_from(again))
        made.append(asked)
    return made


@dataclass
class Model:
    """What stores promise, said as plainly as can be, without time."""

    counts: dict[str, int] = field(default_factory=dict)
    results: dict[str, AcquireResult] = field(default_factory=dict)
    made: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    compensated: set[str] = field(default_factory=set)

    def acquire(self, request: AcquireRequest) -> AcquireResult:
        for compensation in request.compensations:
            if compensation.id not in self.compensated:
                self.compensated.add(compensation.id)
                self.compensate(compensation)
        if request.attempt_id in self.refused:
            raise QuotaStoreError("compensated")
        known = self.results.get(request.idempotency_key)
        if known is None:
            return self.admit(request)
        if (len(known.used), len(known.admitted)) != (len(request.counters), len(request.hits)):
            raise QuotaStoreError("form")
        return replace(
            known, used=dict(zip(request.counters, known.used.values(), strict=True)), replayed=True
        )

    def admit(self, request: AcquireRequest) -> AcquireResult:
        used = {
            name: self.counts.get(counter.key or "", counter.used)
            for name, counter in request.counters.items()
        }
        result = admit(request.hits, used, request.stops)
        charged: dict[str, int] = {}
        for name, amount in result.charged(request.hits).items():
            key = request.counters[name].key
            if key and amount:
                charged[key] = charged.get(key, 0) + amount
                self.add(key, amount, request.counters[name].used)
        if charged:
            if request.idempotency_key:
                self.results[request.idempotency_key] = result
            if request.attempt_id:
                self.made[request.attempt_id] = (request.idempotency_key, charged)
        return result

    def compensate(self, compensation: Compensation) -> None:
        if compensation.attempt_id:
            self.refused.add(compensation.attempt_id)
            key, charged = self.made.pop(compensation.attempt_id, ("", {}))
            self.results.pop(key, None)
            for each, amount in charged.items():
                self.add(each, -amount)
        if compensation.idempotency_key not in self.results:
            for each, amount in compensation.amounts.items():
                self.add(each, amount, compensation.starts.get(each, 0))

    def add(self, key: str, amount: int, start: int = 0) -> None:
        if amount > 0 or key in self.counts:
            self.counts[key] = max(0, self.counts.get(key, start) + amount)


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of the module's server, which is emptied afterwards."""
    with redis_server.client() as client:
        yield client
        client.flushall()


def outcome(store: Model | QuotaStore, request: AcquireRequest) -> AcquireResult | None:
    """The answer; `None` for a refusal of the whole."""
    try:
        return store.acquire(request)
    except QuotaStoreError:
        return None


@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(asked=histories())
def test_all_agree(client: redis.Redis, asked: list[AcquireRequest]) -> None:
    """The same requests get the same answers, and leave the same counts, limits and windows."""
    model, memory = Model(), MemoryStore()
    shared = RedisStore(client, prefix=uuid4().hex)
    for request in asked:
        expected = outcome(model, request)
        assert outcome(memory, request) == expected
        assert outcome(shared, request) == expected
        kept = memory.peek(KEYS)
        assert shared.peek(KEYS) == kept
        assert used(memory, *KEYS) == [model.counts.get(key) for key in KEYS]
