"""What every store promises: MemoryStore and RedisStore, each in its sync and its async form."""

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest

from langchain_quota.errors import QuotaStoreError
from langchain_quota.reservation import Cap, Settlement, Slot
from langchain_quota.stores import KeyUse, QuotaStore
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore
from tests.servers.prometheus import eventually
from tests.servers.redis import RedisServer
from tests.servers.stores import Ledger, batch, calls, settling, slot

KEY = str(CountKey("search", "user_id", "ada"))
OTHER = str(CountKey("email", "user_id", "ada"))
FORMS = {
    "memory": ("memory", False),
    "memory, async": ("memory", True),
    "redis": ("redis", False),
    "redis, async": ("redis", True),
}

Make = Callable[..., Ledger]


@pytest.fixture(params=FORMS)
async def make(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Make]:
    """Makes ledgers of one form."""
    kind, is_async = FORMS[request.param]
    opened = []

    def made(*, idle_ttl: timedelta = timedelta(days=365)) -> Ledger:
        if kind == "memory":
            return Ledger(MemoryStore(idle_ttl=idle_ttl), is_async)
        # The machine may be busy: only what is about timeouts has short ones.
        store = RedisStore(
            redis_server.url, prefix=redis_server.prefix(), timeout=30, idle_ttl=idle_ttl
        )
        opened.append(store)
        return Ledger(store, is_async)

    yield made
    for store in opened:
        await store.aclose()


@pytest.fixture
def ledger(make: Make) -> Ledger:
    """A ledger of one form, with nothing in it."""
    return make()


def test_is_a_store(ledger: Ledger) -> None:
    """Each is what the protocol asks for."""
    assert isinstance(ledger.store, QuotaStore)


async def test_admits_up_to_the_limit(ledger: Ledger) -> None:
    """Calls are admitted while they fit, refused beyond, and what was used before is told."""
    grant = await ledger.reserve(calls(KEY, 4, limit=3))
    assert (grant.used, grant.admitted) == ((0,), (True, True, True, False))
    assert (grant.stopped, grant.known) == (False, False)
    again = await ledger.reserve(calls(KEY, 1, limit=3))
    assert (again.used, again.admitted) == ((3,), (False,))
    assert await ledger.used(KEY) == [3]


async def test_refused_call_is_charged_nowhere(ledger: Ledger) -> None:
    """A call that one of its limits refuses is not counted at the others."""
    await ledger.reserve(calls(KEY, 1, limit=1))
    grant = await ledger.reserve(batch([slot(KEY, 1), slot(OTHER, 5)], {0: 1, 1: 1}, {1: 1}))
    assert grant.admitted == (False, True)
    assert await ledger.used(KEY, OTHER) == [1, 1]


async def test_later_call_may_fit(ledger: Ledger) -> None:
    """A dear call is refused, and a cheaper one after it takes what is left."""
    grant = await ledger.reserve(batch([slot(KEY, 3)], {0: 2}, {0: 2}, {0: 1}))
    assert grant.admitted == (True, False, True)
    assert await ledger.used(KEY) == [3]


async def test_every_cap_counts(ledger: Ledger) -> None:
    """Of several limits on one count the smallest refuses."""
    both = Slot(KEY, caps=(Cap("wide", 9), Cap("narrow", 2)))
    grant = await ledger.reserve(batch([both], {0: 1}, {0: 1}, {0: 1}))
    assert grant.admitted == (True, True, False)


async def test_unenforced_cap_refuses_nothing(ledger: Ledger) -> None:
    """A limit that is tried out lets all through, and all is counted."""
    grant = await ledger.reserve(batch([slot(KEY, 1, enforced=False)], {0: 1}, {0: 1}))
    assert grant.admitted == (True, True)
    assert await ledger.used(KEY) == [2]


async def test_negative_limit_refuses_all(ledger: Ledger) -> None:
    """A limit below 0 refuses every call, and no key is made."""
    grant = await ledger.reserve(calls(KEY, 2, limit=-7))
    assert grant.admitted == (False, False)
    assert await ledger.used(KEY) == [None]


async def test_limit_of_any_size(ledger: Ledger) -> None:
    """A limit that no count reaches is one all the same."""
    assert (await ledger.reserve(calls(KEY, 2, limit=10**30))).admitted == (True, True)


async def test_stopped_batch_charges_nothing(ledger: Ledger) -> None:
    """When a refusal stops the batch, the calls that were admitted are not counted either."""
    grant = await ledger.reserve(
        batch([slot(KEY, 2), slot(OTHER)], {0: 1, 1: 1}, {0: 1}, {0: 1}, stops={"limit": 1})
    )
    assert (grant.admitted, grant.stopped) == ((True, True, False), True)
    assert await ledger.used(KEY, OTHER) == [None, None]


@pytest.mark.parametrize(("after", "stopped"), [(2, True), (3, False)])
async def test_stops_after_so_many_refusals(ledger: Ledger, after: int, stopped: bool) -> None:  # noqa: FBT001 - a parameter
    """A limit that gives up stops the batch at its last refusal, not before."""
    grant = await ledger.reserve(calls(KEY, 3, limit=1, stops={"limit": after, "absent": 1}))
    assert (grant.admitted, grant.stopped) == ((True, False, False), stopped)
    assert await ledger.used(KEY) == [None if stopped else 1]


async def test_one_limit_refuses_a_call_once(ledger: Ledger) -> None:
    """A call that a limit refuses at two counts is one refusal."""
    grant = await ledger.reserve(
        batch([slot(KEY, 0), slot(OTHER, 0)], {0: 1, 1: 1}, stops={"limit": 2})
    )
    assert (grant.admitted, grant.stopped) == ((False,), False)


async def test_callers_own_counts(ledger: Ledger) -> None:
    """A slot without a key is judged by the caller's count, and kept nowhere."""
    grant = await ledger.reserve(
        batch([slot(None, 5, used=4), slot(KEY)], {0: 1, 1: 1}, {0: 1, 1: 1})
    )
    assert (grant.used, grant.admitted) == ((4, 0), (True, False))
    assert await ledger.used(KEY) == [1]


async def test_missing_key_begins_at_the_callers_count(ledger: Ledger) -> None:
    """A key that does not exist starts where the caller counts; later its own count holds."""
    first = await ledger.reserve(batch([slot(KEY, 5, used=3)], {0: 1}))
    assert (first.used, await ledger.used(KEY)) == ((3,), [4])
    second = await ledger.reserve(batch([slot(KEY, 5, used=1)], {0: 1}, {0: 1}))
    assert (second.used, second.admitted) == ((4,), (True, False))
    assert await ledger.used(KEY) == [5]


async def test_refused_batch_makes_no_key(ledger: Ledger) -> None:
    """The caller's count alone is not written."""
    await ledger.reserve(batch([slot(KEY, 3, used=3)], {0: 1}))
    assert await ledger.used(KEY) == [None]


async def test_slots_with_one_key(ledger: Ledger) -> None:
    """Two slots with one key are judged each for itself, and charged together."""
    grant = await ledger.reserve(batch([slot(KEY, 2, used=1), slot(KEY, 5)], {0: 1}, {1: 2}))
    assert (grant.used, grant.admitted) == ((1, 0), (True, True))
    assert await ledger.used(KEY) == [4]


async def test_known_reservation_is_not_charged_again(ledger: Ledger) -> None:
    """A reservation made before is answered as before, whatever else happened since."""
    asked = calls(KEY, 3, limit=2)
    first = await ledger.reserve(asked)
    await ledger.reset([KEY])
    again = await ledger.reserve(calls(KEY, 3, limit=2, id=asked.id))
    assert (again.used, again.admitted, again.known) == (first.used, first.admitted, True)
    assert not first.known
    assert await ledger.used(KEY) == [0]


async def test_what_charged_nothing_is_judged_anew(ledger: Ledger) -> None:
    """A batch of which nothing was charged gets another chance under the same id."""
    await ledger.reserve(calls(KEY, 1, limit=1))
    refused = calls(KEY, 1, limit=1)
    assert (await ledger.reserve(refused)).admitted == (False,)
    await ledger.reset([KEY])
    grant = await ledger.reserve(refused)
    assert (grant.admitted, grant.known) == ((True,), False)


async def test_without_an_id_nothing_is_remembered(ledger: Ledger) -> None:
    """Reservations without an id are each made."""
    for before in (0, 1):
        grant = await ledger.reserve(calls(KEY, 1, id="", attempt=""))
        assert (grant.used, grant.known) == ((before,), False)


async def test_id_of_another_batch(ledger: Ledger) -> None:
    """An answer is not given to a batch that it does not fit, even of the same size in all."""
    await ledger.reserve(batch([slot(KEY, 5)], {0: 1}, {0: 1}, id="one"))
    with pytest.raises(QuotaStoreError, match="another form"):
        await ledger.reserve(batch([slot(KEY, 5), slot(OTHER, 5)], {0: 1}, id="one"))
    assert await ledger.used(KEY, OTHER) == [2, None]


async def test_settlement_is_made_once(ledger: Ledger) -> None:
    """However often a settlement is sent, its amounts are added once."""
    await ledger.reserve(calls(KEY, 5))
    settlement = Settlement("late refund", {KEY: -2})
    for _ in range(3):
        await ledger.reserve(settling(settlement, settlement))
    assert await ledger.used(KEY) == [3]


async def test_settlement_comes_first(ledger: Ledger) -> None:
    """What is taken back in the same step makes room for the batch."""
    await ledger.reserve(calls(KEY, 3, limit=3))
    refund = Settlement("refund", {KEY: -1})
    grant = await ledger.reserve(calls(KEY, 2, limit=3, settlements=[refund]))
    assert (grant.used, grant.admitted) == ((2,), (True, False))


async def test_settlement_of_a_known_reservation(ledger: Ledger) -> None:
    """A reservation that is recognized still brings its settlements."""
    asked = calls(KEY, 2)
    await ledger.reserve(asked)
    grant = await ledger.reserve(
        calls(KEY, 2, id=asked.id, settlements=[Settlement("s", {KEY: 3})])
    )
    assert grant.known
    assert await ledger.used(KEY) == [5]


async def test_refund_ends_at_zero(ledger: Ledger) -> None:
    """More than there is cannot be taken back, and a refund makes no key."""
    await ledger.reserve(calls(KEY, 1))
    await ledger.reserve(settling(Settlement("refund", {KEY: -5, OTHER: -1})))
    assert await ledger.used(KEY, OTHER) == [0, None]


async def test_late_charge_makes_a_key(ledger: Ledger) -> None:
    """A positive amount is added, to a key that does not exist as well."""
    window = CountKey.at("search", "user_id", "ada", timedelta(days=1), 4e9)
    await ledger.reserve(settling(Settlement("late", {KEY: 2, str(window): 1})))
    assert await ledger.peek([KEY, str(window)]) == (
        KeyUse(KEY, 2, None, None),
        KeyUse(str(window), 1, None, window.ends),
    )


async def test_late_charge_begins_where_the_caller_says(ledger: Ledger) -> None:
    """What is added to a key that nobody knows of is added to the caller's own count."""
    await ledger.reserve(settling(Settlement("one", {KEY: 2, OTHER: 1}, starts={KEY: 5})))
    await ledger.reserve(settling(Settlement("two", {KEY: 1}, starts={KEY: 9})))
    assert await ledger.used(KEY, OTHER) == [8, 1]


async def test_late_charge_of_what_was_granted(ledger: Ledger) -> None:
    """A late charge adds nothing where another attempt has been granted the reservation."""
    asked = calls(KEY, 1)
    await ledger.reserve(asked)
    other = Settlement("other", {KEY: 1}, attempt="another", reservation=asked.id)
    await ledger.reserve(settling(other))
    assert await ledger.used(KEY) == [1]
    own = Settlement("own", {KEY: 3}, attempt=asked.attempt, reservation=asked.id)
    await ledger.reserve(settling(own))
    assert await ledger.used(KEY) == [3]


async def test_settled_attempt_is_undone(ledger: Ledger) -> None:
    """What an attempt charged is taken back exactly, and the reservation can be made anew."""
    await ledger.reserve(calls(KEY, 1))
    lost = batch([slot(KEY, 3), slot(OTHER, used=5)], {0: 1, 1: 1}, {0: 1}, {0: 1})
    await ledger.reserve(lost)
    assert await ledger.used(KEY, OTHER) == [3, 6]
    await ledger.reserve(settling(Settlement("lost", attempt=lost.attempt)))
    assert await ledger.used(KEY, OTHER) == [1, 5]
    grant = await ledger.reserve(calls(KEY, 1, id=lost.id))
    assert (grant.used, grant.known) == ((1,), False)


async def test_settled_attempt_is_undone_first(ledger: Ledger) -> None:
    """The settlement travels with the next try of the same reservation, which is charged once."""
    lost = calls(KEY, 2, limit=2)
    await ledger.reserve(lost)
    retry = calls(
        KEY, 2, limit=2, id=lost.id, settlements=[Settlement("lost", attempt=lost.attempt)]
    )
    grant = await ledger.reserve(retry)
    assert (grant.used, grant.admitted, grant.known) == ((0,), (True, True), False)
    assert await ledger.used(KEY) == [2]
    assert (await ledger.reserve(retry)).known


async def test_settled_attempt_is_refused_later(ledger: Ledger) -> None:
    """An attempt that arrives after its settlement charges nothing; its own settlements hold."""
    late = calls(KEY, 1, settlements=[Settlement("other", {OTHER: 1})])
    await ledger.reserve(settling(Settlement("late", attempt=late.attempt)))
    for _ in range(2):
        with pytest.raises(QuotaStoreError, match="settled") as refused:
            await ledger.reserve(late)
        assert not refused.value.timed_out
    assert await ledger.used(KEY, OTHER) == [None, 1]


async def test_attempt_is_undone_once(ledger: Ledger) -> None:
    """Two settlements of one attempt take back once what it charged."""
    await ledger.reserve(calls(KEY, 3))
    lost = calls(KEY, 2)
    await ledger.reserve(lost)
    await ledger.reserve(
        settling(Settlement("one", attempt=lost.attempt), Settlement("two", attempt=lost.attempt))
    )
    await ledger.reserve(settling(Settlement("three", attempt=lost.attempt)))
    assert await ledger.used(KEY) == [3]


async def test_attempt_that_charged_nothing(ledger: Ledger) -> None:
    """Undoing an attempt that was answered from memory, or refused, takes nothing back."""
    made = calls(KEY, 2, limit=2)
    await ledger.reserve(made)
    rerun = calls(KEY, 2, limit=2, id=made.id)
    refused = calls(KEY, 1, limit=2)
    assert (await ledger.reserve(rerun)).known
    await ledger.reserve(refused)
    attempts = (rerun.attempt, refused.attempt)
    await ledger.reserve(settling(*(Settlement(each, attempt=each) for each in attempts)))
    assert await ledger.used(KEY) == [2]
    assert (await ledger.reserve(calls(KEY, 2, limit=2, id=made.id))).known


async def test_undone_attempt_and_amounts(ledger: Ledger) -> None:
    """One settlement can undo what was charged and charge something else instead."""
    lost = calls(KEY, 3)
    await ledger.reserve(lost)
    await ledger.reserve(settling(Settlement("half", {KEY: 1}, attempt=lost.attempt)))
    assert await ledger.used(KEY) == [1]


async def test_peek(ledger: Ledger) -> None:
    """A peek tells count, limit and end of window, in the order asked, and changes nothing."""
    window = CountKey.at("search", "user_id", "ada", timedelta(days=1), 4e9)
    assert window.ends is not None
    day = Slot(
        str(window),
        0,
        float(window.ends),
        (Cap("b", 7), Cap("a", 5), Cap("try", 2, enforced=False)),
    )
    await ledger.reserve(batch([day, slot(KEY)], {0: 1, 1: 1}))
    used = KeyUse(str(window), 1, 5, window.ends)
    for _ in range(2):
        assert await ledger.peek([OTHER, str(window), KEY, str(window)]) == (
            None,
            used,
            KeyUse(KEY, 1, None, None),
            used,
        )
    assert await ledger.peek([]) == ()


async def test_shown_limit_follows(ledger: Ledger) -> None:
    """The limit that is shown is that of the latest charge; refunds leave it."""
    for limit in (5, 9):
        await ledger.reserve(calls(KEY, 1, limit=limit))
    await ledger.reserve(settling(Settlement("refund", {KEY: -1}), Settlement("late", {KEY: 2})))
    assert await ledger.peek([KEY]) == (KeyUse(KEY, 3, 9, None),)


async def test_reset(ledger: Ledger) -> None:
    """A reset count is 0, and stays: a caller's own count does not fill it again."""
    await ledger.reserve(batch([slot(KEY, 5, used=4)], {0: 1}))
    window = str(CountKey.at("search", "user_id", "bob", timedelta(hours=1), 4e9))
    await ledger.reset([KEY, OTHER, window, KEY])
    assert await ledger.peek([KEY, OTHER, window]) == (
        KeyUse(KEY, 0, 5, None),
        KeyUse(OTHER, 0, None, None),
        KeyUse(window, 0, None, CountKey.parse(window).ends),
    )
    grant = await ledger.reserve(
        batch([slot(KEY, 5, used=4), slot(OTHER, 5, used=4)], {0: 1, 1: 1})
    )
    assert grant.used == (0, 0)
    await ledger.reset([])


async def test_usages(ledger: Ledger) -> None:
    """All counts, or those whose keys match a pattern, sorted by key."""
    keys = [
        str(CountKey(tool, "user_id", who))
        for tool in ("search", "email")
        for who in ("ada", "bob", "[x]")
    ]
    for key in keys:
        await ledger.reserve(calls(key, 1))
    await ledger.reset([r"odd[key]\*"])
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
    found = {pattern: [use.key for use in ledger.store.usages(pattern)] for pattern in patterns}
    assert found == patterns
    assert ledger.store.usages(keys[0]) == [KeyUse(keys[0], 1, 100, None)]


async def test_stores_share_nothing(make: Make) -> None:
    """Another store, or another prefix, has counts of its own."""
    one, other = make(), make()
    await one.reserve(calls(KEY, 1))
    assert await other.used(KEY) == [None]
    assert other.store.usages() == []


async def test_idle_count_expires(make: Make) -> None:
    """A count that nobody charges is forgotten when its time is over."""
    ledger = make(idle_ttl=timedelta(seconds=1))
    await ledger.reserve(calls(KEY, 1))
    eventually(lambda: ledger.store.peek([KEY]) == (None,))
    assert (await ledger.reserve(batch([slot(KEY, 5, used=2)], {0: 1}))).used == (2,)


@pytest.mark.parametrize("made_by", ["charge", "settlement", "reset"])
async def test_count_of_a_run_expires(
    make: Make, made_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's count has a shorter idle time, however it was made, and none that is longer."""
    monkeypatch.setattr("langchain_quota.stores.RUN_IDLE", 1)
    ledger = make()
    keys = [str(CountKey("search", dimension, "run")) for dimension in ("run", "running")]
    keys.append(str(CountKey("run", "user_id", "run")))
    if made_by == "reset":
        await ledger.reset(keys)
    elif made_by == "settlement":
        await ledger.reserve(settling(Settlement("late", dict.fromkeys(keys, 1))))
    else:
        await ledger.reserve(batch([slot(key) for key in keys], {0: 1, 1: 1, 2: 1}))
    used = 0 if made_by == "reset" else 1
    eventually(lambda: ledger.store.peek(keys[:1]) == (None,))
    assert await ledger.used(*keys) == [None, used, used]

    monkeypatch.setattr("langchain_quota.stores.RUN_IDLE", 3600)
    short = make(idle_ttl=timedelta(seconds=1))
    await short.reserve(calls(keys[0], 1))
    eventually(lambda: short.store.peek(keys[:1]) == (None,))


async def test_names_of_any_form(ledger: Ledger) -> None:
    """Ids, attempts and keys may be any text, of any length."""
    odd = "\ud800 ':{}*\n%é" * 500
    asked = batch([slot(odd, 5)], {0: 1}, id=odd, attempt=odd)
    assert (await ledger.reserve(asked)).admitted == (True,)
    assert (await ledger.reserve(asked)).known
    await ledger.reserve(settling(Settlement(odd, attempt=odd)))
    assert await ledger.used(odd) == [0]


async def test_large_batch(ledger: Ledger) -> None:
    """A batch of many calls over many counts is one step like any other."""
    keys = [f"search:user_id:{number}" for number in range(300)]
    charges = [{index: 1, (index + 1) % 300: 1} for index in range(300)]
    asked = batch([slot(key, 2) for key in keys], *charges * 10)
    grant = await ledger.reserve(asked)
    assert grant.admitted == (True,) * 300 + (False,) * 2700
    assert await ledger.used(*keys) == [2] * 300
    assert (await ledger.reserve(asked)).known
    await ledger.reserve(settling(Settlement("all", attempt=asked.attempt)))
    assert await ledger.used(*keys) == [0] * 300


async def test_wrong_use(ledger: Ledger) -> None:
    """What is no reservation, and a string in place of keys, is a TypeError."""
    with pytest.raises(TypeError, match="must be a Reservation, not 'search'"):
        await ledger.reserve("search")
    for wrong in ("search", [1], None):
        with pytest.raises(TypeError, match="keys must be a sequence of strings"):
            await ledger.peek(wrong)
        with pytest.raises(TypeError, match="keys must be a sequence of strings"):
            await ledger.reset(wrong)
