"""Shards of a store: which keys share a slot, what each shard is asked, and which quotas cross."""

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("redis")

from redis.crc import key_slot

from langchain_quota import ModelCallLimit, Quota, QuotaMiddleware, RedisStore, ToolCallLimit
from langchain_quota.admission import AcquireRequest, Compensation
from langchain_quota.stores.grants import in_window
from langchain_quota.stores.keys import CountKey
from langchain_quota.stores.redis_names import Names
from langchain_quota.stores.redis_script import ScriptCall
from langchain_quota.stores.shards import keys_by_shard, requests_by_shard
from tests.servers.stores import batch, compensating

URL = "redis://127.0.0.1/0"
NAMES = Names("langchain_quota")


def key(shard: str, subject: str = "7") -> str:
    return str(CountKey("search", "thread", subject, shard=shard))


def slots(request: AcquireRequest) -> list[set[int]]:
    """The slots of the keys that each part of a request may touch."""
    found = []
    for shard, part in requests_by_shard(request):
        count, *others = ScriptCall.acquire(NAMES.of(shard), part, 60).arguments()
        found.append({key_slot(name) for name in others[:count] if isinstance(name, bytes)})
    return found


def test_what_a_request_touches_is_in_one_slot() -> None:
    """Counts, attempt, result and corrections of a shard share a slot; other shards have others."""
    undone = Compensation("undone", {key("acme", "8"): 1}, "lost", "asked", {key("acme"): 4})
    request = batch({key("acme"): 1, key("acme", "8"): 1}, compensations=[undone])
    (acme,) = slots(request)
    assert len(acme) == 1
    others = [slots(batch({key(f"tenant-{number}"): 1}))[0] for number in range(50)]
    assert len(set().union(acme, *others)) > 45


def test_without_a_shard_names_are_as_before() -> None:
    """What was counted without shards is found under the same names."""
    assert NAMES.count("search:thread:7") == b"{langchain_quota}:count:search:thread:7"
    # Somebody's own key, which is no key of a count.
    assert NAMES.count("a/b") == b"{langchain_quota}:count:a/b"
    assert NAMES.of("") is NAMES
    assert NAMES.count(key("acme")) == b"{langchain_quota:acme}:count:search:thread:7"


@pytest.mark.parametrize(
    "name",
    [
        b"{langchain_quota}:count:acme/search:thread:7",
        b"{langchain_quota:acme}:count:search",
        b"{langchain_quota:a b}:count:search:thread:7",
        b"{langchain_quota2}:count:search:thread:7",
        b"{langchain_quota}:result:7",
    ],
)
def test_names_of_no_count(name: bytes) -> None:
    """A name that only looks like the name of a count is not read."""
    with pytest.raises(ValueError, match="not the name of a count"):
        NAMES.key(name)


def test_corrections_go_to_their_shards() -> None:
    """Corrections of other shards come first, each shard's in one request; the batch comes last."""
    made = [
        Compensation("a", {key("acme"): 1}),
        Compensation("b", {key("beta"): 1}),
        Compensation("c", starts={key("beta", "8"): 1}, attempt_id="lost"),
        Compensation("d", {"search:thread:7": -1}),
        Compensation("e", attempt_id="own"),
    ]
    asked = batch({key("acme"): 1}, compensations=made)
    *others, (shard, last) = requests_by_shard(asked)
    found = {each: [one.id for one in part.compensations] for each, part in others}
    assert found == {"beta": ["b", "c"], "": ["d"]}
    assert not any(part.idempotency_key or part.counters or part.hits for _, part in others)
    assert (shard, [each.id for each in last.compensations]) == ("acme", ["a", "e"])
    assert (last.hits, last.counters, last.attempt_id) == (
        asked.hits,
        asked.counters,
        asked.attempt_id,
    )
    assert [shard for shard, _ in requests_by_shard(compensating(*made[1:4]))] == ["", "beta"]


def test_one_request_in_two_shards() -> None:
    """It is an error, because it cannot be one step; nothing is sent."""
    for asked in (
        batch({key("acme"): 1, key("beta"): 1}),
        batch({key("acme"): 1, "search:thread:7": 1}),
        compensating(Compensation("a", {key("acme"): 1}, starts={key("beta"): 1})),
    ):
        with pytest.raises(ValueError, match=r"must count in one shard, but .* are in two"):
            RedisStore(URL).acquire(asked)


def test_keys_by_shard() -> None:
    """Keys without a shard stay together, in their order."""
    plain = ["b:thread:7", "a:thread:7"]
    assert keys_by_shard(plain) == [plain]
    mixed = [key("acme"), plain[0], key("beta"), key("acme", "8")]
    assert keys_by_shard(mixed) == [
        [key("acme"), key("acme", "8")],
        plain[:1],
        [key("beta")],
    ]


def test_a_grant_in_a_window_stays_in_its_shard() -> None:
    """The window that runs now is that of the same shard."""
    found = in_window(key("acme"), timedelta(days=1), 0)
    assert found == "acme/search:thread:7:86400:0"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"shard_by": 7}, "shard_by must be a string or None, not 7"),
        ({"shard_by": ""}, "shard_by must be 'thread' or a name in runtime.context.*not ''"),
        ({"shard_by": "global"}, "not 'global'"),
        ({"shard_by": "root_run"}, "not 'root_run'"),
        ({"shard_by": "agent"}, "not 'agent'"),
        ({"shard_by": "tenant", "within_shard": "user_id"}, "must be a sequence of strings"),
        ({"shard_by": "tenant", "within_shard": [7]}, "must be a sequence of strings"),
        ({"shard_by": "tenant", "within_shard": ["global"]}, "must not contain 'global'"),
        ({"within_shard": ["user_id"]}, "needs a shard_by, such as 'tenant'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], problem: str) -> None:
    """A wrong argument about shards is an error when the store is made."""
    with pytest.raises((TypeError, ValueError), match=problem):
        RedisStore(URL, **arguments)


def test_repr() -> None:
    """The text of a store has its `shard_by`."""
    shown = "RedisStore(redis://127.0.0.1:6379/0, prefix='langchain_quota', shard_by='tenant')"
    assert repr(RedisStore(URL, shard_by="tenant")) == shown


def of_function(state: Any, runtime: Any) -> str:
    """A subject that a function computes."""
    return "x"


@pytest.mark.parametrize(
    ("shard_by", "within", "quota"),
    [
        ("tenant", (), Quota(1, per="global")),
        ("tenant", ("user_id",), Quota(1, per="global")),
        ("tenant", (), Quota(1, per="user_id")),
        ("tenant", (), Quota(1, per="agent")),
        ("tenant", (), Quota(1, per=of_function, name="tenant")),
        ("user_id", (), Quota(1, per="tenant")),
        # A sub-agent may have a thread of its own.
        ("thread", (), Quota(1, per="root_run")),
    ],
)
def test_quotas_that_cross_shards(shard_by: str, within: tuple[str, ...], quota: Quota) -> None:
    """A quota that counts calls of several shards is an error, and its remedy works."""
    limit = ToolCallLimit("search", thread_limit=5, quotas=[quota])
    store = RedisStore(URL, shard_by=shard_by, within_shard=within)
    with pytest.raises(ValueError, match="counts calls of several shards") as refused:
        QuotaMiddleware([limit], store=store)
    text = str(refused.value)
    assert f"quota {quota.name!r} of limit {limit.name!r}" in text
    assert "put the limit into a second middleware, with a store without shard_by" in text
    assert "a GraphQuota needs such a store for all its limits" in text
    QuotaMiddleware([limit], store=RedisStore(URL))
    with pytest.raises(ValueError, match="put all model limits into a second middleware"):
        QuotaMiddleware([ModelCallLimit(quotas=[quota])], store=store)
    named = f"within_shard=({quota.dimension!r},)"
    assert (named in text) == (quota.per != "global")
    if named in text:
        within = (*within, quota.dimension)
        QuotaMiddleware([limit], store=RedisStore(URL, shard_by=shard_by, within_shard=within))


class PerRegion(dict[str, str]):
    """A function with a state of its own, which has no hash."""

    def __call__(self, state: Any, runtime: Any) -> str:
        return self["region"]


def test_a_function_without_a_hash() -> None:
    """It gives the subjects of a quota within shards as it does without them."""
    quota = Quota(1, per=PerRegion(region="north"), name="region")
    limits = [ToolCallLimit("search", quotas=[quota])]
    QuotaMiddleware(limits, store=RedisStore(URL))
    with pytest.raises(ValueError, match=r"pass within_shard=\('region',\)"):
        QuotaMiddleware(limits, store=RedisStore(URL, shard_by="tenant"))
    store = RedisStore(URL, shard_by="tenant", within_shard=["region"])
    QuotaMiddleware(limits, store=store)


def test_a_grant_without_a_shard() -> None:
    """No call is judged by the count of such a key, so it is an error that says what to add."""
    store = RedisStore(URL, shard_by="tenant")
    problem = r"shard_by='tenant': 'acme/search:user_id:ada' if tenant 'acme' is meant, not 'search"
    with pytest.raises(ValueError, match=problem):
        store.grant("search:user_id:ada", 5)


@pytest.mark.parametrize(
    ("shard_by", "per"),
    [("tenant", "tenant"), ("tenant", "thread"), ("tenant", "root_run"), ("thread", "thread")],
)
def test_quotas_within_a_shard(shard_by: str, per: str) -> None:
    """Threads, runs and what names the shard are counted within it."""
    limit = ToolCallLimit("search", run_limit=3, quotas=[Quota(1, per=per)])
    QuotaMiddleware([limit], store=RedisStore(URL, shard_by=shard_by))
