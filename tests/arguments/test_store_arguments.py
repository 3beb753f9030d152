"""What stores refuse: when they are made, when they are asked, and of grants."""

import re
import traceback
from datetime import datetime, timedelta
from typing import Any

import pytest

from langchain_quota.stores.memory import MemoryStore
from langchain_quota.stores.redis import RedisStore

KEY = "search:user_id:ada"
PREFIX = "prefix must match [A-Za-z0-9_.-]{1,64}, not"
IDLE = "idle_ttl must be a second or more"
NO_DURATION = "idle_ttl must be a timedelta, not 60"

MADE: list[tuple[type[Any], dict[str, Any], type[Exception], str]] = [
    (MemoryStore, {"max_keys": 0}, ValueError, "max_keys must be 1 or more, not 0"),
    (MemoryStore, {"max_keys": 1.5}, TypeError, "max_keys must be a whole number, not 1.5"),
    (MemoryStore, {"max_keys": True}, TypeError, "max_keys must be a whole number, not True"),
    (MemoryStore, {"idle_ttl": 60}, TypeError, NO_DURATION),
    (MemoryStore, {"idle_ttl": timedelta(seconds=0.5)}, ValueError, IDLE),
    (RedisStore, {"idle_ttl": 60}, TypeError, NO_DURATION),
    (RedisStore, {"idle_ttl": timedelta(0)}, ValueError, IDLE),
    (RedisStore, {"source": 5}, TypeError, "source must be a URL"),
    (RedisStore, {"source": b"redis://"}, TypeError, "not a bytes"),
    *(
        (RedisStore, {"prefix": each}, ValueError, f"{PREFIX} {each!r}")
        for each in ("", "a" * 65, "a:b", "{a}", "a\n")
    ),
    (RedisStore, {"prefix": None}, TypeError, "prefix must be a string or a function, not None"),
    *(
        (RedisStore, {"timeout": each}, ValueError, f"timeout must be above 0, not {each!r}")
        for each in (0, -1, float("nan"), float("inf"))
    ),
    *(
        (RedisStore, {"timeout": each}, TypeError, f"timeout must be a number, not {each!r}")
        for each in (None, True)
    ),
]


@pytest.mark.parametrize(("kind", "options", "error", "said"), MADE)
def test_a_store_that_cannot_be_made(
    kind: type[Any], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """The message names the argument and the value."""
    given = {"source": "redis://127.0.0.1"} if kind is RedisStore else {}
    with pytest.raises(error, match=re.escape(said)):
        kind(**{**given, **options})


def test_redis_is_named() -> None:
    """The repr has server and prefix, and no user."""
    said = repr(RedisStore("redis://worker:pw@example.org:1234/5"))
    assert said == "RedisStore(redis://example.org:1234/5, prefix='langchain_quota')"


def test_a_url_that_is_wrong_is_not_quoted() -> None:
    """It may hold a password, and most often one that was not percent-encoded."""
    at = "127.0.0.1"
    for url in (
        *(f"redis://:s3cr3t/p@ss@{at}:6379/0", f"redis://s3cr3t/p@{at}:6379/0"),
        *(f"redis://worker:s3cr3t{end}p@{at}:6379/0" for end in "#?"),
        *(f"redis://worker:12345{end}s3cr3t@{at}" for end in "/?"),
        *("redis://:12345", f"worker:s3cr3t@{at}", "s3cr3t", "unix://worker:s3cr3t/p@/run/x.sock"),
        *(
            f"redis://worker:s3cr3t@{end}"
            for end in (f"{at}:s3cr3t/0", f"[{at}/0", f"{at}:99999/0")
        ),
        *(f"redis://worker:s3cr3t@{at}/{end}" for end in ("zero", "0?socket_timeout=s3cr3t")),
        *(f"redis://worker:s3cr3t@{at}/0?s3cr3t=1", f"http://worker:s3cr3t@{at}:6379/0"),
    ):
        with pytest.raises(ValueError, match="the URL of Redis must be") as refused:
            RedisStore(url)
        assert ("knows, not http://…;" in str(refused.value)) == url.startswith("http:")
        told = "".join(traceback.format_exception(refused.value))
        assert "s3cr3t" not in told.split("Error: ", 1)[1], url
        assert refused.value.__context__ is None, url


STORES = pytest.mark.parametrize(
    "store", [MemoryStore(), RedisStore("redis://127.0.0.1:1")], ids=["memory", "redis"]
)


@STORES
async def test_what_is_no_request(store: Any) -> None:
    """What is no request, and a string in place of keys, is a TypeError."""
    said = "request must be an AcquireRequest, not 'search'"
    asks: list[tuple[Any, Any, Any, str]] = [(store.acquire, store.aacquire, "search", said)]
    for wrong in ("search", [1], None):
        for ask, aask in ((store.peek, store.apeek), (store.reset, store.areset)):
            asks.append((ask, aask, wrong, "keys must be a sequence of strings"))
    for ask, aask, wrong, said in asks:
        with pytest.raises(TypeError, match=said):
            ask(wrong)
        with pytest.raises(TypeError, match=said):
            await aask(wrong)


NO_TIME_ZONE = datetime(2100, 1, 1)  # noqa: DTZ001 - the mistake
GRANTS: list[tuple[dict[str, Any], str]] = [
    ({"amount": 0}, "amount must be above 0"),
    ({"amount": 9 * 10**15 + 1}, "at most 9000000000000000"),
    ({"amount": -1}, "amount must be 0 or more"),
    ({"amount": "1"}, "amount must be a whole number"),
    ({"amount": 1.0}, "amount must be a whole number"),
    ({"key": 7}, "key must be a string"),
    ({"key": "email:ada"}, "key must be the key of a count, such as 'email:user_id:ada'"),
    ({"until": 7}, "until must be a datetime or None"),
    ({"until": NO_TIME_ZONE}, "until must have a time zone"),
    ({"window": 86_400}, 'window must be a time such as "1h", a timedelta or None, not 86400'),
    ({"window": "1 day"}, "or a time such as"),
    ({"reason": None}, "reason must be a string"),
    ({"by": "x" * 1001}, "by must have at most 1000 characters"),
    ({"id": ""}, "id must not be empty"),
]


@STORES
def test_a_grant_that_cannot_be_given(store: Any) -> None:
    """What cannot be given, or kept, is refused, and named, before a server is asked."""
    for ask in (store.reset, lambda keys: store.revoke(keys[0], "4711")):
        with pytest.raises(ValueError, match=r"key must be the key of a count, .* not 'email:ada'"):
            ask(["email:ada"])
    for options, said in GRANTS:
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            store.grant(**{"key": KEY, "amount": 1, **options})
