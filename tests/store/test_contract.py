"""What every store promises, on MemoryStore, RedisStore and PostgresStore.

Which calls are admitted, and what is charged, is compared on random requests in test_agreement.py.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from langchain_core.rate_limiters import BaseRateLimiter

from langchain_quota import Quota, QuotaMiddleware, ToolCallLimit
from langchain_quota.core.admission import AcquireRequest, Correction, CountRef, Demand, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.postgres import PostgresStore
from langchain_quota.stores.redis import RedisStore
from langchain_quota.testing import ScriptedChatModel
from tests.server.postgres import PostgresServer, time_of
from tests.server.redis import RedisServer, let_pass, time_from
from tests.server.stores import batch, calls, correcting, settlement, used
from tests.stores import Clock
from tests.telemetry import telling

KEY = str(CountKey("search", "user_id", "ada"))
OTHER = str(CountKey("email", "user_id", "ada"))
DAY = CountKey.at("search", "user_id", "ada", timedelta(days=1), 4e9)
LONG = 3600
"""A lease that no test outlasts, in seconds."""

TELEMETRY = telling().telemetry

Store = MemoryStore | RedisStore | PostgresStore


class Stores:
    """Makes stores of one kind, whose time passes as a test says.

    Args:
        server: The server that they are in; `None` for memory.
        url: How it is reached.
        opened: Closes them.
    """

    def __init__(
        self, server: RedisServer | PostgresServer | None, url: str, opened: ExitStack
    ) -> None:
        self._server, self._url, self._opened = server, url, opened
        self._clock = Clock(time.time())

    def __call__(self, *, idle_ttl: timedelta = timedelta(days=365)) -> Store:
        if self._server is None:
            return MemoryStore(idle_ttl=idle_ttl, clock=self._clock)
        kind = RedisStore if isinstance(self._server, RedisServer) else PostgresStore
        # The machine may be busy: only what is about timeouts has short ones.
        store = kind(self._url, prefix=self._server.prefix(), timeout=30, idle_ttl=idle_ttl)
        self._opened.callback(store.close)
        return store

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if self._server is None:
            self._clock.now += seconds
            return
        if isinstance(self._server, PostgresServer):
            self._clock.now += seconds
            self._opened.enter_context(time_of(self._clock))
            return
        client = self._opened.enter_context(self._server.client())
        self._opened.enter_context(time_from("now"))
        let_pass(client, "now", self._clock, seconds)


@pytest.fixture(params=["memory", "redis", "postgres"])
def make(request: pytest.FixtureRequest) -> Iterator[Stores]:
    """Makes stores of one kind."""
    get, kind, server, url = request.getfixturevalue, request.param, None, ""
    if kind == "redis":
        server, url = get("redis_server"), get("redis_server").url
    elif kind == "postgres":
        server, url = get("postgres_server"), get("postgres_url")
    with ExitStack() as opened:
        yield Stores(server, url, opened)


@pytest.fixture
def store(make: Stores) -> Store:
    """A store of one kind, with nothing in it."""
    return make()


class TestAcquire:
    """A batch of calls."""

    def test_says_which_limits_refuse_which_call(self, store: Store) -> None:
        """Dry-run limits are reported, too, and refuse nothing."""
        trial = Threshold("trial", "user_id", "searches", 0, enforced=False)
        most = Threshold("most", "user_id", "searches", 2)
        own = Threshold("most", "run", "own", 8)
        counters = {"own": CountRef(used=4), "searches": CountRef(KEY, used=1)}
        demands = (
            Demand({"own": 1, "searches": 1}, (own, most)),
            Demand({"own": 5, "searches": 1}, (trial, own, most)),
            Demand({"own": 1}, (own,)),
            Demand({}),
        )
        result = store.acquire(AcquireRequest("", "", counters, demands, {"most": 2}))
        assert result.used == {"own": 4, "searches": 1}
        assert result.refused == ({}, {"trial": "user_id", "most": "run"}, {}, {})
        assert result.admitted == (True, False, True, True)
        assert (result.stopped, result.replayed) == (False, False)
        assert used(store, KEY) == [2]

    def test_money_near_its_bound(self, store: Store) -> None:
        """Counts, holds, limits and grants of nine million dollars are exact to the billionth."""
        key, most = str(CountKey("model.nanodollars", "tenant", "acme")), 9 * 10**15
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

    @pytest.mark.parametrize("trial_first", [True, False])
    def test_a_dry_run_lifts_no_refusal(self, store: Store, trial_first: bool) -> None:  # noqa: FBT001
        """What an enforced limit refuses stays refused, wherever a dry-run limit stands."""
        trial = Threshold("trial", "user_id", "searches", 0, enforced=False)
        most = Threshold("most", "user_id", "searches", 0)
        thresholds = (trial, most) if trial_first else (most, trial)
        demands = (Demand({"searches": 1}, thresholds),)
        result = store.acquire(AcquireRequest("", "", {"searches": CountRef(KEY)}, demands))
        assert result.refused == ({"trial": "user_id", "most": "user_id"},)
        assert result.admitted == (False,)
        assert used(store, KEY) == [None]

    def test_stopped_batch_charges_nothing(self, store: Store) -> None:
        """When refusals stop the batch, the calls that were admitted are not counted either."""
        result = store.acquire(
            batch({KEY: 1, OTHER: 1}, {KEY: 1}, limits={KEY: 1}, stops={"limit": 1})
        )
        assert (result.admitted, result.stopped) == ((True, False), True)
        assert used(store, KEY, OTHER) == [None, None]

    def test_missing_key_begins_at_the_callers_count(self, store: Store) -> None:
        """A key that does not exist starts where the caller counts; later its own count holds."""
        refused = store.acquire(batch({KEY: 1}, limits={KEY: 3}, used={KEY: 3}))
        assert (refused.admitted, used(store, KEY)) == ((False,), [None])
        first = store.acquire(batch({KEY: 1}, used={KEY: 3}))
        assert (first.used, used(store, KEY)) == ({KEY: 3}, [4])
        second = store.acquire(batch({KEY: 1}, used={KEY: 1}))
        assert (second.used, used(store, KEY)) == ({KEY: 4}, [5])

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


class TestReplay:
    """A request that was made before."""

    def test_is_not_charged_again(self, store: Store) -> None:
        """It is answered as before, whatever happened since; counters are matched by position."""
        request = calls(KEY, 3, limit=2)
        store.acquire(request)
        store.reset([KEY])
        renamed = Threshold("new", "thread", "x", 0)
        again = AcquireRequest(
            request.idempotency_key,
            "",
            {"x": CountRef(OTHER, 7)},
            (Demand({"x": 1}, (renamed,)),) * 3,
        )
        result = store.acquire(again)
        assert (result.used, result.replayed) == ({"x": 0}, True)
        assert result.admitted == (True, True, False)
        assert result.refused == ({}, {}, {"limit": KEY})
        assert used(store, KEY, OTHER) == [0, None]

    def test_of_another_form_is_an_error(self, store: Store) -> None:
        """An answer is not given to a batch that it does not fit, even of the same size in all."""
        store.acquire(batch({KEY: 1}, {KEY: 1}, key="one"))
        with pytest.raises(QuotaStoreError, match="another form"):
            store.acquire(batch({KEY: 1, OTHER: 1}, key="one"))
        assert used(store, KEY, OTHER) == [2, None]


class TestCorrections:
    """CorrectionQueue that travel with a request."""

    def test_are_made_first_and_once(self, store: Store) -> None:
        """What is taken back makes room for the batch, however often it is sent, once."""
        store.acquire(calls(KEY, 3, limit=3))
        refund = Correction("refund", {KEY: -1})
        request = calls(KEY, 2, limit=3, corrections=[refund, refund])
        result = store.acquire(request)
        assert (result.used, result.admitted) == ({KEY: 2}, (True, False))
        other = Correction("other", {KEY: -1})
        again = calls(KEY, 2, key=request.idempotency_key, corrections=[refund, other])
        assert store.acquire(again).replayed
        assert used(store, KEY) == [2]

    def test_an_undone_request_is_not_remembered(self, store: Store) -> None:
        """What was undone is no answer to the next attempt of its request, which is charged."""
        lost = calls(KEY, 2)
        store.acquire(lost)
        undo = Correction(lost.attempt_id, attempt_id=lost.attempt_id)
        again = calls(KEY, 2, key=lost.idempotency_key, corrections=[undo])
        result = store.acquire(again)
        assert (result.replayed, result.used, used(store, KEY)) == (False, {KEY: 0}, [2])
        assert store.acquire(again).replayed

    def test_take_back_what_there_is(self, store: Store) -> None:
        """More than there is cannot be taken back, and a refund makes no key."""
        store.acquire(calls(KEY, 1))
        store.acquire(correcting(Correction("refund", {KEY: -5, OTHER: -1})))
        assert used(store, KEY, OTHER) == [0, None]

    def test_count_what_has_run(self, store: Store) -> None:
        """A positive amount makes a key, and begins where the caller says."""
        late = Correction("late", {KEY: 2, str(DAY): 1}, starts={KEY: 5})
        store.acquire(correcting(late, Correction("later", {KEY: 1}, starts={KEY: 9})))
        assert store.peek([KEY, str(DAY)]) == (
            QuotaUsage(KEY, 8, None, None),
            QuotaUsage(str(DAY), 1, None, DAY.ends),
        )

    def test_refuse_an_attempt_that_comes_later(self, store: Store) -> None:
        """An attempt that was corrected charges nothing; what it compensates itself holds."""
        late = calls(KEY, 1, corrections=[Correction("other", {OTHER: 1})])
        store.acquire(correcting(Correction("late", attempt_id=late.attempt_id)))
        for _ in range(2):
            with pytest.raises(QuotaStoreError, match="corrected before") as refused:
                store.acquire(late)
            assert not refused.value.timed_out
        assert used(store, KEY, OTHER) == [None, 1]


class TestLeases:
    """What is only held, until it is settled."""

    def test_lease_that_is_over(self, make: Stores, store: Store) -> None:
        """What nobody settles is given back, and nothing else; a late settlement charges all."""
        make.wait(0)
        crashed = batch({KEY: 60, str(DAY): 5}, leases={KEY: 60, str(DAY): 60})
        running = batch({KEY: 10}, leases={KEY: LONG})
        for request in (crashed, running, calls(KEY, 3)):
            store.acquire(request)
        assert used(store, KEY, str(DAY)) == [73, 5]
        make.wait(59)
        assert used(store, KEY, str(DAY)) == [73, 5]
        make.wait(2)
        assert used(store, KEY, str(DAY)) == [13, 0]
        over = batch({KEY: 87}, limits={KEY: 100}, used={KEY: 99})
        assert store.acquire(over).admitted == (True,)
        late = settlement(crashed, {KEY: 20, str(DAY): 1})
        store.acquire(correcting(late, late, settlement(running, {KEY: 0})))
        assert used(store, KEY, str(DAY)) == [110, 1]

    def test_reset(self, store: Store) -> None:
        """A reset count forgets what is held: what settles it charges what was used."""
        before = batch({KEY: 60}, leases={KEY: LONG})
        store.acquire(before)
        store.reset([KEY])
        assert used(store, KEY) == [0]
        store.acquire(batch({KEY: 5}))
        store.acquire(correcting(settlement(before, {KEY: 20})))
        assert used(store, KEY) == [25]

    def test_needs_a_name(self, store: Store) -> None:
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
        assert DAY.ends is not None
        counters = {"day": CountRef(str(DAY), 0, float(DAY.ends)), "all": CountRef(KEY)}
        over = (
            Threshold("b", "user_id", "day", 7),
            Threshold("a", "user_id", "day", 5),
            Threshold("try", "user_id", "day", 0, enforced=False),
        )
        for limits in (over[:1], over):
            store.acquire(AcquireRequest("", "", counters, (Demand({"day": 1, "all": 1}, limits),)))
        store.acquire(correcting(Correction("late", {str(DAY): 2})))
        day = QuotaUsage(str(DAY), 4, 5, DAY.ends)
        for _ in range(2):
            found = store.peek([OTHER, str(DAY), KEY, str(DAY)])
            assert found == (None, day, QuotaUsage(KEY, 2, None, None), day)
        assert store.peek([]) == ()

    def test_usages(self, make: Stores, store: Store) -> None:
        """All counts of a store, or those whose keys match a pattern, sorted; none of another's."""
        odd = r"odd[key]\*"
        ada, other, bob = KEY, OTHER, str(CountKey("search", "user_id", "bob"))
        for key in (ada, other, bob):
            store.acquire(calls(key, 1))
        store.acquire(correcting(Correction("odd", {odd: 1})))
        patterns = {
            "*": [other, odd, ada, bob],
            "*:ada": [other, ada],
            "search:user_id:b?b": [bob],
            "[es]*:[!a]*:bob": [bob],
            r"odd[[]key]\[*]": [odd],
            "SEARCH:*": [],
        }
        for pattern, found in patterns.items():
            assert [each.key for each in store.usages(pattern)] == found
        assert store.usages(ada) == [QuotaUsage(ada, 1, 100, None)]
        assert make().usages() == []

    def test_idle_count_expires(self, make: Stores) -> None:
        """A count that nobody charges is forgotten when its time is over."""
        make.wait(0)
        store = make(idle_ttl=timedelta(seconds=100))
        for seconds in (0, 99):
            make.wait(seconds)
            store.acquire(calls(KEY, 1))
        make.wait(99)
        store.acquire(correcting(Correction("refund", {KEY: -1})))
        assert used(store, KEY) == [1]
        make.wait(1)
        assert used(store, KEY) == [None]
        assert store.acquire(batch({KEY: 1}, used={KEY: 2})).used == {KEY: 2}

    @pytest.mark.parametrize(("dimension", "days"), [("run", 1), ("root_run", 7)])
    def test_count_of_a_run_expires(self, make: Stores, dimension: str, days: int) -> None:
        """A run's count has a shorter idle time, however it was made, and none that is longer."""
        make.wait(0)
        store, short = make(), make(idle_ttl=timedelta(seconds=1))
        runs = [str(CountKey("search", dimension, how)) for how in ("charged", "late", "reset")]
        others = [str(CountKey("search", "running", "a")), str(CountKey("run", "user_id", "b"))]
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

    def test_threads(self, store: Store) -> None:
        """More threads than there are connections, each asking twice: exactly 100 are admitted."""
        asked = [calls("search", 1) for _ in range(120)]
        with ThreadPoolExecutor(60) as threads:
            assert sum(each.admitted[0] for each in threads.map(store.acquire, asked)) == 100

    def test_event_loops(self, store: Store) -> None:
        """One store on several event loops, each in its thread: exactly 100 are admitted."""
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda _: asyncio.run(admitted(store, 50)), range(4))) == 100


def granted(store: Store) -> int:
    """What is granted now."""
    (use,) = store.peek([KEY])
    return 0 if use is None else use.granted


def let_through(store: Store, limit: int = 2) -> int:
    """How many calls of one limit a store still admits."""
    return sum(store.acquire(calls(KEY, 50, limit=limit)).admitted)


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

    def test_a_revoked_grant_is_over_for_good(self, store: Store) -> None:
        """What was used of it stays used; the same id gives nothing any more."""
        store.grant(KEY, 3, window=None, id="4711")
        assert let_through(store) == 5
        assert store.revoke(KEY, "4711") is not None
        assert store.revoke(KEY, "another") is None
        store.grant(KEY, 3, window=None, id="4711")
        assert (store.grants(), granted(store), used(store, KEY)) == ([], 0, [5])
        assert let_through(store, limit=5) == 0

    def test_grants_end(self, make: Stores, store: Store) -> None:
        """One ends at its time, others go on."""
        make.wait(0)
        store.grant(KEY, 3, window=None, until=datetime.now(UTC) + timedelta(minutes=2))
        kept = store.grant(KEY, 5, window=None)
        assert granted(store) == 8
        make.wait(180)
        assert (store.grants(), granted(store), let_through(store)) == ([kept], 5, 7)

    def test_a_grant_ends_with_its_window(self, store: Store) -> None:
        """Later than that is not granted; in a window that is over nothing is."""
        late = datetime.fromtimestamp(5e9, UTC)
        assert store.grant(str(DAY), 3, until=late).until == DAY.resets_at
        # An end between two seconds is the one before, so that no grant ends late.
        between = late.replace(microsecond=900_000)
        assert store.grant(KEY, 3, window=None, until=between).until == late
        over = CountKey.at("search", "user_id", "ada", timedelta(days=1), 1e9)
        with pytest.raises(ValueError, match="that time is over"):
            store.grant(str(over), 3)
        with pytest.raises(ValueError, match="that time is over"):
            store.grant(KEY, 3, window=None, until=datetime.fromtimestamp(1e9, UTC))

    def test_a_grant_may_last_for_ever(self, store: Store) -> None:
        """An end, or a window, that no time can be given for is the last one that can be."""
        last = datetime.max.replace(tzinfo=UTC)
        assert store.grant(KEY, 3, window=None, until=last).until == last
        assert store.grant(f"{KEY}:86400:{10**10}", 3).until == last
        assert [each.until for each in store.grants()] == [last, last]
        assert granted(store) == 3

    def test_a_grant_begins_no_count(self, store: Store) -> None:
        """A count that a caller brings back begins where the caller's is, grant or not."""
        store.grant(KEY, 3, window=None)
        assert store.peek([KEY]) == (QuotaUsage(KEY, 0, None, None, 3),)
        result = store.acquire(batch({KEY: 1}, limits={KEY: 5}, used={KEY: 4}))
        assert (result.used, result.granted) == ({KEY: 4}, {KEY: 3})

    def test_each_grant_is_new_to_one_answer(self, store: Store) -> None:
        """Only the first call checked by a grant is answered that it is new, for metrics."""
        store.grant(KEY, 3, window=None)
        request = batch({KEY: 1}, limits={KEY: 2})
        assert store.acquire(request).newly_granted == {KEY: 3}
        replayed = store.acquire(request)
        assert (replayed.granted, replayed.newly_granted) == ({KEY: 3}, {})
        store.grant(KEY, 4, window=None)
        result = store.acquire(batch({KEY: 1}, limits={KEY: 0}))
        assert (result.granted, result.newly_granted) == ({KEY: 7}, {KEY: 4})


SMOOTH = CountKey.at("search", "user_id", "ada", timedelta(minutes=1), 0, limit=60)
"""A count that drains by a call each second."""


class TestFreezes:
    """Subjects whose calls operators have stopped."""

    def test_block_all_but_what_lets_calls_run(self, store: Store) -> None:
        """Leases of running calls and rate limiters go on; so does an answer that was given."""
        quota: Any = QuotaMiddleware(
            [ToolCallLimit(quotas=[Quota(1, per="user_id")])], store=store, telemetry=TELEMETRY
        )
        slot, before = str(CountKey("search", "concurrency", "")), calls(KEY, 1)
        assert store.acquire(before).admitted == (True,)
        quota.freeze()
        quota.freeze(user_id="ada", reason="abuse", by="bo")
        result = store.acquire(batch({slot: 1, KEY: 1}, {slot: 1}, limits={slot: 9, KEY: 9}))
        assert (result.refused, result.admitted) == (({"limit": KEY}, {}), (False, True))
        assert (result.frozen, result.freezes) == ((KEY,), 2)
        assert (used(store, slot, KEY), used(store, OTHER)) == ([1, 1], [None])
        again = store.acquire(before)
        assert (again.admitted, again.replayed, again.frozen) == ((True,), True, ())
        limiter = store.rate_limiter("openai", requests=60, window="1m")
        assert limiter.acquire(blocking=False)
        assert [(each.key, each.amount, each.by, each.until) for each in store.grants()] == [
            ("::", 0, "", None),
            (":user_id:ada", 0, "bo", None),
        ]
        assert quota.thaw()
        assert store.acquire(calls(OTHER, 1)).frozen == (OTHER,)
        assert quota.thaw(user_id="ada")
        assert store.acquire(calls(KEY, 1)).admitted == (True,)

    def test_come_before_exhausted_counts(self, store: Store) -> None:
        """A limit that is exhausted, too, refuses with the frozen scope; the last freeze counts."""
        limit = ToolCallLimit(quotas=[Quota(1, per="user_id"), Quota(1, per="tenant")])
        quota: Any = QuotaMiddleware([limit], store=store, telemetry=TELEMETRY)
        tenant = str(CountKey("search", "tenant", "acme"))
        for reason in ("first", "second"):
            quota.freeze(tenant="acme", reason=reason)
        assert [freeze.reason for freeze in store.grants()] == ["second"]
        asked = batch({OTHER: 1, tenant: 1}, limits={OTHER: 0, tenant: 9})
        result = store.acquire(asked)
        assert (result.refused, result.frozen) == (({"limit": tenant},), (tenant,))


class TestSmooth:
    """A count that drains."""

    @pytest.mark.parametrize("seed", range(3))
    def test_agrees_with_a_bucket(self, make: Stores, seed: int) -> None:
        """It admits what a bucket of tokens does: no time has more than rate and burst."""
        dice, store = random.Random(seed), make()  # noqa: S311 - no secret
        limit, burst = dice.choice([(60, 1), (7, 3), (1000, 40)])
        key = str(CountKey.at("search", "user_id", "ada", timedelta(minutes=1), 0, limit=limit))
        apart = -(-60_000_000 // limit)
        tokens, now, admitted = burst * apart, 0, list[int]()
        for _ in range(150):
            # Steps that floating point has exactly.
            passed = dice.choice([0, 0, 15_625, apart // 15_625 * 15_625, 7_000_000])
            make.wait(passed / 10**6)
            now, tokens = now + passed, min(burst * apart, tokens + passed)
            number = dice.choice([1, 1, 1, 2, 5])
            result = store.acquire(calls(key, number, limit=burst))
            kept = [each for each in result.admitted if each]
            assert len(kept) == min(number, tokens // apart)
            assert result.drained_in == {key: burst * apart - tokens}
            tokens -= len(kept) * apart
            assert used(store, key) == [-(-(burst * apart - tokens) // apart)]
            admitted += [now] * len(kept)
        assert len(admitted) > 3 * burst or limit == 7
        for first, start in enumerate(admitted):
            for more, end in enumerate(admitted[first:], 1):
                assert more <= burst + (end - start) / apart

    def test_what_is_taken_back_makes_room(self, make: Stores) -> None:
        """A refund, an undone attempt and a reset; and a call that ran in an outage is counted."""
        store, key = make(), str(SMOOTH)
        make.wait(0)
        first = calls(key, 3, limit=3)
        assert store.acquire(first).admitted == (True,) * 3
        assert store.acquire(first).replayed
        store.acquire(correcting(Correction("refund", {key: -1})))
        assert used(store, key) == [2]
        store.acquire(correcting(Correction("undo", attempt_id=first.attempt_id)))
        assert used(store, key) == [0]
        store.acquire(correcting(Correction("late", {key: 5}, starts={key: 0})))
        make.wait(1.5)
        assert used(store, key) == [4]
        assert [each.used for each in store.usages("search:*")] == [4]
        store.reset([key])
        assert used(store, key) == [0]
        make.wait(3610)
        assert used(store, key) == [None]

    def test_a_clock_that_goes_back(self, make: Stores) -> None:
        """It closes a count for no longer than before, drains on, and never reopens it early."""
        store, key = make(), str(SMOOTH)
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

    def test_takes_no_grants(self, store: Store) -> None:
        """A grant would end at no time: it is refused, with what to do instead."""
        with pytest.raises(ValueError, match="takes no grants: raise its limit or its burst"):
            store.grant(str(SMOOTH), 1)

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
