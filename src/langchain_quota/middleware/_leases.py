"""A call's place among those that run at the same time anywhere, held in a store by a lease.

The store holds 1 under each count of the call. The lease is renewed while the call runs, and ends
by itself when the process has died. A renewal is one step of the store: it gives the old hold back,
and holds anew.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from threading import Event, Thread
from uuid import uuid4

from langchain_quota.admission import (
    AcquireRequest,
    AcquireResult,
    Compensation,
    Counter,
    Hits,
    Threshold,
)
from langchain_quota.decision import AT_ONCE
from langchain_quota.middleware._store import StoreClient
from langchain_quota.stores.keys import CountKey

SLOT_LEASE = 60
"""How long a store holds a place without a renewal, in seconds: as long as it stays taken after a
worker has died."""

RENEWALS = 3
"""How many renewals fit into a lease: one may be late, and one may fail."""

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""How long a waiting call pauses between two questions to the store, in seconds. The pause grows by
about a half each time, at random, so that workers do not ask at the same moment."""


class Lease:
    """The place of one call.

    Args:
        store: Keeps the counts.
        counts: The counts that the call is in.
        caps: How many may be in a count at the same time, and whether that is enforced, by the
            names of limits: `{name: (count, most, enforced)}`.
    """

    def __init__(
        self,
        store: StoreClient,
        counts: tuple[str, ...],
        caps: Mapping[str, tuple[str, int, bool]],
    ) -> None:
        self._store = store
        keys = {count: str(CountKey(count, AT_ONCE, "")) for count in counts}
        self._counters = {count: Counter(key, lease=SLOT_LEASE) for count, key in keys.items()}
        thresholds = tuple(
            Threshold(name, AT_ONCE, count, most, enforced)
            for name, (count, most, enforced) in caps.items()
        )
        self._hits = (Hits(dict.fromkeys(counts, 1), thresholds),)
        self._id = uuid4().hex
        self._number = 0
        # The requests that may hold something: without an answer it is unknown.
        self._open: list[str] = []

    def ask(self) -> AcquireResult | None:
        """Hold the place, if there is one; `None` if the store does not answer."""
        return self._answered(self._store.ask(self._request()))

    async def aask(self) -> AcquireResult | None:
        """Hold the place, if there is one; `None` if the store does not answer."""
        return self._answered(await self._store.aask(self._request()))

    def give_back(self) -> None:
        """Give the place back; what cannot be sent now is sent with the next request."""
        if self._open:
            self._store.settle(self._return())

    async def agive_back(self) -> None:
        """Give the place back; what cannot be sent now is sent with the next request."""
        if self._open:
            await self._store.asettle(self._return())

    def give_back_later(self) -> None:
        """Give the place back where nobody can wait.

        A store on the network gets it with the next request. Without one the lease ends by itself.
        """
        if self._open:
            self._store.settle_soon(self._return(), may_wait=False)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the lease while the block runs, and then give it back."""
        ended = Event()

        def renew() -> None:
            while not ended.wait(SLOT_LEASE / RENEWALS):
                self._renewed(self._store.ask(self._renewal()))

        thread = Thread(target=renew, name="langchain-quota lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.give_back()

    @asynccontextmanager
    async def akept(self) -> AsyncIterator[None]:
        """Renew the lease while the block runs, and then give it back.

        Raises:
            GeneratorExit: The call is dropped.
        """
        ended = asyncio.Event()

        async def renew() -> None:
            while True:
                try:
                    async with asyncio.timeout(SLOT_LEASE / RENEWALS):
                        await ended.wait()
                        return
                except TimeoutError:
                    self._renewed(await self._store.aask(self._renewal()))

        task = asyncio.create_task(renew())
        try:
            yield
        except GeneratorExit:
            # Nobody waits for anything any more.
            task.cancel()
            self.give_back_later()
            raise
        except BaseException:
            await self._end(task, ended)
            raise
        else:
            await self._end(task, ended)

    async def _end(self, task: asyncio.Task[None], ended: asyncio.Event) -> None:
        ended.set()
        try:
            # A renewal that is being sent must end first: it would hold again what is given back.
            await task
        finally:
            await self.agive_back()

    def _request(self, *compensations: Compensation) -> AcquireRequest:
        name = f"{self._id}/{self._number}"
        if name not in self._open:
            self._open.append(name)
        return AcquireRequest(
            name, uuid4().hex, self._counters, self._hits, compensations=compensations
        )

    def _answered(self, result: AcquireResult | None) -> AcquireResult | None:
        if result is not None and not all(result.admitted):
            self._open.clear()
        return result

    def _renewal(self) -> AcquireRequest:
        settled = self._settled()
        self._number += 1
        return self._request(*settled)

    def _renewed(self, result: AcquireResult | None) -> None:
        if result is not None:
            # What was held before is given back. If others have taken the place, it is lost.
            del self._open[:-1]

    def _return(self) -> AcquireRequest:
        counters = {each.key: Counter(each.key) for each in self._counters.values() if each.key}
        return AcquireRequest("", "", counters, compensations=self._settled())

    def _settled(self) -> tuple[Compensation, ...]:
        """What gives back all that may be held."""
        nothing = {each.key: 0 for each in self._counters.values() if each.key}
        return tuple(Compensation(f"{each}/returned", nothing, settles=each) for each in self._open)


def pauses(until: float) -> Iterator[float]:
    """How long to pause before each further question, in seconds, up to a moment.

    Args:
        until: The moment, by `time.monotonic`.
    """
    pause = FIRST_PAUSE
    while (left := until - time.monotonic()) > 0:
        yield min(left, pause * random.uniform(0.5, 1))  # noqa: S311 - no secret
        pause = min(LONGEST_PAUSE, pause * 1.5)
