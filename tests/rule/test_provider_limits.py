"""What providers' headers say about their limits, in all their formats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langchain_quota.core.provider_limits import MINUTE, Bucket, read_buckets, read_pause

OPENAI = {"x-ratelimit-limit-tokens": "150000", "x-ratelimit-remaining-tokens": "75000"}
DATE = {"date": "Fri, 27 Nov 2026 04:00:00 GMT"}
NAMES = [
    *("retry-after", "retry-after-ms", "date", "requests-limit"),
    *(f"x-ratelimit-{part}-requests" for part in ("limit", "remaining", "reset")),
    *(f"anthropic-ratelimit-input-tokens-{part}" for part in ("limit", "remaining", "reset")),
]
TEXTS = st.one_of(
    st.text(max_size=20),
    st.one_of(st.floats(), st.integers()).map(str),
    st.datetimes(timezones=st.timezones()).map(lambda date: date.isoformat()),
    st.from_regex(r"[0-9]{1,5}(ms|s|m|h|d)[0-9]{0,3}s?", fullmatch=True),
)


@pytest.mark.parametrize(
    ("reset", "window"),
    [
        *((minute, MINUTE) for minute in ("30s", "29.4s", "0m30s", "", "soon")),
        *(("5000ms", 10.0), ("1m40s", 200.0), ("12", 24.0)),
    ],
)
def test_half_of_a_bucket_shows_its_window(reset: str, window: float) -> None:
    """The time until a bucket is full, and what is used of it, give its window."""
    headers = {**OPENAI, "x-ratelimit-reset-tokens": reset}
    assert read_buckets(headers, {}) == {"tokens": Bucket(150_000, window, window / 2)}


def test_anthropics_limits() -> None:
    """Dates are read by the provider's own clock; the tighter of two limits is not read twice."""
    said = {
        f"anthropic-ratelimit-{unit}-{part}": value
        for unit in ("input-tokens", "output-tokens", "tokens", "requests")
        for part, value in (("limit", "80"), ("remaining", "20"), ("reset", "2026-11-27T04:00:15Z"))
    }
    bucket = Bucket(80, 20.0, 15.0)
    assert read_buckets({**said, **DATE}, {}) == dict.fromkeys(
        ("input-tokens", "output-tokens", "requests"), bucket
    )
    # Without its clock the window is what is known, or a minute.
    assert read_buckets(said, {"requests": bucket})["requests"] == bucket
    assert read_buckets(said, {})["requests"] == Bucket(80, MINUTE, 45.0)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-limit-requests": "10"},
        {"requests-limit": "10", "requests-remaining": "1"},
        {"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0"},
        {"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "6"},
        {**OPENAI, "x-ratelimit-reset-tokens": "12h"},
        {"x-ratelimit-limit-images": "10", "x-ratelimit-remaining-images": "1"},
        {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59"},
    ],
)
def test_what_is_left_out(headers: dict[str, str]) -> None:
    """Half of a limit, one of a day, of something else, or hardly used, is no limit to keep."""
    assert read_buckets(headers, {}) == {}


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Fri, 27 Nov 2026 04:00:20 GMT", **DATE}, 20.0),
        ({"retry-after": "Fri, 27 Nov 2026 03:59:00 GMT", **DATE}, 0.0),
        ({"retry-after": "Fri, 27 Nov 2026 04:00:20 GMT"}, None),
        ({"retry-after": "1e9"}, 300.0),
        *(({"retry-after": "-1"}, None), ({}, None)),
    ],
)
def test_pauses(headers: dict[str, str], pause: float | None) -> None:
    """A pause is seconds, or a date by the provider's clock; it has an upper bound."""
    assert read_pause(headers) == pause


@given(st.dictionaries(st.sampled_from(NAMES), TEXTS))
def test_any_headers(headers: dict[str, str]) -> None:
    """Whatever headers say, nothing is raised, and what is read is within bounds."""
    for bucket in read_buckets(headers, {}).values():
        assert bucket.limit >= 1
        assert 0 <= bucket.full_in <= bucket.window
        assert 1 <= bucket.window <= 600
    assert 0 <= (read_pause(headers) or 0) <= 300
