"""The keys of counts: no two counts share one, and windows begin where they should."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.stores.keys import CountKey

texts = st.text(st.characters()) | st.text("a:%~{}*é\n\ud800", max_size=80)
counted = st.just((None, None)) | st.tuples(st.integers(1, 10**9), st.integers(-5, 10**9))
keys = st.builds(
    lambda counter, dimension, subject, window, prefix: CountKey(
        counter, dimension, subject, window[0], window[1], prefix
    ),
    texts,
    texts,
    texts,
    counted,
    st.just("") | texts,
)


@given(one=keys, other=keys)
def test_different_keys_have_different_texts(one: CountKey, other: CountKey) -> None:
    """Two keys have one text only if they are one key."""
    assert (str(one) == str(other)) == (one == other)


def test_no_key() -> None:
    """What is no text of a key is refused, and named."""
    for text in (
        "",
        "search",
        "search:user_id",
        "search:user_id:ada:86400",
        "search:user_id:ada:86400:1:1",
        "search:user_id:ada:0:1",
        "search:user_id:ada:-5:1",
        "search:user_id:ada:86400:x",
        "search:user_id:ada:86400:01",
        "search:user_id:ada:86400:-0",
        "search:user_id:ada:86400:\u0661",
        "search:user_id:a b",
        "search:user_id:é",
        "search:user_id:%",
        "search:user_id:%zz",
        "search:user_id:%3a",
        "search:user_id:%FF",
        "search:user_id:ada\n",
        "search:user_id:*",
        "/search:user_id:ada",
        "a/b/search:user_id:ada",
        "a:b/search:user_id:ada",
        "a b/search:user_id:ada",
    ):
        with pytest.raises(ValueError, match="not the key of a count") as refused:
            CountKey.parse(text)
        assert repr(text) in str(refused.value)


def test_longest_window() -> None:
    """A window that would end after the last possible date ends then."""
    key = CountKey.at("search", "user_id", "ada", timedelta(days=999_999_999), 0)
    assert key.resets_at == datetime.max.replace(tzinfo=UTC)
    assert CountKey.parse(str(key)) == key


@pytest.mark.parametrize("window", [timedelta(0), timedelta(seconds=-1), timedelta(seconds=1.5)])
def test_wrong_window(window: timedelta) -> None:
    """A window is whole seconds, from 1."""
    with pytest.raises(ValueError, match="window must be"):
        CountKey.at("search", "user_id", "ada", window, 0)


@pytest.mark.parametrize(("window", "index"), [(None, 1), (60, None), (0, 1)])
def test_half_a_window(window: int | None, index: int | None) -> None:
    """Length and number of a window go together."""
    with pytest.raises(ValueError, match="window"):
        CountKey("search", "user_id", "ada", window, index)
