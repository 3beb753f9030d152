"""The keys of counts: no two counts share one, and windows begin where they should."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota.stores.keys import CountKey
from tests.calls import calls_made

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
    shown = CountKey.parse(str(CountKey("search", "user_id", subject))).subject
    start, _, digest = shown.rpartition("~")
    assert subject.startswith(start)
    assert (len(digest), 0 < len(start) <= 40) == (64, True)
    assert str(CountKey("search", "user_id", shown)) != str(CountKey("search", "user_id", subject))
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
    """A window is whole seconds, from 1; its length and its number go together."""
    for window in (timedelta(0), timedelta(seconds=-1), timedelta(seconds=1.5)):
        with pytest.raises(ValueError, match="window must be"):
            CountKey.at("search", "user_id", "ada", window, 0)
    for seconds, index in ((None, 1), (60, None), (0, 1)):
        with pytest.raises(ValueError, match="window"):
            CountKey("search", "user_id", "ada", seconds, index)
    with pytest.raises(ValueError, match="offset must be"):
        CountKey.parse("search:user_id:ada:86400:1+86400")
