"""What stores refuse when they are made, when they are asked, and of grants; and telemetry."""

import re
import traceback
from datetime import datetime, timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from langchain_quota import Telemetry
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


HOUR = timedelta(hours=1)
BOUNDS = ("max_exported_threads", "max_exported_subjects", "max_tools", "max_agents")
WRONG: list[tuple[str, object, type[Exception]]] = [
    *[("near", value, ValueError) for value in (0, 1.1, float("nan"))],
    *[("near", value, TypeError) for value in ("0.8", True)],
    *[("spans", value, ValueError) for value in ("some", None)],
    ("thread_ttl", timedelta(0), ValueError),
    ("thread_ttl", 3600, TypeError),
    *[(bound, -1, ValueError) for bound in BOUNDS],
    *[(bound, True, TypeError) for bound in BOUNDS],
    ("registry", CollectorRegistry, TypeError),
    ("tracer_provider", TracerProvider, TypeError),
    ("thread_label", "hidden", TypeError),
    *[("subject_label", x, TypeError) for x in (str, {"tenant": "hidden"}, {7: str})],
    ("count_unchecked_calls", 1, TypeError),
    ("run_histograms", 1, TypeError),
]


@pytest.mark.parametrize(("argument", "value", "error"), WRONG, ids=lambda value: str(value)[:24])
def test_what_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    """The error names the argument and the value, and leaves the registry to another Telemetry."""
    registry = CollectorRegistry()
    with pytest.raises(error, match=rf"^(Invalid )?{argument}\b") as caught:
        Telemetry(**{"registry": registry, argument: value})
    shown = f"{next(iter(value))!r} is mapped to" if isinstance(value, dict) else repr(value)
    assert shown in str(caught.value)
    assert list(registry.collect()) == []
    # The ends of the bounds are allowed.
    ends: Any = {"near": 1, "thread_ttl": timedelta(microseconds=1), **dict.fromkeys(BOUNDS, 0)}
    Telemetry(registry=registry, **ends)


def later(thread_id: object) -> str:
    return str(thread_id)


@pytest.mark.parametrize(
    ("argument", "ours", "theirs"),
    [
        ("near", 0.9, 0.8),
        ("thread_label", later, None),
        ("subject_label", {"tenant": later}, {}),
        ("max_exported_threads", 5, 500),
        ("max_exported_subjects", 5, 100),
        ("thread_ttl", HOUR / 2, HOUR),
        ("max_tools", 7, 100),
        ("max_agents", 7, 1000),
    ],
)
def test_what_shapes_shared_metrics_must_agree(argument: str, ours: Any, theirs: Any) -> None:
    """Of two Telemetry on one registry; the error names the argument and both values."""
    registry = CollectorRegistry()
    Telemetry(registry=registry)
    Telemetry(registry=registry, spans="off", count_unchecked_calls=True, run_histograms=True)
    with pytest.raises(ValueError, match=argument) as caught:
        Telemetry(**{"registry": registry, argument: ours})
    assert f"{argument}={ours!r}" in str(caught.value)
    assert f"{argument}={theirs!r}" in str(caught.value)
