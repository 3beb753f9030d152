"""What model calls have used of budgets, while the state may not have it.

The graph keeps no update of a call that fails, or that another middleware makes again. So this
process keeps what was used, for the next hook of the run, or for the next run of the thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.middleware.calls import budget_counts
from langchain_quota.state import LEDGER, Ledger, ledger, spent

MAX_LATE = 10_000
"""The most runs for which this process keeps what the state may not have."""


class _Kept(NamedTuple):
    """The newest counts of a run, and the names of the uses that lead to them, in order."""

    names: tuple[str, ...] = ()
    counts: Ledger = Ledger()
    # The task of the newest call.
    task: str | None = None


class LateUse:
    """Keeps the newest counts of runs: a state says up to which use it has them."""

    # A branch of the thread that begins at another state gets none of it. Use that is forgotten
    # before it is written is missing in the state's counts; a store has it.

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._lock = fork_safe_lock()

    def of(self, state: Mapping[str, Any]) -> Ledger:
        """The newest counts of the state's run; empty if the state has them."""
        run, newest = _place(state)
        kept = self._kept.get(run, _Kept())
        return kept.counts if newest in kept.names[:-1] else Ledger()

    def counts(self, state: Mapping[str, Any]) -> dict[str, int]:
        """What is used of budgets, by the name of the count."""
        return budget_counts({LEDGER: {**ledger(state), **self.of(state)}})

    def has_made(self, task: str | None, state: Mapping[str, Any]) -> bool:
        """Whether the newest call of the state's run was made in this task."""
        return task is not None and self._kept.get(_place(state)[0], _Kept()).task == task

    def forget(self, state: Mapping[str, Any]) -> None:
        """Forget what a state of the graph has."""
        run, newest = _place(state)
        with self._lock:
            kept = self._kept.get(run, _Kept())
            if newest in kept.names:
                left = kept.names[kept.names.index(newest) :]
                self._kept[run] = kept._replace(names=left)
                if len(left) == 1:
                    del self._kept[run]

    def keep(
        self, state: Mapping[str, Any], amounts: Mapping[str, int], task: str | None = None
    ) -> Ledger:
        """Keep what was used until it is written; the counts with it, which are to be written."""
        run, newest = _place(state)
        with self._lock:
            kept = self._kept.pop(run, _Kept())
            of_thread, of_run = spent({LEDGER: kept.counts})
            if newest not in kept.names:
                kept = _Kept((newest,))
                of_thread, of_run = spent(state)
            counts = Ledger(
                thread_spent=added([of_thread, amounts]),
                run_spent=added([of_run, amounts]),
                spent_by=uuid4().hex,
            )
            if run:
                names = *kept.names, str(counts["spent_by"])
                self._kept[run] = _Kept(names, counts, task or kept.task)
            if len(self._kept) > MAX_LATE:
                del self._kept[next(iter(self._kept))]
            return counts


def added(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several amounts, by counter."""
    total: dict[str, int] = {}
    for amounts in several:
        for counter, amount in amounts.items():
            total[counter] = total.get(counter, 0) + amount
    return total


def _place(state: Mapping[str, Any]) -> tuple[str, str]:
    """The run of a state, and the newest use that it has; empty for none."""
    known = ledger(state)
    return known.get("run") or "", known.get("spent_by") or ""
