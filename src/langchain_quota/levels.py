"""How much of a limit is used: little, near all of it, or all."""

import math
from enum import StrEnum
from functools import lru_cache


class Level(StrEnum):
    """How much of a limit is used.

    Examples:
        >>> from langchain_quota import Level
        >>> [str(level) for level in Level]
        ['ok', 'near', 'exhausted']
    """

    OK = "ok"
    """Less than the near share."""
    NEAR = "near"
    """The near share or more, rounded up to whole calls; see `near` of `Telemetry`."""
    EXHAUSTED = "exhausted"
    """All of it: the next call is over the limit."""


@lru_cache(maxsize=1024)
def near_threshold(limit: int, near: float) -> int:
    """The smallest count that is near the limit; `near` is a share from 0 to 1."""
    # Rounded to nine digits first, so that 0.55 of 100 is 55 and not the 56 of binary fractions.
    return math.ceil(round(near * limit, 9))


def level(used: int, limit: int, near: float) -> Level:
    """How much of a limit is used, by count."""
    if used >= limit:
        return Level.EXHAUSTED
    if used >= near_threshold(limit, near):
        return Level.NEAR
    return Level.OK
