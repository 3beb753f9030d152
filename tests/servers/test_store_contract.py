"""What every store promises, on MemoryStore and RedisStore.

Which calls are admitted, and what is charged, is compared on random requests in
test_store_agreement.py. Here each promise of `QuotaStore` is said once.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from langchain_quota.admission import AcquireRequest, Compensation, Counter, Hits, Threshold
from langchain_quota.errors import QuotaStoreError
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
        """Limits that are only tried out are told, too, and refuse nothing; refused, nothing."""
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

    def test_limit_of_any_size(self, store: Store) -> None:
        """A limit that no count reaches is one all the same."""
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
        """It is answered as before, whatever happened since; its counters are told by position."""
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
        """What was used stands in place of what was held, before the next call is judged."""
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
