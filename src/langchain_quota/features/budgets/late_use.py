"""What model calls have used of budgets, until it is seen in the state.

Each use names the use that it follows. So a state lacks exactly those after the newest one that it
knows. A branch of the thread that begins at an older state gets none of another branch.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_quota.locks import fork_safe_lock
from langchain_quota.middleware._calls import Late
from langchain_quota.state import ledger

MAX_LATE = 10_000
"""The most runs for which this process keeps what the state may not have."""


class _Use(NamedTuple):
    """What a call has used."""

    follows: str
    amounts: Mapping[str, int]


class LateUse:
    """Keeps what calls have used, by run: for example, a call that fails cannot write its use."""

    # Use that is forgotten before it is written is missing in the state's counts; a store has it.

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, _Use]] = {}
        self._lock = fork_safe_lock()

    def of(self, state: Mapping[str, Any]) -> Late | None:
        """What calls have used that this state of their run does not have."""
        run, newest = _place(state)
        if run not in self._kept:
            return None
        with self._lock:
            return _late(_following(newest, self._kept.get(run, {})))

    def forget_written(self, state: Mapping[str, Any]) -> None:
        """Forget what a state of the graph has."""
        run, newest = _place(state)
        if run not in self._kept:
            return
        with self._lock:
            kept = self._kept.get(run, {})
            while newest in kept:
                newest = kept.pop(newest).follows
            if not kept:
                self._kept.pop(run, None)

    def keep(self, state: Mapping[str, Any], amounts: Mapping[str, int]) -> Late:
        """Keep what a call has used until it is written; all use that is not written yet."""
        name, (run, newest) = uuid4().hex, _place(state)
        if not run:
            return Late(amounts, name)
        with self._lock:
            kept = self._kept[run] = self._kept.pop(run, {})
            late = _following(newest, kept)
            late[name] = kept[name] = _Use([newest, *late][-1], amounts)
            if len(self._kept) > MAX_LATE:
                del self._kept[next(iter(self._kept))]
        return Late(_sum(late), name)


def _place(state: Mapping[str, Any]) -> tuple[str, str]:
    """The run of a state, and the newest use that it has; empty for none."""
    known = ledger(state)
    return known.get("run") or "", known.get("spent_by") or ""


def _following(newest: str, kept: Mapping[str, _Use]) -> dict[str, _Use]:
    """The uses that follow one, in order."""
    found: dict[str, _Use] = {}
    for name, use in kept.items():
        if use.follows == newest:
            found[name], newest = use, name
    return found


def _late(following: Mapping[str, _Use]) -> Late | None:
    return Late(_sum(following), [*following][-1]) if following else None


def _sum(uses: Mapping[str, _Use]) -> dict[str, int]:
    return added(each.amounts for each in uses.values())


def added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several amounts, by counter."""
    total: dict[str, int] = {}
    for amounts in several:
        for counter, amount in amounts.items():
            total[counter] = total.get(counter, 0) + amount
    return total
