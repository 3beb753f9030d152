"""What model calls have used of budgets, until it is seen in the state.

The graph keeps no update of a call that fails, or that another middleware makes again. So this
process keeps what was used, for the next hook of the run, or for the next run of the thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_quota.concurrency import fork_safe_lock
from langchain_quota.state import Ledger, ledger, spent

MAX_LATE = 10_000
"""The most runs for which this process keeps what the state may not have."""


class Late(NamedTuple):
    """What calls have used of budgets that is not in the state yet."""

    amounts: Mapping[str, int]
    newest: str


class LateUse:
    """Keeps what calls have used, by run, in order: a state knows up to which use it has them."""

    # A branch of the thread that begins at another state gets none of it. Use that is forgotten
    # before it is written is missing in the state's counts; a store has it.

    def __init__(self) -> None:
        # The name that a state has before the first use, and the uses with their names.
        self._kept: dict[str, tuple[str, dict[str, Mapping[str, int]]]] = {}
        self._lock = fork_safe_lock()

    def of(self, state: Mapping[str, Any]) -> Late | None:
        """What calls have used that this state of their run does not have."""
        run, newest = _place(state)
        if run not in self._kept:
            return None
        with self._lock:
            uses = self._after(run, newest)
        return Late(added(uses.values()), [*uses][-1]) if uses else None

    def forget_written(self, state: Mapping[str, Any]) -> None:
        """Forget what a state of the graph has."""
        run, newest = _place(state)
        if run not in self._kept:
            return
        with self._lock:
            known = self._kept.get(run)
            if known is not None and newest in known[1]:
                self._kept[run] = newest, self._after(run, newest)
            if known is not None and not self._kept[run][1]:
                del self._kept[run]

    def keep(self, state: Mapping[str, Any], amounts: Mapping[str, int]) -> Late:
        """Keep what a call has used until it is written; all use that is not written yet."""
        name, (run, newest) = uuid4().hex, _place(state)
        if not run:
            return Late(amounts, name)
        with self._lock:
            base, uses = self._kept.pop(run, (newest, {}))
            if newest != base and newest not in uses:
                base, uses = newest, {}
            self._kept[run] = base, {**uses, name: amounts}
            if len(self._kept) > MAX_LATE:
                del self._kept[next(iter(self._kept))]
            return Late(added(self._after(run, newest).values()), name)

    def _after(self, run: str, newest: str) -> dict[str, Mapping[str, int]]:
        """The uses after one, with the lock held."""
        base, uses = self._kept.get(run, ("", {}))
        if newest == base:
            return uses
        names = [*uses]
        if newest not in uses:
            return {}
        return {name: uses[name] for name in names[names.index(newest) + 1 :]}


def spending(state: Mapping[str, Any], late: Late) -> Ledger:
    """What is written to the state about what model calls have used of budgets."""
    of_thread, of_run = spent(state)
    return Ledger(
        thread_spent=added([of_thread, late.amounts]),
        run_spent=added([of_run, late.amounts]),
        spent_by=late.newest,
    )


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
