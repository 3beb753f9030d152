"""Series of the past, written into a running Prometheus at once, as remote write does it.

So a test knows the truth to the last call, and need not wait for hours of scrapes.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice

import httpx

Labels = Mapping[str, str]

Points = tuple[tuple[float, float | None], ...]
"""Times, in seconds since the Unix epoch, and values; `None` where a scrape finds no series."""

_STALE = struct.pack("<Q", 0x7FF0000000000002)
"""The value by which Prometheus knows that a series has ended."""
_SERIES_PER_REQUEST = 20_000


def write(url: str, series: Iterable[tuple[Labels, Points]]) -> None:
    """Write series into the Prometheus at an address.

    Args:
        url: The server's address; it must take remote writes.
        series: Labels, with the name as `__name__`, and points in the order of their times.
    """
    encoded = (_field(1, _labels(labels) + _samples(points)) for labels, points in series)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for body in _chunks(encoded):
            response = http.post(
                "/api/v1/write", content=_snappy(body), headers={"content-encoding": "snappy"}
            )
            assert response.is_success, response.text


def _chunks(encoded: Iterator[bytes]) -> Iterator[bytes]:
    while chunk := b"".join(islice(encoded, _SERIES_PER_REQUEST)):
        yield chunk


def _labels(labels: Labels) -> bytes:
    return b"".join(
        _field(1, _field(1, name.encode()) + _field(2, value.encode()))
        for name, value in sorted(labels.items())
        if value
    )


@lru_cache(maxsize=1_000)
def _samples(points: Points) -> bytes:
    return b"".join(
        _field(2, b"\x09" + _value(value) + b"\x10" + _varint(round(time * 1000)))
        for time, value in points
    )


def _value(value: float | None) -> bytes:
    return _STALE if value is None else struct.pack("<d", value)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that has a length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _snappy(content: bytes) -> bytes:
    """Content in Snappy's format, as one literal that is not compressed."""
    return _varint(len(content)) + b"\xfc" + struct.pack("<I", len(content) - 1) + content
