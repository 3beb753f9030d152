"""The numbers that the demo shows, from decisions and from the threads' own states."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from langchain_quota.decision import Decision, Outcome
from langchain_quota.levels import Level, level
from langchain_quota.limits import Limit
from langchain_quota.resolved import ResolvedLimit


@dataclass(frozen=True, slots=True)
class Use:
    """What a thread has used of its limit, in the limit's unit."""

    title: str
    used: int
    limit: int
    level: Level


@dataclass(frozen=True, slots=True)
class Row:
    """The numbers of one thread; `last_refusal` names the limit and its scope."""

    thread: str
    uses: tuple[Use, ...]
    allowed: int = 0
    blocked: int = 0
    last_refusal: str = ""


class Board:
    """The numbers of all threads.

    Args:
        threads: The ids of the threads.
        limits: The limits, each with a thread limit.
        near: The share from which a limit is near.
    """

    def __init__(self, threads: Iterable[str], limits: Sequence[Limit], *, near: float) -> None:
        self._limits = limits
        self._near = near
        self._used: dict[str, Counter[str]] = {thread: Counter() for thread in threads}
        self._most: dict[str, dict[str, int]] = {thread: {} for thread in self._used}
        self._calls: dict[str, dict[object, Outcome]] = {thread: {} for thread in self._used}
        self._last_refusal: dict[str, str] = {}

    def take_state(self, thread: str, used: Mapping[str, int]) -> None:
        """Take in the counts of a thread's state, by limit."""
        self._used[thread] = Counter(used)

    def take(self, decisions: Iterable[Decision]) -> None:
        """Take in decisions, in order."""
        for decision in decisions:
            thread = str(decision.call.thread_id)
            calls = self._calls[thread]
            # Each limiter judges a tool call by itself: the call ran if none of them refused it.
            key = decision.call.id or len(calls)
            if calls.get(key) is not Outcome.BLOCKED:
                calls[key] = decision.outcome
            for status in decision.limits:
                self._used[thread][status.limit] = status.thread_used
                if status.thread_limit is not None:
                    # Grants have raised it.
                    self._most[thread][status.limit] = status.thread_limit
                if status.refused:
                    self._last_refusal[thread] = f"{_title(status.limit)} ({status.refusal_scope})"

    def rows(self) -> tuple[Row, ...]:
        """One row for each thread."""
        return tuple(
            Row(
                thread,
                tuple(self._use(limit, thread) for limit in self._limits),
                allowed=self._count(thread, Outcome.ALLOWED),
                blocked=self._count(thread, Outcome.BLOCKED),
                last_refusal=self._last_refusal.get(thread, ""),
            )
            for thread in self._used
        )

    def _use(self, limit: Limit, thread: str) -> Use:
        configured = ResolvedLimit.of(limit).thread_limit or 0
        most = self._most[thread].get(limit.name, configured)
        count = self._used[thread][limit.name]
        return Use(_title(limit.name), count, most, level(count, most, self._near))

    def _count(self, thread: str, outcome: Outcome) -> int:
        return sum(each is outcome for each in self._calls[thread].values())


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
