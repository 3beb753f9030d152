"""What callers of an event loop share: timeouts that leave out blocked time, and batches."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

_TICKS = 16
"""The number of ticks of a timeout. Connecting takes about as many turns of the event loop."""

_MAX_BATCH = 32
"""Most requests of a batch. While the server answers one batch, the next one is packed."""

Q = TypeVar("Q")
T = TypeVar("T")


class Ticker:
    """Times out waits of an event loop, without the time in which the loop was blocked."""

    # While the event loop is blocked, a reply waits unread, and `asyncio.timeout` would end before
    # it is read. So this one counts ticks of the event loop. A late tick counts as one. All waits
    # share the ticks: a timer for each takes as long as writing its request.

    def __init__(self, seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.blocked = 0.0
        """How long the loop was blocked in all while somebody waited, in seconds."""
        self._tick = seconds / _TICKS
        self._ticks_left: dict[asyncio.Timeout, int] = {}
        self._ticks = False

    def add(self, timeout: asyncio.Timeout) -> None:
        """Have a timeout end when its time is over."""
        # The first tick may come at any time.
        self._ticks_left[timeout] = _TICKS + 1
        if not self._ticks:
            self._next()

    def remove(self, timeout: asyncio.Timeout) -> None:
        """Let a timeout be: what it bounded is over."""
        del self._ticks_left[timeout]

    def _next(self) -> None:
        self._ticks = bool(self._ticks_left)
        if self._ticks:
            self._due = self.loop.time() + self._tick
            self.loop.call_at(self._due, self._passed)

    def _passed(self) -> None:
        now = self.loop.time()
        self.blocked += now - self._due
        for timeout, left in self._ticks_left.items():
            self._ticks_left[timeout] = left - 1
            if left == 1:
                # It ends in the loop's next turn: a reply that is here already is read first.
                timeout.reschedule(now)
        self._next()


class Batch(Generic[Q, T]):
    """Requests that are sent together; it is open for more until its sender takes them.

    The sender returns an answer to each; an exception is raised for the caller of this request.
    """

    # A task of its own sends them: a caller who is cancelled, or whose time is over, takes nothing
    # from the others. The task ends with its last caller at the latest. If it fails, or somebody
    # cancels it, it fails for all who still wait.

    def __init__(
        self, send: Callable[[Callable[[], Sequence[Q]]], Awaitable[Sequence[T | BaseException]]]
    ) -> None:
        self._send = send
        self._requests: dict[asyncio.Future[T | BaseException], Q] = {}
        self._taken: list[asyncio.Future[T | BaseException]] = []
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._answer())
        self._task.add_done_callback(self._fail)

    @property
    def is_open(self) -> bool:
        """Whether the running event loop can add a request."""
        full = self._closed or len(self._requests) >= _MAX_BATCH
        return not full and self._task.get_loop() is asyncio.get_running_loop()

    async def answer(self, request: Q) -> T:
        """Send a request, and wait for the answer."""
        waiting: asyncio.Future[T | BaseException] = asyncio.get_running_loop().create_future()
        self._requests[waiting] = request
        try:
            answer = await waiting
        except asyncio.CancelledError:
            del self._requests[waiting]
            if not self._requests:
                self._closed = True
                self._task.cancel()
                await asyncio.wait([self._task])
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _take(self) -> Sequence[Q]:
        """Close it, and return its requests; the sender may try again with those that are left."""
        self._closed, self._taken = True, [*self._requests]
        return [*self._requests.values()]

    async def _answer(self) -> None:
        # Others ask in the same turn; and with an eager task factory, nobody has asked yet.
        await asyncio.sleep(0)
        answers = await self._send(self._take)
        for waiting, answer in zip(self._taken, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)

    def _fail(self, task: asyncio.Task[None]) -> None:
        self._closed = True
        cancelled = ConnectionError("the batch was cancelled")
        for waiting in self._requests:
            if not waiting.done():
                waiting.set_result((None if task.cancelled() else task.exception()) or cancelled)
