"""What every store promises, on MemoryStore, RedisStore and PostgresStore.

Which calls are admitted, and what is charged, is compared on random requests in test_agreement.py.
"""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota import MemoryStore, Quota, QuotaMiddleware, RedisStore, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.testing import ScriptedChatModel
from tests.server.postgres import PostgresServer
from tests.server.prometheus import eventually
from tests.server.stores import batch, calls, correcting, settlement, used
from tests.store.conftest import Place, Store, Stores
from tests.telemetry import telling

KEY, OTHER, BOB = "search:user_id:ada", "email:user_id:ada", "search:user_id:bob"
DAY, DAY_ENDS = "search:user_id:ada:86400:46296", 46_297 * 86_400
OURS = "FROM pg_stat_activity WHERE application_name = 'langchain-quota'"
LONG = 3600
"""A lease that no test outlasts, in seconds."""

TELEMETRY = telling().telemetry


class TestAcquire:
    """A batch of calls."""

    def test_stopped_batch_charges_nothing(self, store: Store) -> None:
        """When refusals stop the batch, the calls that were admitted are not counted either."""
        request = batch({"a": 1, "b": 1}, {"a": 1}, limits={"a": 1}, stops={"limit": 1})
        result = store.acquire(request)
        assert (result.admitted, result.stopped) == ((True, False), True)
        assert used(store, "a", "b") == [None, None]

    def test_money_near_its_bound(self, store: Store) -> None:
        """Counts, holds, limits and grants of nine million dollars are exact to the billionth."""
        key, most = "model.nanodollars:tenant:acme", 9 * 10**15
        held = batch({key: most - 3}, limits={key: most}, leases={key: LONG})
        assert store.acquire(held).admitted == (True,)
        store.acquire(correcting(settlement(held, {key: most - 4})))
        twos = batch(*[{key: 2}] * 3, limits={key: most})
        for _ in range(2):  # the second answer is remembered
            result = store.acquire(twos)
            assert (result.used, result.admitted) == ({key: most - 4}, (True, True, False))
        more = store.grant(key, "7199.254740991")
        assert store.grants() == [more]
        assert more.amount + most == 2**53 - 1
        rest = batch({key: more.amount}, {key: 1}, limits={key: most})
        assert store.acquire(rest).admitted == (True, False)
        [usage] = store.peek([key])
        assert usage is not None
        assert (usage.used, usage.limit, usage.granted) == (2**53 - 1, most, more.amount)
        assert store.grant(key, 9_000_000).amount == most

    def test_large_batch(self, store: Store) -> None:
        """A batch of many calls over many counts is one step like any other."""
        keys = [f"search:user_id:{number}" for number in range(300)]
        amounts = [{keys[index]: 1, keys[(index + 1) % 300]: 1} for index in range(300)]
        request = batch(*amounts * 10, limits=dict.fromkeys(keys, 2))
        result = store.acquire(request)
        assert result.admitted == (True,) * 300 + (False,) * 2700
        assert used(store, *keys) == [2] * 300
        assert store.acquire(request).refused == result.refused
        store.acquire(correcting(Correction("all", attempt_id=request.attempt_id)))
        assert used(store, *keys) == [0] * 300

    def test_a_lease_needs_a_name(self, store: Store) -> None:
        """Without an idempotency key nothing could settle it: ValueError, nothing charged."""
        with pytest.raises(
            ValueError, match=r"idempotency_key must not be empty: .* 'search:user_id:ada'"
        ):
            store.acquire(batch({KEY: 5}, leases={KEY: LONG}, key=""))
        assert used(store, KEY) == [None]


class TestCounts:
    """What is kept under keys."""

    def test_peek(self, store: Store) -> None:
        """A peek tells count, end of window and the latest charge's lowest limit, as asked."""
        counters = {"day": CountRef(DAY, 0, float(DAY_ENDS)), "all": CountRef(KEY)}
        over = (
            Threshold("b", "user_id", "day", 7),
            Threshold("a", "user_id", "day", 5),
            Threshold("try", "user_id", "day", 0, enforced=False),
        )
        for limits in (over[:1], over):
            store.acquire(AcquireRequest("", "", counters, (Demand({"day": 1, "all": 1}, limits),)))
        store.acquire(correcting(Correction("late", {DAY: 2})))
        day = QuotaUsage(DAY, 4, 5, DAY_ENDS)
        for _ in range(2):
            found = store.peek([OTHER, DAY, KEY, DAY])
            assert found == (None, day, QuotaUsage(KEY, 2, None, None), day)
        assert store.peek([]) == ()

    def test_usages(self, make: Stores, store: Store) -> None:
        """All counts of a store, or those whose keys match a pattern, sorted; none of another's."""
        odd = r"odd[key]\*"
        for key in (KEY, OTHER, BOB):
            store.acquire(calls(key, 1))
        store.acquire(correcting(Correction("odd", {odd: 1})))
        patterns = {
            "*": [OTHER, odd, KEY, BOB],
            "*:ada": [OTHER, KEY],
            "search:user_id:b?b": [BOB],
            "[es]*:[!a]*:bob": [BOB],
            r"odd[[]key]\[*]": [odd],
            "SEARCH:*": [],
        }
        for pattern, found in patterns.items():
            assert [each.key for each in store.usages(pattern)] == found
        assert store.usages(KEY) == [QuotaUsage(KEY, 1, 100, None)]
        assert make().usages() == []

    @pytest.mark.parametrize(("dimension", "days"), [("run", 1), ("root_run", 7)])
    def test_count_of_a_run_expires(self, make: Stores, dimension: str, days: int) -> None:
        """A run's count has a shorter idle time, however it was made, and none that is longer."""
        make.wait(0)
        store, short = make(), make(idle_ttl=timedelta(seconds=1))
        runs = [f"search:{dimension}:{how}" for how in ("charged", "late", "reset")]
        others = ["search:running:a", "run:user_id:b"]
        store.acquire(batch({runs[0]: 1, **dict.fromkeys(others, 1)}))
        store.acquire(correcting(Correction("late", {runs[1]: 1})))
        store.reset(runs[2:])
        short.acquire(calls(runs[0], 1))
        make.wait(days * 86_400 - 1)
        assert used(store, *runs) == [1, 1, 0]
        make.wait(1)
        assert used(store, *runs, *others) == [None, None, None, 1, 1]
        assert used(short, runs[0]) == [None]


async def test_async_forms(store: Store) -> None:
    """They do the same, one that has to undo something included."""
    assert isinstance(store, QuotaStore)
    lost = calls(KEY, 3, limit=2)
    result = await store.aacquire(lost)
    assert (result.admitted, result.refused[2]) == ((True, True, False), {"limit": KEY})
    assert (await store.aacquire(lost)).replayed
    undo = Correction("lost", {OTHER: 1}, lost.attempt_id)
    await store.aacquire(correcting(undo))
    assert await store.apeek([KEY, OTHER]) == store.peek([KEY, OTHER])
    assert used(store, KEY, OTHER) == [0, 1]
    with pytest.raises(QuotaStoreError, match="corrected before"):
        await store.aacquire(lost)
    await store.areset([OTHER])
    assert used(store, OTHER) == [0]
    assert await store.apeek([]) == ()
    await store.areset([])
    given = await store.agrant(KEY, 3, window=None, id="4711")
    assert store.grants() == [given]
    assert await store.arevoke(KEY, "4711") is not None
    assert store.revoke(KEY, "4711") is None
    if isinstance(store, RedisStore):
        await store.aclose()


def test_event_loops_come_and_go(place: Place, store: Store) -> None:
    """A loop that ended leaves no connection; closed, a store can be used all the same."""
    server = place.server

    def connected() -> int:
        if isinstance(server, PostgresServer):
            (found,) = server.query(f"SELECT count(*) {OURS}")[0]
            return int(found)
        if server is None:
            return 0
        with server.client() as client:
            return len(client.client_list()) - 1

    async def acquire() -> None:
        await asyncio.gather(*(store.aacquire(calls("search", 1)) for _ in range(5)))

    # The last loop of a test that drops its loops is let go with the next one.
    before = connected()
    for _ in range(3):
        asyncio.run(acquire())
    eventually(lambda: connected() <= before)
    store.acquire(calls("search", 1))
    if not isinstance(store, MemoryStore):
        store.close()
    eventually(lambda: connected() <= before)
    assert used(store, "search") == [16]


# A transport of a closed loop says so when it is collected.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_loops_that_end_without_rites(store: Store) -> None:
    """Event loops that are closed as Flask and Celery code does are let go, with their clients."""
    loops = []
    for _ in range(5):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(store.aacquire(calls("search", 1)))
        loop.close()
        loops.append(weakref.ref(loop))
        del loop
    gc.collect()
    assert len([loop for loop in loops if loop() is not None]) <= 1  # until the next one
    # Here, where the warnings of the last one are expected.
    asyncio.run(store.aacquire(calls("search", 1)))
    gc.collect()


def test_names_of_any_form(store: Store) -> None:
    """All names may be any text, of any length."""
    odd = "\ud800 ':{}*\n%é" * 500
    demand = Demand({odd: 1}, (Threshold(odd, odd, odd, 1),))
    request = AcquireRequest(odd, odd, {odd: CountRef(odd)}, (demand, demand), {odd: 2})
    result = store.acquire(request)
    assert (result.used, result.refused) == ({odd: 0}, ({}, {odd: odd}))
    assert store.acquire(request).refused == result.refused
    store.acquire(correcting(Correction(odd, attempt_id=odd)))
    assert used(store, odd) == [0]


async def admitted(store: Store, attempts: int) -> int:
    """How many of so many requests at the same time are admitted, of 100."""
    asked = [calls("search", 1, limit=100, key="", attempt="") for _ in range(attempts)]
    results = await asyncio.gather(*map(store.aacquire, asked))
    return sum(each for result in results for each in result.admitted)


class TestAtOnce:
    """Many callers at the same time: no more is admitted than there is, and no less."""

    async def test_tasks(self, store: Store) -> None:
        """More tasks than there are connections, on one event loop: exactly 100 are admitted."""
        assert await admitted(store, 300) == 100

    def test_event_loops(self, store: Store) -> None:
        """One store on several event loops, each in its thread: exactly 100 are admitted."""
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda _: asyncio.run(admitted(store, 50)), range(4))) == 100

    def test_grants(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        """Threads give the same ten grants while they ask: each counts, and is logged, once."""

        def ask(number: int) -> int:
            store.grant(KEY, 7, window=None, id=str(number % 10), by=str(number))
            return sum(store.acquire(calls(KEY, 4)).admitted)

        with caplog.at_level("INFO", "langchain_quota"), ThreadPoolExecutor(40) as threads:
            assert sum(threads.map(ask, range(100))) == 100 + 10 * 7
        kept = [(each.id, each.by) for each in store.grants()]
        assert [each for each, _ in sorted(kept)] == [str(number) for number in range(10)]
        logged = [vars(each) for each in caplog.records]
        assert sorted((each["quota_grant"], each["quota_by"]) for each in logged) == sorted(kept)
        assert granted(store) == 70


def granted(store: Store) -> int:
    """What is granted now."""
    (use,) = store.peek([KEY])
    return 0 if use is None else use.granted


class TestGrants:
    """More than the limits say, for one count."""

    def test_given_once_and_logged(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        """Asked for again by its id it is the first one; what is given and ended is logged once."""
        with caplog.at_level("INFO", "langchain_quota"):
            grant = store.grant(KEY, 3, window=None, reason="ticket 4711", by="bo", id="4711")
            assert store.grant(KEY, 9, window=None, id="4711") == grant
            assert (granted(store), store.grants("search:*")) == (3, [grant])
            store.revoke(KEY, "4711")
            store.revoke(KEY, "4711")
        first, second = caplog.records
        assert grant.until is not None
        told = {name: value for name, value in vars(first).items() if name.startswith("quota_")}
        assert told == {
            "quota_event": "granted",
            "quota_key": KEY,
            "quota_grant": "4711",
            "quota_amount": 3,
            "quota_unit": "calls",
            "quota_until": grant.until.isoformat(),
            "quota_reason": "ticket 4711",
            "quota_by": "bo",
        }
        assert "reason 'ticket 4711'" in first.getMessage()
        assert (vars(second)["quota_event"], vars(second)["quota_grant"]) == ("revoked", "4711")

    def test_a_grant_ends_with_its_window(self, store: Store) -> None:
        """Later than that is not granted; in a window that is over nothing is."""
        late = datetime.fromtimestamp(5e9, UTC)
        assert store.grant(DAY, 3, until=late).until == datetime.fromtimestamp(DAY_ENDS, UTC)
        # An end between two seconds is the one before, so that no grant ends late.
        between = late.replace(microsecond=900_000)
        assert store.grant(KEY, 3, window=None, until=between).until == late
        with pytest.raises(ValueError, match="that time is over"):
            store.grant("search:user_id:ada:86400:9", 3)
        with pytest.raises(ValueError, match="that time is over"):
            store.grant(KEY, 3, window=None, until=datetime.fromtimestamp(1e9, UTC))

    def test_a_grant_is_new_once(self, make: Stores) -> None:
        """A request learns of what was granted since the last one, though older grants end."""
        store, news = make(), []
        for amount in (5, 6, 7):
            make.wait(60)
            until = datetime.fromtimestamp(make.clock.now + 30, UTC)
            store.grant(KEY, amount, window=None, until=until)
            news += [dict(store.acquire(calls(KEY, 1)).newly_granted) for _ in range(2)]
        assert [sum(each.values()) for each in news] == [5, 0, 6, 0, 7, 0]

    def test_a_grant_may_last_for_ever(self, store: Store) -> None:
        """An end, or a window, that no time can be given for is the last one that can be."""
        last = datetime.max.replace(tzinfo=UTC)
        assert store.grant(KEY, 3, window=None, until=last).until == last
        assert store.grant(f"{KEY}:86400:{10**10}", 3).until == last
        assert [each.until for each in store.grants()] == [last, last]
        assert granted(store) == 3


SMOOTH = "search:user_id:ada:60~60"
"""A count that drains by a call each second."""


class TestMarks:
    """Which share of a limit was told."""

    async def test_of_what_is_used(self, store: Store) -> None:
        """The highest threshold is marked, once for each limit, by what is not only reserved."""
        assert await store.mark(KEY, "calls", [1]) == (None, 0)
        held = batch({KEY: 40}, leases={KEY: LONG})
        store.acquire(calls(KEY, 55))
        store.acquire(held)
        assert await store.mark(KEY, "calls", [50, 80, 95]) == (55, 50)
        assert await store.mark(KEY, "calls", [50, 80, 95]) == (None, 50)
        store.acquire(correcting(settlement(held, {KEY: 43})))
        assert await store.mark(KEY, "calls", [50, 80, 95]) == (98, 95)
        assert await store.mark(KEY, "other", [50, 100]) == (98, 50)
        assert used(store, KEY) == [98]

    async def test_until_a_reset(self, store: Store) -> None:
        """A reset forgets what was told, and keeps grants; neither raises the other."""
        store.grant(KEY, 7, window=None)
        store.acquire(calls(KEY, 8))
        assert await store.mark(KEY, "calls", [5]) == (8, 5)
        store.reset([KEY])
        assert await store.mark(KEY, "calls", [5]) == (None, 0)
        store.acquire(calls(KEY, 6))
        assert await store.mark(KEY, "calls", [5]) == (6, 5)
        (usage,) = store.peek([KEY])
        assert usage is not None
        assert usage.granted == 7

    async def test_at_once(self, store: Store) -> None:
        """Of many who ask at the same moment, one is to tell."""
        store.acquire(calls(KEY, 9))
        asked = [store.mark(KEY, "calls", [5]) for _ in range(9)]
        assert sorted(await asyncio.gather(*asked), key=str) == [(9, 5)] + [(None, 5)] * 8


class TestFreezes:
    """Subjects whose calls operators have stopped."""

    def test_block_all_but_what_lets_calls_run(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Leases and rate limiters go on, so does an answer that was given; no limit is shown."""
        caplog.set_level("INFO", "langchain_quota")
        quota: Any = QuotaMiddleware(
            [ToolCallLimit(quotas=[Quota(1, per="user_id")])], store=store, telemetry=TELEMETRY
        )
        slot, before = "search:concurrency:", calls(KEY, 1, limit=2**53 - 1)
        assert store.acquire(before).admitted == (True,)
        quota.freeze(until=datetime(9000, 1, 1, tzinfo=UTC))
        quota.freeze(user_id="ada", reason="abuse", by="bo")
        result = store.acquire(batch({slot: 1, KEY: 1}, {slot: 1}, limits={KEY: 2**53 - 1}))
        assert (result.refused, result.admitted) == (({"limit": KEY}, {}), (False, True))
        assert (result.frozen, result.freezes) == ((KEY,), 2)
        assert [(use.used, use.limit) for use in store.usages()] == [(1, None)] * 2
        again = store.acquire(before)
        assert (again.admitted, again.replayed, again.frozen) == ((True,), True, ())
        limiter = store.rate_limiter("openai", requests=60, window="1m")
        assert limiter.acquire(blocking=False)
        assert [(each.key, each.amount, each.by, each.until) for each in store.grants()] == [
            ("::", 0, "", datetime(9000, 1, 1, tzinfo=UTC)),
            (":user_id:ada", 0, "bo", None),
        ]
        assert sorted(asyncio.run(store.freezes("")), key=str) == store.grants()
        assert quota.thaw()
        assert store.acquire(calls(OTHER, 1)).frozen == (OTHER,)
        assert quota.thaw(user_id="ada")
        assert store.acquire(calls(KEY, 1)).admitted == (True,)
        assert caplog.messages == [
            "all calls are frozen until 9000-01-01T00:00:00+00:00, by '', reason ''",
            "the calls of user_id 'ada' are frozen until they are thawed, by 'bo', reason 'abuse'",
            "all calls are thawed, by '', reason ''",
            "the calls of user_id 'ada' are thawed, by '', reason 'abuse'",
        ]

    def test_come_before_exhausted_counts(self, store: Store) -> None:
        """A limit that is exhausted, too, refuses with the frozen scope; the last freeze counts."""
        limit = ToolCallLimit(quotas=[Quota(1, per="user_id"), Quota(1, per="tenant")])
        quota: Any = QuotaMiddleware([limit], store=store, telemetry=TELEMETRY)
        tenant = "search:tenant:acme"
        for reason in ("first", "second"):
            quota.freeze(tenant="acme", reason=reason)
        assert [freeze.reason for freeze in store.grants()] == ["second"]
        asked = batch({OTHER: 1, tenant: 1}, limits={OTHER: 0, tenant: 9})
        result = store.acquire(asked)
        assert (result.refused, result.frozen) == (({"limit": tenant},), (tenant,))


class TestSmooth:
    """A count that drains."""

    def test_a_clock_that_goes_back(self, make: Stores) -> None:
        """It closes a count for no longer than before, drains on, and never reopens it early."""
        store, key = make(), SMOOTH
        make.wait(0)
        assert store.acquire(calls(key, 3, limit=3)).admitted == (True,) * 3
        make.wait(-3600)
        assert used(store, key) == [3]
        refused = store.acquire(calls(key, 1, limit=3))
        assert (refused.admitted, refused.drained_in) == ((False,), {key: 3_000_000})
        make.wait(1)
        assert store.acquire(calls(key, 2, limit=3)).admitted == (True, False)
        make.wait(-5)
        store.acquire(correcting(Correction("refund", {key: -1})))
        make.wait(3)
        assert store.acquire(calls(key, 4, limit=3)).admitted == (True, True, True, False)

    def test_what_is_behind_a_hold_moves_up(self, make: Stores) -> None:
        """Only what is not drained of a hold is given back, by the place that it has now."""
        store, key = make(), f"{KEY}:3600~10000"
        make.wait(0)
        first, *others = (batch({key: 2000}, leases={key: LONG}) for _ in range(4))
        for request in (first, *others, batch({key: 3000})):
            store.acquire(request)
        store.acquire(correcting(settlement(first, {key: 0})))
        make.wait(1800)
        assert used(store, key) == [4000]
        for request in others:
            store.acquire(correcting(settlement(request, {key: 0})))
        assert used(store, key) == [3000]

    def test_holds_are_bounded(self, store: Store) -> None:
        """About a thousand requests hold a part at most; the next one is an error."""
        key = f"{KEY}:60~9999"
        held = [batch({key: 1}, leases={key: LONG}) for _ in range(1001)]

        async def hold() -> None:
            await asyncio.gather(*map(store.aacquire, held[:990]))

        asyncio.run(hold())
        with pytest.raises(QuotaStoreError, match=f"1000 requests hold a part of '{key}'"):
            [*map(store.acquire, held[990:])]
        store.acquire(correcting(settlement(held[0], {key: 0})))
        assert store.acquire(held[1000]).admitted == (True,)

    def test_takes_no_grants(self, store: Store) -> None:
        """A grant would end at no time: it is refused, with what to do instead."""
        with pytest.raises(ValueError, match="takes no grants: raise its limit or its burst"):
            store.grant(SMOOTH, 1)

    def test_the_longest_delay_holds(self, store: Store) -> None:
        """A shorter one changes nothing."""
        for seconds in (3600, 1):
            store.delay(SMOOTH, seconds)
        refused = store.acquire(calls(SMOOTH, 1, limit=3))
        assert refused.admitted == (False,)
        assert refused.drained_in[SMOOTH] > 3 * 10**9

    def test_no_other_count_is_delayed(self, store: Store) -> None:
        """What does not drain cannot be closed for a while: it is an error."""
        with pytest.raises(ValueError, match="key must be that of a smooth count, not 'search:us"):
            store.delay(KEY, 1)

    def test_rate_limiter(self, make: Stores) -> None:
        """It is LangChain's, is shared by name, and waits in the order of arrival."""
        store = make()
        store = MemoryStore() if isinstance(store, MemoryStore) else store
        first, second = (
            store.rate_limiter("openai", requests=50, window="1s", burst=2) for _ in range(2)
        )
        others = store.rate_limiter("others", requests=1, window="1h")
        assert isinstance(first, BaseRateLimiter)
        assert [others.acquire(blocking=False) for _ in range(2)] == [True, False]
        order: list[int] = []

        async def call(number: int) -> None:
            assert await (first if number % 2 else second).aacquire()
            order.append(number)

        async def together() -> None:
            await asyncio.gather(*map(call, range(6)))

        asyncio.run(together())
        assert order == [*range(6)]
        assert first.acquire()
        ScriptedChatModel(script=["Yes."], rate_limiter=second).invoke("Really?")

    def test_rate_limiter_in_an_outage(self) -> None:
        """No call is allowed that the store has not counted."""
        store = RedisStore("redis://127.0.0.1:1", timeout=5)
        with pytest.raises(QuotaStoreError):
            store.rate_limiter("openai", requests=1, window="1s").acquire()
        by_tenant = RedisStore("redis://127.0.0.1:1", prefix=lambda state, runtime: "acme")
        with pytest.raises(ValueError, match="whose prefix is a string"):
            by_tenant.rate_limiter("openai", requests=1, window="1s")
