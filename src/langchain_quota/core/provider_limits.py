"""What providers say about their rate limits in the headers of answers, and in errors.

Anthropic: https://platform.claude.com/docs/en/api/rate-limits, *Response headers*. OpenAI and what
is compatible: https://platform.openai.com/docs/guides/rate-limits, *Rate limits in headers*. Both
count requests and tokens a minute, in buckets that refill all the time. Names of headers are in
lower case here.
"""

import re
from collections.abc import Mapping
from contextlib import suppress

TOO_MANY_REQUESTS = 429
_UNAVAILABLE = (503, 529)

_MAX_PAUSE = 300.0
"""The longest pause that an error can ask for, in seconds; after it, a call asks again."""

_LIMIT = re.compile(
    r"x-ratelimit-limit-(requests|tokens)"
    # Anthropic's `tokens` repeats the tighter one of its other two limits on tokens.
    r"|anthropic-ratelimit-(requests|(?:in|out)put-tokens)-limit"
)
# A provider's error may quote a prompt: no text may take long.
_DELAY = re.compile(r"retryDelay\W{1,9}(\d{1,9}(?:\.\d{1,9})?)s")


def lower_names(headers: object) -> dict[str, str]:
    """Return headers with names in lower case; none if an integration calls something else so."""
    items = headers.items() if isinstance(headers, Mapping) else ()
    return {str(name).lower(): str(value) for name, value in items}


def read_error(error: BaseException) -> tuple[int | None, dict[str, str]]:
    """Return the HTTP status and the headers that a chat model's error shows.

    botocore's errors have a dictionary as `response`. Gemini's are the cause of the integration's,
    have a `code`, and name the pause in their text.
    """
    for shown in (error, error.__cause__):
        response = getattr(shown, "response", None)
        if isinstance(response, Mapping):
            metadata = response.get("ResponseMetadata", {})
            return metadata.get("HTTPStatusCode"), lower_names(metadata.get("HTTPHeaders"))
        for source, name in ((response, "status_code"), (shown, "status_code"), (shown, "code")):
            status = getattr(source, name, None)
            if isinstance(status, int):
                delay = _DELAY.search(str(shown))
                headers = {"retry-after": delay[1]} if delay else {}
                return status, headers | lower_names(getattr(response, "headers", None))
    return None, {}


def read_headers(
    status: int | None, headers: object
) -> tuple[dict[str, tuple[float, float]], float | None]:
    """Return the limits that headers name, and for how many seconds nothing should be sent.

    Each limit comes with what is left of it, by what it counts: `requests`, `total_tokens`, ….
    What cannot be read is left out. A pause is at most 300 seconds; `None` is none.
    """
    limits, said = {}, lower_names(headers)
    for name, text in said.items():
        if match := _LIMIT.fullmatch(name):
            unit = (match[1] or match[2]).replace("-", "_")
            limit = _number(text)
            left = _number(said.get(name.replace("-limit", "-remaining")))
            if limit is not None and left is not None and max(1, left) <= limit < 2**53:
                limits["total_tokens" if unit == "tokens" else unit] = limit, left
    pause = _number(said.get("retry-after"))
    if status == TOO_MANY_REQUESTS or (status in _UNAVAILABLE and pause is not None):
        return limits, min(pause or 0.0, _MAX_PAUSE)
    return limits, None


def _number(text: str | None) -> float | None:
    with suppress(ValueError):
        number = float(text or "")
        return number if number >= 0 else None  # `None` for NaN, too
    return None
