"""The keys of counts: no two counts share one, and windows begin where they should."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from langchain_quota.stores.keys import MAX_LENGTH, CountKey, prefix_of
from tests.calls import calls_made

DAY = timedelta(days=1)
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


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (CountKey("search", "user_id", "ada"), "search:user_id:ada"),
        (CountKey("search", "user_id", "ada", 86_400, 20_000), "search:user_id:ada:86400:20000"),
        (CountKey("__all__", "global", ""), "__all__:global:"),
        (CountKey("a,b", "mail", "ada@example.org"), "a,b:mail:ada@example.org"),
        (CountKey("model", "tenant", "a:b"), "model:tenant:a%3Ab"),
        (
            CountKey("model", "tenant", "{a}%*?[]\\/ \n"),
            "model:tenant:%7Ba%7D%25%2A%3F%5B%5D%5C%2F%20%0A",
        ),
        (CountKey("search", "thread", "7", prefix="acme"), "acme/search:thread:7"),
        (CountKey("", "root_run", "7", 60, 5, "a/b:{c}"), "a%2Fb%3A%7Bc%7D/:root_run:7:60:5"),
        (CountKey("model", "tenant", "é"), "model:tenant:%C3%A9"),
        (CountKey("model", "tenant", "\ud800"), "model:tenant:%ED%A0%80"),
    ],
)
def test_text(key: CountKey, text: str) -> None:
    """The text of a key, and back."""
    assert str(key) == text
    assert CountKey.parse(text) == key


@given(key=keys)
@example(CountKey("a" * 64, "b" * 64, "c" * 64))
def test_parse_gives_the_key_back(key: CountKey) -> None:
    """Whatever the values are, the text is plain ASCII, and gives them back if none is too long."""
    text = str(key)
    assert text.isascii()
    assert text.isprintable()
    assert not set(text) & set("{}*?[]\\ \n")
    parsed = CountKey.parse(text)
    assert (parsed.window, parsed.index) == (key.window, key.index)
    prefix, rest = prefix_of(text), text.rpartition("/")[2]
    assert text == (f"{prefix}/{rest}" if key.prefix else rest)
    values = (key.prefix, key.counter, key.dimension, key.subject)
    read_values = (parsed.prefix, parsed.counter, parsed.dimension, parsed.subject)
    parts = (prefix, *rest.split(":"))
    for part, value, read in zip(parts, values, read_values, strict=False):
        if "~" not in part or len(part) <= MAX_LENGTH:
            assert read == value


@given(one=keys, other=keys)
def test_different_keys_have_different_texts(one: CountKey, other: CountKey) -> None:
    """Two keys have one text only if they are one key."""
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize("subject", ["x" * 65, "é" * 11, "x" * 39 + "é" * 20, "x" * 10**6])
def test_long_value_is_shortened(subject: str) -> None:
    """A value that is too long once encoded is cut between characters, and has its hash behind."""
    text = str(CountKey("search", "user_id", subject))
    start, _, digest = CountKey.parse(text).subject.rpartition("~")
    assert subject.startswith(start)
    assert 30 < len(text.split(":")[2].partition("~")[0]) <= 40
    assert len(digest) == 64
    assert text != str(CountKey("search", "user_id", subject[:-1] + "y"))


@pytest.mark.parametrize("text", ["x", "é", ":\n", "\ud800"])
def test_a_megabyte_is_no_more_work_than_a_kilobyte(text: str) -> None:
    """However long a value is, only its beginning is encoded character by character."""
    short, long = (CountKey("search", "user_id", text * 1_000 * size) for size in (1, 1_000))
    assert calls_made(lambda: str(long)) <= calls_made(lambda: str(short)) < 1_000


def test_longest_value_that_stays() -> None:
    """64 characters stand as they are."""
    assert str(CountKey("a", "b", "x" * 64)) == f"a:b:{'x' * 64}"


def test_shortened_value_cannot_be_forged() -> None:
    """Who names himself like another's shortened name gets a key of his own."""
    forged = str(CountKey("a", "b", "x" * 100)).split(":")[2]
    assert str(CountKey("a", "b", forged)) != str(CountKey("a", "b", "x" * 100))


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


@pytest.mark.parametrize(
    ("now", "index"),
    [
        (0, 0),
        (86_399.999, 0),
        (86_400, 1),
        (86_400.001, 1),
        (172_799.99999, 1),
        (1_700_006_400 - 2**-10, 19_675),
        (1_700_006_400, 19_676),
        (-0.5, -1),
    ],
)
def test_window_of_a_moment(now: float, index: int) -> None:
    """Windows are aligned to the epoch; a window's last moment is not the next one's first."""
    key = CountKey.at("search", "user_id", "ada", DAY, now)
    assert key == CountKey("search", "user_id", "ada", 86_400, index)
    assert key.ends is not None
    assert key.ends - 86_400 <= now < key.ends


def test_windows_begin_at_midnight_utc() -> None:
    """A day ends at midnight UTC, an hour at the full hour."""
    noon = datetime(2025, 3, 30, 12, 34, 56, tzinfo=UTC).timestamp()
    day = CountKey.at("search", "user_id", "ada", DAY, noon)
    assert day.resets_at == datetime(2025, 3, 31, tzinfo=UTC)
    hour = CountKey.at("search", "user_id", "ada", timedelta(hours=1), noon)
    assert hour.resets_at == datetime(2025, 3, 30, 13, tzinfo=UTC)


def test_clock_that_goes_backwards() -> None:
    """A clock that is set back is in the earlier window again."""
    keys = [CountKey.at("search", "user_id", "ada", DAY, now) for now in (86_401, 86_399, 86_402)]
    assert keys[0] == keys[2] != keys[1]


def test_without_a_window() -> None:
    """A count without windows has one key at all times, and does not end."""
    key = CountKey.at("search", "user_id", "ada", None, 5e9)
    assert key == CountKey("search", "user_id", "ada")
    assert (key.ends, key.resets_at) == (None, None)


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
