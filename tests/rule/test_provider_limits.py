"""What providers' headers and errors say about their limits, in all their formats."""

from typing import Any

import pytest

from langchain_quota.core import provider_limits


def test_limits() -> None:
    """Each limit is read with what is left of it; the tighter of Anthropic's is not read twice."""
    openai = {"x-ratelimit-limit-tokens": "90000", "x-ratelimit-remaining-tokens": "75000"}
    assert provider_limits.read_limits(openai) == {"total_tokens": (90_000, 75_000)}
    anthropic = {
        f"anthropic-ratelimit-{unit}-{part}": value
        for unit in ("input-tokens", "output-tokens", "tokens", "requests")
        for part, value in (("limit", "80"), ("remaining", "20"), ("reset", "2026-11-27T04:00:15Z"))
    }
    units = "input_tokens", "output_tokens", "requests"
    assert provider_limits.read_limits(anthropic) == dict.fromkeys(units, (80, 20))


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-limit-requests": "10"},
        {"x-ratelimit-limit-requests": "0", "x-ratelimit-remaining-requests": "0"},
        {"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "6"},
        {"x-ratelimit-limit-requests": "9", "x-ratelimit-remaining-requests": "nan"},
        {"x-ratelimit-limit-images": "10", "x-ratelimit-remaining-images": "1"},
    ],
)
def test_what_is_left_out(headers: dict[str, str]) -> None:
    """Half of a limit, nonsense, or a limit of something else is no limit to keep."""
    assert provider_limits.read_limits(headers) == {}


NOW, LATER = "Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:51:07 GMT"
LONG_AGO = "1 Jan 0001 00:00:00 +9999999999999"


@pytest.mark.parametrize(
    ("status", "headers", "pause"),
    [
        (429, {"retry-after": "7"}, 7.0),
        (503, {"retry-after": "0.25"}, 0.25),
        (429, {"retry-after": "1e9"}, 300.0),
        *((429, {"retry-after": text}, 0.0) for text in ("-1", "nan", "tomorrow", LONG_AGO)),
        (429, {"retry-after": LATER, "date": NOW}, 90.0),
        (503, {"retry-after": "Sun Nov  6 08:51:07 1994", "date": NOW}, 90.0),
        (503, {"retry-after": LATER}, 0.0),
        (429, {"retry-after": "Fri, 27 Nov 2099 04:00:00 GMT"}, 300.0),
        (503, {"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        (429, {"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        *((429, {}, 0.0), (529, {}, None), (200, {"retry-after": "7"}, None), (None, {}, None)),
    ],
)
def test_pauses(status: int | None, headers: dict[str, str], pause: float | None) -> None:
    """A pause is seconds, milliseconds or a date, and bounded; an error 429 always asks for one."""
    assert provider_limits.read_pause(status, headers) == pause


def test_errors() -> None:
    """Botocore's have a dictionary in place of a response, Gemini's a cause with the pause."""
    error: Any = Exception("An error occurred (ThrottlingException)")
    error.response = {"ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"Date": "now"}}}
    assert provider_limits.read_error(error) == (429, {"date": "now"})
    error = Exception("Error calling model")
    cause: Any = Exception("429 RESOURCE_EXHAUSTED {'retryDelay': '1.5s'}")
    cause.code, error.__cause__ = 429, cause
    assert provider_limits.read_error(error) == (429, {"retry-after": "1.5"})
