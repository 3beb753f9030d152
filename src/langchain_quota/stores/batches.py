"""Requests of one event loop that are sent to a server together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

_MOST = 32
"""Most requests of a batch. While the server answers one batch, the next one is packed."""

Q = TypeVar("Q")
A = TypeVar("A")


class Batch(Generic[Q, A]):
    """Requests that are sent together; it is open for more until its sender takes them.

    The sender returns an answer to each; an exception is raised for the caller of this request.
    """

    # A task of its own sends them: a caller who is cancelled, or whose time is over, takes nothing
    # from the others. The task ends with its last caller at the latest. If it fails, or somebody
    # cancels it, it fails for all who still wait.

    def __init__(
        self, send: Callable[[Callable[[], Sequence[Q]]], Awaitable[Sequence[A | BaseException]]]
    ) -> None:
        self._send = send
        self._requests: dict[asyncio.Future[A | BaseException], Q] = {}
        self._taken: list[asyncio.Future[A | BaseException]] = []
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._answer())
        self._task.add_done_callback(self._fail)

    @property
    def is_open(self) -> bool:
        """Whether the running event loop can add a request."""
        full = self._closed or len(self._requests) >= _MOST
        return not full and self._task.get_loop() is asyncio.get_running_loop()

    async def answer(self, request: Q) -> A:
        """Send a request, and wait for the answer."""
        waiting: asyncio.Future[A | BaseException] = asyncio.get_running_loop().create_future()
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
