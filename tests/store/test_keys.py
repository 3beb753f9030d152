"""The keys of counts, of which no two share one, and the largest amounts that a count has."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota import MemoryStore
from langchain_quota.core.admission import Correction
from langchain_quota.stores.keys import CountKey
from tests.examples import examples
from tests.server.stores import batch, correcting, settlement, used
from tests.store.conftest import Place
from tests.stores import TODAY, Clock, calls_made

texts = st.text(st.characters()) | st.text("a:%~{}*é\n\ud800", max_size=80)
counted = st.just((None, None, None)) | st.tuples(
    st.integers(1, 10**9), st.integers(-5, 10**9), st.none() | st.integers(-86_399, 86_399)
)
keys = st.builds(
    lambda counter, dimension, subject, window, prefix: CountKey(
        counter, dimension, subject, window[0], window[1], prefix, window[2]
    ),
    *(texts, texts, texts, counted, st.just("") | texts),
)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (CountKey("search", "user_id", "ada", 86_400, 20_000), "search:user_id:ada:86400:20000"),
        (CountKey("__all__", "global", ""), "__all__:global:"),
        (CountKey("a,b", "mail", "ada@example.org"), "a,b:mail:ada@example.org"),
        (CountKey("model", "tenant", "a:b{c}%*"), "model:tenant:a%3Ab%7Bc%7D%25%2A"),
        (CountKey("", "root_run", "7", 60, 5, "a/b:{c}"), "a%2Fb%3A%7Bc%7D/:root_run:7:60:5"),
        (CountKey("a", "b", "c", 86_400, 1_767_225_600, "", 0), "a:b:c:86400:1767225600+0"),
        (CountKey("a", "b", "c", 90_000, -9, "x", -3_600), "x/a:b:c:90000:-9-3600"),
        (CountKey("model", "tenant", "é\ud800"), "model:tenant:%C3%A9%ED%A0%80"),
        (CountKey("a", "b", "x" * 64), f"a:b:{'x' * 64}"),
    ],
)
def test_text(key: CountKey, text: str) -> None:
    """The text of a key, and back."""
    assert str(key) == text
    assert CountKey.parse(text) == key


@given(one=keys, other=keys)
@example(CountKey("a", "b", "x" * 99 + "y"), CountKey("a", "b", "x" * 99 + "z"))
def test_different_keys_have_different_texts(one: CountKey, other: CountKey) -> None:
    """Two keys have one text only if they are one key; it is plain ASCII without wildcards."""
    assert (str(one) == str(other)) == (one == other)
    assert str(one).isascii()
    assert str(one).isprintable()
    assert not set(str(one)) & set("{}*?[]\\ \n")


@pytest.mark.parametrize("subject", ["x" * 65, "é" * 11, "x" * 39 + "é" * 20])
def test_long_value_is_shortened(subject: str) -> None:
    """It is cut between characters, and has its hash behind; nobody can take that name."""
    key = CountKey.parse(text := str(CountKey("search", "user_id", subject)))
    start, _, digest = key.subject.rpartition("~")
    assert subject.startswith(start)
    assert (len(digest), 0 < len(start) <= 40) == (64, True)
    assert str(CountKey("search", "user_id", str(key.subject))) != text == str(key)
    store = MemoryStore(clock=Clock())
    assert store.grant(text, 1, window="1d").key == f"{text}:{TODAY}"
    # A megabyte is no more work than a kilobyte.
    large = CountKey("search", "user_id", subject * 20_000)
    assert calls_made(lambda: str(large)) < 1_000


def test_no_key() -> None:
    """What is no text of a key is refused, and named."""
    for text in (
        *("", "search", "search:user_id", "search:user_id:ada:86400"),
        *(f"search:user_id:ada:{end}" for end in ("86400:1:1", "0:1", "-5:1", "86400:x")),
        *(f"search:user_id:ada:86400:1{end}" for end in ("+", "-0", "+00", "+123456")),
        *(f"search:user_id:ada:86400:{end}" for end in ("01", "-0", "\u0661")),
        *(f"search:user_id:{end}" for end in ("a b", "é", "%", "%zz", "%3a", "%FF", "ada\n", "*")),
        *(f"{start}/search:user_id:ada" for start in ("", "a/b", "a:b", "a b")),
    ):
        with pytest.raises(ValueError, match="key must be the key of a count") as refused:
            CountKey.parse(text)
        assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("now", "window", "resets"),
    [
        (1_767_225_600.0, timedelta(days=1), datetime(2026, 1, 2, tzinfo=UTC)),
        (1_767_311_999.9, timedelta(days=1), datetime(2026, 1, 2, tzinfo=UTC)),
        (1_767_312_000.0, timedelta(days=1), datetime(2026, 1, 3, tzinfo=UTC)),
        (1_767_229_261.0, timedelta(hours=1), datetime(2026, 1, 1, 2, tzinfo=UTC)),
        (-1.0, timedelta(days=1), datetime(1970, 1, 1, tzinfo=UTC)),
        (0.0, timedelta(days=999_999_999), datetime.max.replace(tzinfo=UTC)),
        (0.0, None, None),
    ],
)
def test_when_a_window_ends(now: float, window: timedelta | None, resets: datetime | None) -> None:
    """A day ends at midnight UTC, an hour at the full hour, and none after the last date."""
    key = CountKey.at("search", "user_id", "ada", window, now)
    assert key.resets_at == resets
    assert CountKey.parse(str(key)) == key


def test_wrong_window() -> None:
    """A window is whole seconds, from 1; no zone is a day ahead of UTC."""
    for window in (timedelta(0), timedelta(seconds=-1), timedelta(seconds=1.5)):
        with pytest.raises(ValueError, match="window must be"):
            CountKey.at("search", "user_id", "ada", window, 0)
    with pytest.raises(ValueError, match="offset must be"):
        CountKey.parse("search:user_id:ada:86400:1+86400")


START, LEASE = 3 * 10**9, 900
TICK = Fraction(1, 64)
"""A step of the clock that floating point has exactly, in seconds."""


def key_of(limit: int) -> str:
    """The key of a smooth count with so many tokens a minute."""
    return f"model.total_tokens:global::60~{limit}"


def microseconds(amount: int, limit: int) -> int:
    """How long an amount takes to drain, rounded up."""
    return -(-amount * 60 * 10**6 // limit)


@dataclass
class Call:
    """A call: what it reserves, when it was admitted, and what it used of it in the end."""

    request: Any
    reserve: int
    at: Fraction
    used: int = 0


Step = tuple[str, int, int]
"""What happens, and two numbers from 0 to 1000 that say to which call, how much or how long."""

steps = st.tuples(
    st.sampled_from(
        ["call"] * 4 + ["settle"] * 4 + ["wait"] * 3 + ["delay"] * 2 + ["lost", "back"]
    ),
    st.integers(0, 1000),
    st.integers(0, 1000),
)
histories = st.tuples(
    st.sampled_from([7, 90_000, 25_000_000, 150_000_000]), st.lists(steps, max_size=40)
)

DELAYS: list[Step] = [("delay", 640, 0), ("delay", 1000, 0), ("delay", 640, 0)]
"""The longest one holds, and what was held reopens nothing."""

LATER: list[Step] = [("wait", 207, 159), ("call", 0, 0)]
"""After the clock has gone back, somebody only looks at the count, and time goes on."""


class Play:
    """A history, played on stores that share a clock and must agree."""

    def __init__(self, limit: int, wait: Callable[[float], None], *stores: Any) -> None:
        self.limit, self.wait, self.stores, self.key = limit, wait, stores, key_of(limit)
        self.now, self.running, self.calls = Fraction(START), list[Call](), list[Call]()
        self.closed_until = self.now
        wait(0)

    def do(self, kind: str, first: int, second: int) -> None:
        """Do a step, and compare what the stores say."""
        if kind in ("wait", "back"):
            passed = TICK * (first * second // 250)
            self.now += passed if kind == "wait" else 0
            self.wait(float(passed if kind == "wait" else -passed))
            return
        if kind == "call":
            self.call(1 + self.limit * first * second // 10**6)
        elif kind == "delay":
            self.closed_until = max(self.closed_until, self.now + TICK * first)
            for store in self.stores:
                store.delay(self.key, float(TICK * first), burst=self.limit)
        elif self.running:
            call = self.running.pop(first % len(self.running))
            undo = Correction(uuid4().hex, attempt_id=call.request.attempt_id)
            settled = settlement(call.request, {self.key: call.reserve * second // 500})
            call.used = 0 if kind == "lost" else min(call.reserve, settled.amounts[self.key])
            for store in self.stores:
                for _ in range(2):
                    store.acquire(correcting(undo if kind == "lost" else settled))
        counts, *others = [used(store, self.key) for store in self.stores]
        assert others == [counts] * len(others)

    def call(self, reserve: int) -> None:
        over = {self.key: self.limit}
        request = batch({self.key: reserve}, limits=over, leases={self.key: LEASE})
        result, *others = [store.acquire(request) for store in self.stores]
        assert others == [result] * len(others)
        level = result.drained_in[self.key] + microseconds(reserve, self.limit)
        # Room is the only reason to refuse it.
        assert result.admitted == (level <= microseconds(self.limit, self.limit),)
        if result.admitted[0]:
            assert self.now >= self.closed_until
            self.calls.append(Call(request, reserve, self.now, reserve))
            self.running.append(self.calls[-1])

    def check(self) -> None:
        """In no span of time more than rate and burst; a microsecond is the unit of time."""
        nothing = batch({self.key: 0}, limits={self.key: -1})
        assert [each.acquire(nothing).admitted for each in self.stores] == [(False,)] * 2
        for first, begin in enumerate(self.calls):
            total = 0
            for end in self.calls[first:]:
                total += end.used
                seconds = end.at - begin.at + Fraction(1, 10**6)
                assert total <= self.limit + seconds * self.limit / 60


@pytest.mark.parametrize("place", ["redis", "postgres"], indirect=True)
@examples(120)
@given(history=histories)
@example(history=(90_000, [("call", 900, 1000), *DELAYS, ("settle", 0, 0), ("call", 1, 1)]))
@example(history=(7, [("back", 3, 84), ("call", 0, 0)]))
@example(history=(7, [("delay", 450, 0), ("back", 456, 267), ("settle", 0, 0), *LATER]))
@example(history=(7, [("delay", 450, 0), ("back", 456, 267), ("call", 0, 0), *LATER]))
def test_stores_agree(place: Place, history: tuple[int, list[Step]]) -> None:
    """A server and memory answer the same, and no time has more than the rate and the burst."""
    limit, happens = history
    with place.stores(START) as make:
        scene = Play(limit, make.wait, MemoryStore(clock=make.clock), make())
        for step in happens:
            scene.do(*step)
        scene.check()


@pytest.mark.parametrize("limit", [90_000, 2_000_000, 25_000_000, 150_000_000])
def test_large_limits_are_reached(limit: int) -> None:
    """Callers that never pause use at least 99.9 % of each limit, and never more than all of it."""
    dice, clock = random.Random(limit), Clock(START)  # noqa: S311 - no secret
    store, key, total, waited = MemoryStore(clock=clock), key_of(limit), 0, 0.0
    for _ in range(2000):
        amount = dice.randint(1, limit // 50)
        request = batch({key: amount}, limits={key: limit})
        while not (result := store.acquire(request)).admitted[0]:
            seconds = result.drained_in[key] / 10**6 - (limit - amount) * 60 / limit + 1e-6
            clock.now, waited = clock.now + seconds, waited + seconds
        total += amount
    allowed = limit + limit * waited / 60
    assert waited > 300
    assert 0.999 * allowed <= total <= allowed
