"""What every store promises, on MemoryStore and RedisStore.

Which calls are admitted, and what is charged, is compared on random requests in
test_store_agreement.py. Here each promise of `QuotaStore` is said once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from langchain_quota.admission import AcquireRequest, Compensation, Counter, Hits, Threshold
from langchain_quota.errors import QuotaStoreError
from langchain_quota.limit_options import MICRODOLLARS
from langchain_quota.stores import QuotaStore, QuotaUsage
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.servers.stores import batch, calls, compensating, settlement, used

KEY = str(CountKey("search", "user_id", "ada"))
OTHER = str(CountKey("email", "user_id", "ada"))
DAY = CountKey.at("search", "user_id", "ada", timedelta(days=1), 4e9)
LONG = 3600
"""A lease that no test outlasts, in seconds."""

Store = MemoryStore | RedisStore
Make = Callable[..., Store]


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Make]:
    """Makes stores of one kind."""
    opened = []

    def made(*, idle_ttl: timedelta = timedelta(days=365)) -> Store:
        if request.param == "memory":
            return MemoryStore(idle_ttl=idle_ttl)
        # The machine may be busy: only what is about timeouts has short ones.
        store = RedisStore(
            redis_server.url, prefix=redis_server.prefix(), timeout=30, idle_ttl=idle_ttl
        )
        opened.append(store)
        return store

    yield made
    for store in opened:
        store.close()


@pytest.fixture
def store(make: Make) -> Store:
    """A store of one kind, with nothing in it."""
    return make()


class TestAcquire:
    """A batch of calls."""

    def test_says_which_limits_refuse_which_call(self, store: Store) -> None:
        """Limits on trial are reported, too, and refuse nothing."""
        trial = Threshold("trial", "user_id", "searches", 0, enforced=False)
        most = Threshold("most", "user_id", "searches", 2)
        own = Threshold("most", "run", "own", 8)
        counters = {"own": Counter(used=4), "searches": Counter(KEY, used=1)}
        hits = (
            Hits({"own": 1, "searches": 1}, (own, most)),
            Hits({"own": 5, "searches": 1}, (trial, own, most)),
            Hits({"own": 1}, (own,)),
            Hits({}),
        )
        result = store.acquire(AcquireRequest("", "", counters, hits, {"most": 2}))
        assert result.used == {"own": 4, "searches": 1}
        assert result.refused == ({}, {"trial": "user_id", "most": "run"}, {}, {})
        assert result.admitted == (True, False, True, True)
        assert (result.stopped, result.replayed) == (False, False)
        assert used(store, KEY) == [2]

    @pytest.mark.parametrize("trial_first", [True, False])
    def test_a_limit_on_trial_lifts_no_refusal(self, store: Store, trial_first: bool) -> None:  # noqa: FBT001
        """What an enforced limit refuses stays refused, wherever a limit on trial stands."""
        trial = Threshold("trial", "user_id", "searches", 0, enforced=False)
        most = Threshold("most", "user_id", "searches", 0)
        thresholds = (trial, most) if trial_first else (most, trial)
        hits = (Hits({"searches": 1}, thresholds),)
        result = store.acquire(AcquireRequest("", "", {"searches": Counter(KEY)}, hits))
        assert result.refused == ({"trial": "user_id", "most": "user_id"},)
        assert result.admitted == (False,)
        assert used(store, KEY) == [None]

    def test_limit_of_any_size(self, store: Store) -> None:
        """A limit that no count can reach is valid."""
        assert store.acquire(calls(KEY, 2, limit=10**30)).admitted == (True, True)

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

    def test_counters_with_one_key(self, store: Store) -> None:
        """Two counters with one key are judged each for itself, and charged together."""
        counters = {"a": Counter(KEY, used=1), "b": Counter(KEY)}
        over = Threshold("limit", "thread", "a", 3)
        hits = (Hits({"a": 2}, (over,)), Hits({"b": 2}), Hits({"a": 1}, (over,)))
        result = store.acquire(AcquireRequest("", "", counters, hits))
        assert (result.used, result.admitted) == ({"a": 1, "b": 0}, (True, True, False))
        assert used(store, KEY) == [5]
        assert store.acquire(AcquireRequest("", "", counters, hits)).used == {"a": 5, "b": 5}

    def test_large_batch(self, store: Store) -> None:
        """A batch of many calls over many counts is one step like any other."""
        keys = [f"search:user_id:{number}" for number in range(300)]
        amounts = [{keys[index]: 1, keys[(index + 1) % 300]: 1} for index in range(300)]
        request = batch(*amounts * 10, limits=dict.fromkeys(keys, 2))
        result = store.acquire(request)
        assert result.admitted == (True,) * 300 + (False,) * 2700
        assert used(store, *keys) == [2] * 300
        assert store.acquire(request).refused == result.refused
        store.acquire(compensating(Compensation("all", attempt_id=request.attempt_id)))
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
            request.idempotency_key, "", {"x": Counter(OTHER, 7)}, (Hits({"x": 1}, (renamed,)),) * 3
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

    def test_what_charged_nothing_is_judged_anew(self, store: Store) -> None:
        """A batch of which nothing was charged gets another chance under the same key."""
        request = batch({KEY: 1}, limits={KEY: 0}, key="one")
        assert store.acquire(request).admitted == (False,)
        result = store.acquire(batch({KEY: 1}, limits={KEY: 1}, key="one"))
        assert (result.admitted, result.replayed) == ((True,), False)

    def test_without_a_key_nothing_is_remembered(self, store: Store) -> None:
        """Requests without an idempotency key are each made."""
        for before in (0, 1):
            result = store.acquire(calls(KEY, 1, key="", attempt=""))
            assert (result.used, result.replayed) == ({KEY: before}, False)


class TestCompensations:
    """Corrections that travel with a request."""

    def test_are_made_first_and_once(self, store: Store) -> None:
        """What is taken back makes room for the batch, however often it is sent, once."""
        store.acquire(calls(KEY, 3, limit=3))
        refund = Compensation("refund", {KEY: -1})
        request = calls(KEY, 2, limit=3, compensations=[refund, refund])
        result = store.acquire(request)
        assert (result.used, result.admitted) == ({KEY: 2}, (True, False))
        other = Compensation("other", {KEY: -1})
        again = calls(KEY, 2, key=request.idempotency_key, compensations=[refund, other])
        assert store.acquire(again).replayed
        assert used(store, KEY) == [2]

    def test_take_back_what_there_is(self, store: Store) -> None:
        """More than there is cannot be taken back, and a refund makes no key."""
        store.acquire(calls(KEY, 1))
        store.acquire(compensating(Compensation("refund", {KEY: -5, OTHER: -1})))
        assert used(store, KEY, OTHER) == [0, None]

    def test_count_what_has_run(self, store: Store) -> None:
        """A positive amount makes a key, and begins where the caller says."""
        late = Compensation("late", {KEY: 2, str(DAY): 1}, starts={KEY: 5})
        store.acquire(compensating(late, Compensation("later", {KEY: 1}, starts={KEY: 9})))
        assert store.peek([KEY, str(DAY)]) == (
            QuotaUsage(KEY, 8, None, None),
            QuotaUsage(str(DAY), 1, None, DAY.ends),
        )

    def test_add_nothing_to_what_was_answered(self, store: Store) -> None:
        """A late charge adds nothing where another attempt of its request was answered."""
        request = calls(KEY, 1)
        store.acquire(request)
        other = Compensation("other", {KEY: 1}, "another", request.idempotency_key)
        store.acquire(compensating(other))
        assert used(store, KEY) == [1]
        own = Compensation("own", {KEY: 3}, request.attempt_id, request.idempotency_key)
        store.acquire(compensating(own))
        assert used(store, KEY) == [3]

    def test_undo_an_attempt(self, store: Store) -> None:
        """What an attempt charged is taken back, once and exactly; its request can be made anew."""
        store.acquire(calls(KEY, 1))
        lost = batch({KEY: 1, OTHER: 1}, {KEY: 1}, {KEY: 1}, limits={KEY: 3}, used={OTHER: 5})
        store.acquire(lost)
        assert used(store, KEY, OTHER) == [3, 6]
        undo = [Compensation(each, attempt_id=lost.attempt_id) for each in ("one", "two")]
        retry = batch(
            *(dict(each.amounts) for each in lost.hits),
            limits={KEY: 3},
            key=lost.idempotency_key,
            compensations=undo,
        )
        result = store.acquire(retry)
        assert (result.used, result.replayed) == ({KEY: 1, OTHER: 5}, False)
        assert used(store, KEY, OTHER) == [3, 6]
        assert store.acquire(retry).replayed

    def test_refuse_an_attempt_that_comes_later(self, store: Store) -> None:
        """An attempt that was compensated charges nothing; what it compensates itself holds."""
        late = calls(KEY, 1, compensations=[Compensation("other", {OTHER: 1})])
        store.acquire(compensating(Compensation("late", attempt_id=late.attempt_id)))
        for _ in range(2):
            with pytest.raises(QuotaStoreError, match="compensated before") as refused:
                store.acquire(late)
            assert not refused.value.timed_out
        assert used(store, KEY, OTHER) == [None, 1]

    def test_undo_nothing_of_others(self, store: Store) -> None:
        """Undoing an attempt that was replayed, or refused, takes nothing back."""
        made = calls(KEY, 2, limit=2)
        store.acquire(made)
        rerun = calls(KEY, 2, limit=2, key=made.idempotency_key)
        refused = calls(KEY, 1, limit=2)
        assert store.acquire(rerun).replayed
        store.acquire(refused)
        attempts = (rerun.attempt_id, refused.attempt_id)
        store.acquire(compensating(*(Compensation(each, attempt_id=each) for each in attempts)))
        assert used(store, KEY) == [2]
        assert store.acquire(calls(KEY, 2, limit=2, key=made.idempotency_key)).replayed


class TestLeases:
    """What is only held, until it is settled."""

    def test_held_counts_like_anything(self, store: Store) -> None:
        """What is held is used, and refuses others; that of a refused call is not held."""
        bound = batch({KEY: 60}, limits={KEY: 100}, leases={KEY: LONG})
        assert store.acquire(bound).admitted == (True,)
        other = batch({KEY: 60}, limits={KEY: 100}, leases={KEY: LONG})
        assert store.acquire(other).admitted == (False,)
        store.acquire(compensating(settlement(other, {KEY: 0})))
        assert used(store, KEY) == [60]

    def test_settled_once_in_the_same_step(self, store: Store) -> None:
        """What was used replaces what was held, before the next call is judged."""
        first = batch({KEY: 60, OTHER: 1}, limits={KEY: 100}, leases={KEY: LONG, OTHER: LONG})
        store.acquire(first)
        done = settlement(first, {KEY: 30})
        second = batch({KEY: 70}, limits={KEY: 100}, leases={KEY: LONG}, compensations=[done, done])
        result = store.acquire(second)
        assert (result.used, result.admitted) == ({KEY: 30}, (True,))
        store.acquire(compensating(done, settlement(first, {KEY: 5})))
        assert used(store, KEY, OTHER) == [105, 1]
        store.acquire(compensating(settlement(second, {KEY: 0})))
        assert store.peek([KEY]) == (QuotaUsage(KEY, 35, 100, None),)

    def test_only_what_has_a_lease_is_given_back(self, store: Store) -> None:
        """Two counters with one key, of which one has a lease: the other's charge stays."""
        counters = {"call": Counter(KEY), "held": Counter(KEY, lease=LONG)}
        hits = Hits({"call": 1, "held": 7})
        request = AcquireRequest("one", "first", counters, (hits,))
        store.acquire(request)
        assert used(store, KEY) == [8]
        store.acquire(compensating(settlement(request, {KEY: 4})))
        assert used(store, KEY) == [5]

    def test_lease_that_is_over(self, store: Store) -> None:
        """What nobody settles is given back, and nothing else; a late settlement charges all."""
        crashed = batch({KEY: 60, str(DAY): 5}, leases={KEY: 1, str(DAY): 1})
        running = batch({KEY: 10}, leases={KEY: LONG})
        for request in (crashed, running, calls(KEY, 3)):
            store.acquire(request)
        assert used(store, KEY, str(DAY)) == [73, 5]
        eventually(lambda: used(store, KEY, str(DAY)) == [13, 0])
        over = batch({KEY: 87}, limits={KEY: 100}, used={KEY: 99})
        assert store.acquire(over).admitted == (True,)
        late = settlement(crashed, {KEY: 20, str(DAY): 1})
        store.acquire(compensating(late, late, settlement(running, {KEY: 0})))
        assert used(store, KEY, str(DAY)) == [110, 1]

    def test_window_that_ends_during_a_call(self, store: Store) -> None:
        """The settlement goes to the window that was charged, though it is over."""
        past = CountKey.at("search", "user_id", "ada", timedelta(hours=1), 1e9)
        assert past.ends is not None
        held = batch({str(past): 9}, ends={str(past): past.ends}, leases={str(past): LONG})
        store.acquire(held)
        store.acquire(compensating(settlement(held, {str(past): 4})))
        assert used(store, str(past)) == [4]

    def test_undone_once(self, store: Store) -> None:
        """A hold is taken back by the settlement, or by what undoes the attempt, and not twice."""
        undone = batch({KEY: 9, OTHER: 1}, leases={KEY: LONG})
        settled = batch({KEY: 9, OTHER: 1}, leases={KEY: LONG})
        for request in (undone, settled, calls(KEY, 50)):
            store.acquire(request)
        undo = [
            Compensation(each.attempt_id, attempt_id=each.attempt_id) for each in (undone, settled)
        ]
        store.acquire(compensating(undo[0], settlement(undone, {KEY: 2})))
        assert used(store, KEY, OTHER) == [61, 1]
        store.acquire(compensating(settlement(settled, {KEY: 3}), undo[1]))
        assert used(store, KEY, OTHER) == [55, 0]

    def test_replay_holds_nothing_more(self, store: Store) -> None:
        """A request that runs again can give its hold back, and hold anew, in one step."""
        first = batch({KEY: 60, OTHER: 1}, limits={KEY: 100}, leases={KEY: LONG})
        store.acquire(first)
        again = replace(first, attempt_id="again")
        assert store.acquire(again).replayed
        assert used(store, KEY, OTHER) == [60, 1]
        anew = batch(
            {KEY: 60},
            limits={KEY: 100},
            leases={KEY: LONG},
            compensations=[settlement(first, {KEY: 0})],
        )
        assert store.acquire(anew).admitted == (True,)
        store.acquire(compensating(settlement(anew, {KEY: 8})))
        assert used(store, KEY, OTHER) == [8, 1]

    def test_reset(self, store: Store) -> None:
        """A reset count forgets what is held: what settles it charges what was used."""
        before = batch({KEY: 60}, leases={KEY: LONG})
        store.acquire(before)
        store.reset([KEY])
        assert used(store, KEY) == [0]
        store.acquire(batch({KEY: 5}))
        store.acquire(compensating(settlement(before, {KEY: 20})))
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
        """A peek tells count, limit and end of window, in the order asked, and changes nothing."""
        assert DAY.ends is not None
        counters = {"day": Counter(str(DAY), 0, float(DAY.ends)), "all": Counter(KEY)}
        over = (
            Threshold("b", "user_id", "day", 7),
            Threshold("a", "user_id", "day", 5),
            Threshold("try", "user_id", "day", 0, enforced=False),
        )
        store.acquire(AcquireRequest("", "", counters, (Hits({"day": 1, "all": 1}, over),)))
        usage = QuotaUsage(str(DAY), 1, 5, DAY.ends)
        for _ in range(2):
            assert store.peek([OTHER, str(DAY), KEY, str(DAY)]) == (
                None,
                usage,
                QuotaUsage(KEY, 1, None, None),
                usage,
            )
        assert store.peek([]) == ()

    def test_shown_limit_follows(self, store: Store) -> None:
        """The limit that is shown is that of the latest charge; compensations leave it."""
        for limit in (5, 9):
            store.acquire(calls(KEY, 1, limit=limit))
        refund, late = Compensation("refund", {KEY: -1}), Compensation("late", {KEY: 2})
        store.acquire(compensating(refund, late))
        assert store.peek([KEY]) == (QuotaUsage(KEY, 3, 9, None),)

    def test_reset(self, store: Store) -> None:
        """A reset count is 0, and stays: a caller's own count does not fill it again."""
        store.acquire(batch({KEY: 1}, limits={KEY: 5}, used={KEY: 4}))
        store.reset([KEY, OTHER, str(DAY), KEY])
        assert store.peek([KEY, OTHER, str(DAY)]) == (
            QuotaUsage(KEY, 0, 5, None),
            QuotaUsage(OTHER, 0, None, None),
            QuotaUsage(str(DAY), 0, None, DAY.ends),
        )
        result = store.acquire(batch({KEY: 1, OTHER: 1}, used={KEY: 4, OTHER: 4}))
        assert result.used == {KEY: 0, OTHER: 0}
        store.reset([])

    def test_usages(self, store: Store) -> None:
        """All counts, or those whose keys match a pattern, sorted by key."""
        keys = [
            str(CountKey(tool, "user_id", who))
            for tool in ("search", "email")
            for who in ("ada", "bob", "[x]")
        ]
        for key in keys:
            store.acquire(calls(key, 1))
        store.reset([r"odd[key]\*"])
        patterns = {
            "*": sorted([*keys, r"odd[key]\*"]),
            "search:*": sorted(keys[:3]),
            "*:ada": sorted([keys[0], keys[3]]),
            "search:user_id:b?b": [keys[1]],
            "[es]*:[!a]*:bob": sorted([keys[1], keys[4]]),
            r"odd[[]key]\[*]": [r"odd[key]\*"],
            "nobody": [],
            "SEARCH:*": [],
        }
        found = {pattern: [each.key for each in store.usages(pattern)] for pattern in patterns}
        assert found == patterns
        assert store.usages(keys[0]) == [QuotaUsage(keys[0], 1, 100, None)]

    def test_stores_share_nothing(self, make: Make) -> None:
        """Another store, or another prefix, has counts of its own."""
        one, other = make(), make()
        one.acquire(calls(KEY, 1))
        assert used(other, KEY) == [None]
        assert other.usages() == []

    def test_idle_count_expires(self, make: Make) -> None:
        """A count that nobody charges is forgotten when its time is over."""
        store = make(idle_ttl=timedelta(seconds=1))
        store.acquire(calls(KEY, 1))
        eventually(lambda: used(store, KEY) == [None])
        assert store.acquire(batch({KEY: 1}, used={KEY: 2})).used == {KEY: 2}

    @pytest.mark.parametrize("dimension", ["run", "root_run"])
    def test_count_of_a_run_expires(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, dimension: str
    ) -> None:
        """A run's count has a shorter idle time, however it was made, and none that is longer."""
        monkeypatch.setattr(f"langchain_quota.stores.{dimension.upper()}_IDLE", 1)
        store = make()
        runs = [str(CountKey("search", dimension, how)) for how in ("charged", "late", "reset")]
        others = [str(CountKey("search", "running", "a")), str(CountKey("run", "user_id", "b"))]
        store.acquire(batch({runs[0]: 1, **dict.fromkeys(others, 1)}))
        store.acquire(compensating(Compensation("late", {runs[1]: 1})))
        store.reset(runs[2:])
        eventually(lambda: used(store, *runs) == [None] * 3)
        assert used(store, *others) == [1, 1]

        monkeypatch.setattr(f"langchain_quota.stores.{dimension.upper()}_IDLE", 3600)
        short = make(idle_ttl=timedelta(seconds=1))
        short.acquire(calls(runs[0], 1))
        eventually(lambda: used(short, runs[0]) == [None])


async def test_async_forms(store: Store) -> None:
    """They do the same, one that has to undo something included."""
    assert isinstance(store, QuotaStore)
    lost = calls(KEY, 3, limit=2)
    result = await store.aacquire(lost)
    assert (result.admitted, result.refused[2]) == ((True, True, False), {"limit": KEY})
    assert (await store.aacquire(lost)).replayed
    undo = Compensation("lost", {OTHER: 1}, lost.attempt_id)
    await store.aacquire(compensating(undo))
    assert await store.apeek([KEY, OTHER]) == store.peek([KEY, OTHER])
    assert used(store, KEY, OTHER) == [0, 1]
    with pytest.raises(QuotaStoreError, match="compensated before"):
        await store.aacquire(lost)
    await store.areset([OTHER])
    assert used(store, OTHER) == [0]
    assert await store.apeek([]) == ()
    await store.areset([])
    if isinstance(store, RedisStore):
        await store.aclose()


def test_names_of_any_form(store: Store) -> None:
    """All names may be any text, of any length."""
    odd = "\ud800 ':{}*\n%é" * 500
    hits = Hits({odd: 1}, (Threshold(odd, odd, odd, 1),))
    request = AcquireRequest(odd, odd, {odd: Counter(odd)}, (hits, hits), {odd: 2})
    result = store.acquire(request)
    assert (result.used, result.refused) == ({odd: 0}, ({}, {odd: odd}))
    assert store.acquire(request).refused == result.refused
    store.acquire(compensating(Compensation(odd, attempt_id=odd)))
    assert used(store, odd) == [0]


async def test_wrong_use(store: Store) -> None:
    """What is no request, and a string in place of keys, is a TypeError."""
    with pytest.raises(TypeError, match="request must be an AcquireRequest, not 'search'"):
        store.acquire("search")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(TypeError, match="request must be an AcquireRequest"):
        await store.aacquire(None)  # type: ignore[arg-type]  # the same
    for wrong in ("search", [1], None):
        for ask in (store.peek, store.reset):
            with pytest.raises(TypeError, match="keys must be a sequence of strings"):
                ask(wrong)  # type: ignore[arg-type]  # the same
        for aask in (store.apeek, store.areset):
            with pytest.raises(TypeError, match="keys must be a sequence of strings"):
                await aask(wrong)  # type: ignore[arg-type]  # the same


def granted(store: Store, key: str = KEY) -> int:
    """What is granted under a key now."""
    (use,) = store.peek([key])
    return 0 if use is None else use.granted


def let_through(store: Store, key: str = KEY, limit: int = 2, *, at_most: int = 50) -> int:
    """How many calls of one limit a store still admits."""
    return sum(store.acquire(calls(key, at_most, limit=limit)).admitted)


class TestGrants:
    """More than the limits say, for one count."""

    def test_a_grant_raises_every_limit_over_its_count(self, store: Store) -> None:
        """It is added to what each threshold over the key says, of this key alone."""
        store.grant(KEY, 3)
        assert let_through(store) == 5
        assert let_through(store, limit=4) == 2
        assert let_through(store, OTHER) == 2

    def test_a_negative_threshold_is_raised_from_where_it_is(self, store: Store) -> None:
        """What is kept for the last answer may be more than the limit: a grant makes up for it."""
        store.grant(KEY, 3)
        assert let_through(store, limit=-2) == 1

    def test_a_grant_is_given_once(self, store: Store) -> None:
        """Asked for again by its id it is the first one, whatever is asked; ids are a key's own."""
        first = store.grant(KEY, 3, reason="ticket 4711", by="bo", id="4711")
        assert (first.amount, first.reason, first.by, first.id) == (3, "ticket 4711", "bo", "4711")
        assert store.grant(KEY, 9, id="4711") == first
        other = store.grant(OTHER, 9, id="4711")
        assert store.grants() == [other, first]
        assert store.grants("search:*") == [first]
        assert let_through(store) == 5

    async def test_async_is_the_same(self, store: Store) -> None:
        """`agrant` and `arevoke` give and end what `grant` and `revoke` do."""
        first = await store.agrant(KEY, 3, id="4711")
        assert store.grant(KEY, 3, id="4711") == first
        ended = await store.arevoke(KEY, "4711")
        assert ended is not None
        assert (ended.id, ended.amount) == ("4711", 3)
        assert store.revoke(KEY, "4711") is None
        if isinstance(store, RedisStore):
            await store.aclose()

    def test_a_revoked_grant_is_over_for_good(self, store: Store) -> None:
        """What was used of it stays used; the same id gives nothing any more."""
        store.grant(KEY, 3, id="4711")
        assert let_through(store) == 5
        assert store.revoke(KEY, "4711") is not None
        assert store.revoke(KEY, "another") is None
        store.grant(KEY, 3, id="4711")
        assert (store.grants(), granted(store), used(store, KEY)) == ([], 0, [5])
        assert let_through(store, limit=5) == 0

    def test_grants_end(self, store: Store) -> None:
        """One ends at its time, others go on."""
        store.grant(KEY, 3, until=datetime.now(UTC) + timedelta(seconds=2))
        kept = store.grant(KEY, 5)
        assert granted(store) == 8 or store.grants() == [kept]
        eventually(lambda: store.grants() == [kept])
        assert granted(store) == 5
        assert let_through(store) == 7

    def test_a_grant_never_ends_late(self, store: Store) -> None:
        """A grant whose end is between two seconds ends before it, and says so."""
        until = datetime.now(UTC).replace(microsecond=900_000) + timedelta(hours=1)
        given = store.grant(KEY, 3, until=until)
        assert given.until == until.replace(microsecond=0)
        assert store.grants() == [given]

    def test_a_grant_ends_with_its_window(self, store: Store) -> None:
        """Later than that is not granted; in a window that is over nothing is."""
        day = CountKey.at("search", "user_id", "ada", timedelta(days=1), 4e9)
        late = datetime.fromtimestamp(5e9, UTC)
        assert store.grant(str(day), 3, until=late).until == day.resets_at
        over = CountKey.at("search", "user_id", "ada", timedelta(days=1), 1e9)
        with pytest.raises(ValueError, match="that time is over"):
            store.grant(str(over), 3)
        with pytest.raises(ValueError, match="that time is over"):
            store.grant(KEY, 3, until=datetime.fromtimestamp(1e9, UTC))

    def test_a_grant_may_last_for_ever(self, store: Store) -> None:
        """An end, or a window, that no time can be given for is the last one that can be."""
        last = datetime.max.replace(tzinfo=UTC)
        assert store.grant(KEY, 3, until=last).until == last
        assert store.grant(f"{KEY}:86400:{10**10}", 3).until == last
        assert [each.until for each in store.grants()] == [last, last]
        assert granted(store) == 3

    def test_a_grant_without_an_end_gets_one(self, make: Make) -> None:
        """It is kept as long as a count is that nobody charges."""
        grant = make(idle_ttl=timedelta(days=2)).grant(KEY, 3)
        assert grant.until is not None
        assert timedelta(days=2) <= grant.until - grant.given_at < timedelta(days=2, seconds=1)

    def test_a_grant_begins_no_count(self, store: Store) -> None:
        """A count that a caller brings back begins where the caller's is, grant or not."""
        store.grant(KEY, 3)
        assert store.peek([KEY]) == (QuotaUsage(KEY, 0, None, None, 3),)
        result = store.acquire(batch({KEY: 1}, limits={KEY: 5}, used={KEY: 4}))
        assert (result.used, result.granted) == ({KEY: 4}, {KEY: 3})

    def test_a_reset_leaves_grants(self, store: Store) -> None:
        """What is used becomes 0; what is granted stays granted."""
        store.grant(KEY, 3)
        assert let_through(store) == 5
        store.reset([KEY])
        assert let_through(store) == 5

    def test_each_grant_is_new_to_one_answer(self, store: Store) -> None:
        """Only the first call that is judged by a grant is answered that it is new, for metrics."""
        store.grant(KEY, 3)
        request = batch({KEY: 1}, limits={KEY: 2})
        assert store.acquire(request).newly_granted == {KEY: 3}
        replayed = store.acquire(request)
        assert (replayed.granted, replayed.newly_granted) == ({KEY: 3}, {})
        store.grant(KEY, 4)
        result = store.acquire(batch({KEY: 1}, limits={KEY: 0}))
        assert (result.granted, result.newly_granted) == ({KEY: 7}, {KEY: 4})

    def test_dollars(self, store: Store) -> None:
        """An amount is in the unit of the counter: dollars as they are written."""
        key = str(CountKey(MICRODOLLARS, "user_id", "ada"))
        grant = store.grant(key, "2.50")
        assert (grant.amount, grant.unit) == (2_500_000, "microdollars")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((KEY, 0), "amount must be above 0"),
            ((KEY, 10**15 + 1), "at most 1000000000000000"),
            ((KEY, -1), "amount must be 0 or more"),
            ((KEY, "1"), "amount must be a whole number"),
            ((KEY, 1.0), "amount must be a whole number"),
            ((7, 1), "key must be a string"),
            (("email:ada", 1), "key must be the key of a count, such as 'email:user_id:ada'"),
        ],
    )
    def test_bad_amounts(self, arguments: tuple[Any, Any], message: str) -> None:
        """What cannot be given is refused, and named."""
        with pytest.raises((TypeError, ValueError), match=message):
            MemoryStore().grant(*arguments)

    @pytest.mark.parametrize(
        ("argument", "value", "message"),
        [
            ("until", 7, "until must be a datetime or None"),
            ("window", 86_400, "window must be a timedelta or None, not 86400"),
            ("until", datetime(2100, 1, 1), "until must have a time zone"),  # noqa: DTZ001
            ("reason", None, "reason must be a string"),
            ("by", "x" * 1001, "by must have at most 1000 characters"),
            ("id", "", "id must not be empty"),
        ],
    )
    def test_bad_options(self, argument: str, value: Any, message: str) -> None:
        """What cannot be kept is refused, and named."""
        with pytest.raises((TypeError, ValueError), match=message):
            MemoryStore().grant(KEY, 1, **{argument: value})

    def test_an_audit_log(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        """What is given and ended is logged once, with its reason, in fields, too."""
        with caplog.at_level("INFO", "langchain_quota"):
            grant = store.grant(KEY, 3, reason="ticket 4711", by="bo", id="4711")
            store.grant(KEY, 3, id="4711")
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
