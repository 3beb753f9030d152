"""The numbers that the demo shows, from decisions and from the threads' own states."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from langchain_quota.decision import Decision, Outcome
from langchain_quota.levels import Level, level
from langchain_quota.limits import Limit
from langchain_quota.resolved import ResolvedLimit

_SEVERITY = tuple(Level)


@dataclass(frozen=True, slots=True)
class Use:
    """What a thread has used of its limit, in the limit's unit."""

    title: str
    used: int
    limit: int
    level: Level


@dataclass(frozen=True, slots=True)
class Row:
    """One thread as it stands; `last_refusal` names the limit and its scope."""

    thread: str
    uses: tuple[Use, ...]
    allowed: int = 0
    blocked: int = 0
    last_refusal: str = ""

    @property
    def level(self) -> Level:
        """That of the limit that is used most."""
        return max((use.level for use in self.uses), key=_SEVERITY.index)


@dataclass(frozen=True, slots=True)
class LimitTotal:
    """What became of one limit over all threads.

    Attributes:
        limit: The limit's name.
        carried_over: What was used before, in the limit's unit.
        charged: What was used since then, in the limit's unit.
        blocked: How many calls it refused.
        levels: How many threads are where.
    """

    limit: str
    carried_over: int
    charged: int
    blocked: int
    levels: Mapping[Level, int]


class Board:
    """All threads as they stand.

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
        self._carried_over: dict[str, Counter[str]] = {}
        self._calls: dict[str, dict[object, Outcome]] = {thread: {} for thread in self._used}
        self._last_refusal: dict[str, str] = {}
        self._blocked: Counter[str] = Counter()

    def take_state(self, thread: str, used: Mapping[str, int]) -> None:
        """Take in what a thread's state says, by limit; the first time, it was carried over."""
        self._carried_over.setdefault(thread, Counter(used))
        self._used[thread] = Counter(used)

    def take(self, decisions: Iterable[Decision]) -> None:
        """Take in decisions, in order."""
        for decision in decisions:
            thread = str(decision.call.thread_id)
            calls = self._calls[thread]
            # Each limiter judges a tool call by itself: it ran if none of them refused it.
            key = decision.call.id or len(calls)
            if calls.get(key) is not Outcome.BLOCKED:
                calls[key] = decision.outcome
            for status in decision.limits:
                self._used[thread][status.limit] = status.thread_used
                if status.thread_limit is not None:
                    # With what is granted.
                    self._most[thread][status.limit] = status.thread_limit
                if status.refused:
                    self._blocked[status.limit] += 1
                    self._last_refusal[thread] = f"{_title(status.limit)} ({status.refusal_scope})"

    def rows(self) -> tuple[Row, ...]:
        """The threads as they stand."""
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

    def totals(self) -> tuple[LimitTotal, ...]:
        """The limits, over all threads."""
        return tuple(self._total(limit) for limit in self._limits)

    @property
    def carried_over(self) -> int:
        """How many threads began with calls of an earlier run."""
        return sum(used.total() > 0 for used in self._carried_over.values())

    def _use(self, limit: Limit, thread: str) -> Use:
        configured = ResolvedLimit.of(limit).thread_limit or 0
        most = self._most[thread].get(limit.name, configured)
        count = self._used[thread][limit.name]
        return Use(_title(limit.name), count, most, level(count, most, self._near))

    def _count(self, thread: str, outcome: Outcome) -> int:
        return sum(each is outcome for each in self._calls[thread].values())

    def _total(self, limit: Limit) -> LimitTotal:
        carried_over = sum(used[limit.name] for used in self._carried_over.values())
        used = sum(used[limit.name] for used in self._used.values())
        return LimitTotal(
            limit.name,
            carried_over=carried_over,
            charged=used - carried_over,
            blocked=self._blocked[limit.name],
            levels=Counter(self._use(limit, thread).level for thread in self._used),
        )


def _title(limit: str) -> str:
    return "tools" if limit == "tool:*" else limit.removeprefix("tool:")
