"""What model calls have used of budgets, while the state may not have it.

The graph keeps no update of a call that fails, or that another middleware makes again. So this
process keeps what was used, for the next hook of the run, or for the next run of the thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.decision import RUN, THREAD
from langchain_quota.limits.options import BUDGETS
from langchain_quota.state import ledger, own_of

OWN = "budgets"
"""The name under which the ledger has what budgets keep."""

_COUNTS = [(each, f"{each}/{THREAD}", f"{each}/{RUN}") for each in BUDGETS]
"""What model calls use, and the names of its counts."""

MAX_LATE = 10_000
"""The most runs for which this process keeps what the state may not have."""


class _Kept(NamedTuple):
    """The newest counts of a run, and the names of the uses that lead to them, in order."""

    names: tuple[str, ...] = ()
    counts: Mapping[str, Any] = {}
    # The task of the newest call.
    task: str | None = None


class LateUse:
    """Keeps the newest counts of runs: a state says up to which use it has them."""

    # A branch of the thread that begins at another state gets none of it. Use that is forgotten
    # before it is written is missing in the state's counts; a store has it.

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._lock = fork_safe_lock()

    def of(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The newest counts of the state's run; empty if the state has them."""
        run, newest = _place(state)
        kept = self._kept.get(run, _Kept())
        return kept.counts if newest in kept.names[:-1] else {}

    def counts(self, state: Mapping[str, Any]) -> dict[str, int]:
        """What is used of budgets, by the name of the count."""
        return counts_of({**own_of(state, OWN), **self.of(state)})

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
    ) -> Mapping[str, Any]:
        """Keep what was used until it is written; the counts with it, which are to be written."""
        run, newest = _place(state)
        with self._lock:
            kept = self._kept.pop(run, _Kept())
            if newest not in kept.names:
                kept = _Kept((newest,), own_of(state, OWN))
            name = uuid4().hex
            counts = {
                "thread_spent": added([kept.counts.get("thread_spent") or {}, amounts]),
                "run_spent": added([kept.counts.get("run_spent") or {}, amounts]),
                "spent_by": name,
            }
            if run:
                self._kept[run] = _Kept((*kept.names, name), counts, task or kept.task)
            if len(self._kept) > MAX_LATE:
                del self._kept[next(iter(self._kept))]
            return counts


def counts_of(kept: Mapping[str, Any]) -> dict[str, int]:
    """What is used of budgets by what the ledger keeps, by the name of the count."""
    of_thread, of_run = kept.get("thread_spent") or {}, kept.get("run_spent") or {}
    counts = {}
    for counter, thread, run in _COUNTS:
        counts[thread], counts[run] = of_thread.get(counter, 0), of_run.get(counter, 0)
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
    return ledger(state).get("run") or "", own_of(state, OWN).get("spent_by") or ""
