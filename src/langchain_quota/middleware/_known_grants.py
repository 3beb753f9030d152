"""What a store has granted, learned from its answers."""

from collections.abc import Mapping, Sequence

from langchain_quota.admission import AcquireRequest, AcquireResult
from langchain_quota.locks import fork_safe_lock
from langchain_quota.resolved import ResolvedLimits
from langchain_quota.stores import QuotaUsage
from langchain_quota.telemetry.recorder import Recorder

_MOST = 10_000
"""How many keys are kept: the key of a window that has ended is never seen again."""


class KnownGrants:
    """What a store's answers say about grants, by key. It is only shown: the store itself judges.

    Args:
        recorder: Counts each grant when a call has been judged by it.

    Attributes:
        amounts: What is granted, by key.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.amounts: dict[str, int] = {}
        self._recorder = recorder
        self._untold: dict[str, int] = {}
        self._lock = fork_safe_lock()

    def learn(self, request: AcquireRequest, result: AcquireResult) -> None:
        """Learn from the answer to a request."""
        if not (result.granted or self.amounts):
            return
        keys = {name: each.key for name, each in request.counters.items() if each.key is not None}
        self._set({key: result.granted.get(name, 0) for name, key in keys.items()})
        new = {keys[name]: amount for name, amount in result.newly_granted.items()}
        with self._lock:
            for key, amount in new.items():
                self._untold[key] = self._untold.get(key, 0) + amount

    def see(self, keys: Sequence[str], found: Sequence[QuotaUsage | None]) -> None:
        """Learn from a peek at keys."""
        granted = {each.key: each.granted for each in found if each is not None}
        if self.amounts or any(granted.values()):
            self._set({key: granted.get(key, 0) for key in keys})

    def tell(self, agent: str | None, limits: ResolvedLimits) -> None:
        """Count new grants under the keys of limits, once for each limit that they raise."""
        if not self._untold:
            return
        rows = [
            (each.limit, row)
            for each in limits.limits
            for row in limits.rows(each)
            if row.most is not None and row.key is not None
        ]
        with self._lock:
            # Several limits may have one key.
            new = {key: self._untold.pop(key, 0) for key in {str(row.key) for _, row in rows}}
        granted = [
            (limit.name, row.scope, limit.unit, amount)
            for limit, row in rows
            if (amount := new[str(row.key)])
        ]
        self._recorder.record_granted(agent, granted)

    def _set(self, granted: Mapping[str, int]) -> None:
        with self._lock:
            for key, amount in granted.items():
                if amount:
                    self.amounts[key] = amount
                else:
                    self.amounts.pop(key, None)
            while len(self.amounts) > _MOST:
                del self.amounts[next(iter(self.amounts))]
