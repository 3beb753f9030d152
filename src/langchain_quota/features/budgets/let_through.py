"""The model calls that this process has let through, and which of them are made.

A call that is forgotten asks again, as if another process had let it through.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from langchain_quota.decision import Decision
from langchain_quota.locks import fork_safe_lock

MAX_LET_THROUGH = 10_000
"""For how many calls this process knows whether they were made."""


class Admitted(NamedTuple):
    """A model call that was let through before its request was known."""

    decisions: Sequence[Decision] = ()
    started: int = 0
    task_id: str | None = None
    trace: Mapping[str, str] | None = None
    after_refusal: bool = False
    charged: Mapping[str, int] = {}


class LetThrough:
    """Knows which calls may be made. Each may be made once: made again, a call is judged anew."""

    # A call that is never made stays until newer ones take its place.

    def __init__(self) -> None:
        # `None` for a call that was made.
        self._calls: dict[str, Admitted | None] = {}
        self._lock = fork_safe_lock()

    def add(self, name: str, call: Admitted) -> None:
        """Note that a call may be made."""
        with self._lock:
            self._calls[name] = call
            if len(self._calls) > MAX_LET_THROUGH:
                del self._calls[next(iter(self._calls))]

    def take(self, name: str) -> tuple[Admitted | None, bool]:
        """Note that a call is made: what was kept of it, and whether it was made before."""
        # Nothing is kept of a call that was made before, or that another process has let through.
        with self._lock:
            made_before = name in self._calls and self._calls[name] is None
            found = self._calls.get(name)
            if found is not None:
                self._calls[name] = None
            return found, made_before
