"""The time, as a test sets it."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock that does not move until it is set."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
