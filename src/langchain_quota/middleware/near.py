"""Finds the shares of limits that calls have newly used: each is told once, by one process."""

import time
from collections.abc import Iterator, Sequence

from langchain_quota.core.decide import Verdict
from langchain_quota.limits import Limit
from langchain_quota.limits.call import THREAD
from langchain_quota.middleware.store_client import StoreClient
from langchain_quota.runtime.sync_async import newest_dicts
from langchain_quota.runtime.units import near_threshold
from langchain_quota.stores.grants import SupportsGrants
from langchain_quota.telemetry.observers import NearFunction, NearObserver
from langchain_quota.telemetry.recorder import Recorder

_KNOWN, _KNOWN_FOR = 10_000, 60
"""How many marks of a store a process knows, and for how many seconds: others reset counts."""


class NearShares:
    """Tells the log, the stream and `on_near` of the shares that calls have newly used."""

    def __init__(
        self,
        limits: Sequence[Limit],
        on_near: NearFunction | None,
        recorder: Recorder,
        store: StoreClient | None,
    ) -> None:
        self._recorder = recorder
        self._observer = None if on_near is None else NearObserver(on_near, recorder)
        marks = store is not None and isinstance(store.store, SupportsGrants)
        self._store = store if marks else None
        self._known = newest_dicts(_KNOWN)
        self._shares: dict[str, tuple[float, ...]] = {}
        for limit in limits:
            near = limit.near or recorder.near
            is_told = self._observer is not None or isinstance(near, tuple)
            if limit.enforce and limit.counted and is_told:
                self._shares[limit.name] = near if isinstance(near, tuple) else (near,)
        self.present = bool(self._shares)

    async def tell(self, verdicts: Sequence[Verdict], told: dict[str, int]) -> None:
        """Tell of what charged calls have newly used; add to `told` what the thread is to know."""
        # What was told is marked beside the count: in the store, or in the ledger.
        for verdict, index, number, thresholds in self._charged(verdicts):
            rule = verdict.plan.rules[index]
            name, counter = rule.limit.name, rule.meters[number].counter
            before, place = verdict.before[counter], verdict.places.get(counter)
            used: int | None = before + verdict.amounts[index]
            passed = max((each for each in thresholds if each <= (used or 0)), default=0)
            if place is None or self._store is None:
                counted = f"{name}/{counter}"
                if not before < passed > told.get(counted, 0):
                    continue
                if counter.endswith(f"/{THREAD}"):
                    told[counted] = passed
            else:
                # The store is asked only above a share that this process does not know as told.
                known, now = self._known((place.key, name)), time.monotonic()
                is_known = passed <= known.get("mark", 0) and now < known.get("until", 0)
                if not passed or (is_known and before >= passed):
                    continue
                used, mark = await self._store.mark(place.key, name, thresholds) or (None, 0)
                known |= {"mark": mark, "until": now + _KNOWN_FOR}
            if used is not None:
                what = verdict, index, number, used, self._observer
                self._recorder.log(self._recorder.record_near, *what)

    def _charged(
        self, verdicts: Sequence[Verdict]
    ) -> Iterator[tuple[Verdict, int, int, Sequence[int]]]:
        """Yield what calls are charged to: the numbers of limit and count, and its thresholds."""
        for verdict in verdicts:
            for index, rule in enumerate(verdict.plan.rules):
                shares = self._shares.get(rule.limit.name, ()) if verdict.charged[index] else ()
                for number, meter in enumerate(rule.meters if shares else ()):
                    if meter.maximum and not meter.spacing:
                        maximum = meter.maximum
                        yield verdict, index, number, [near_threshold(maximum, s) for s in shares]
