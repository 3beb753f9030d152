"""Requests of callers on one event loop at the same time: they go in pipelines."""

import asyncio
from collections.abc import Iterable
from typing import Any

MOST = 16
"""Most requests of a pipeline. While the server answers one pipeline, the next one is packed."""

Arguments = tuple[Any, ...]
Answers = asyncio.Task[list[Any]]


class Together:
    """A client that sends the requests of one turn in pipelines, but one alone without."""

    def __init__(self, client: Any, connections: int) -> None:
        self._client = client
        self._permits = asyncio.Semaphore(connections)
        self._callers = 0
        self._next: _Pipeline | None = None

    async def eval(self, *arguments: Any) -> object:
        """Run a script."""
        async with self._permits:
            return await self._client.eval(*arguments)

    async def evalsha(self, *arguments: Any) -> object:
        """Run a script that the server knows."""
        self._callers += 1
        try:
            if self._callers == 1:
                async with self._permits:
                    return await self._client.evalsha(*arguments)
            if self._next is None or self._next.is_closed:
                self._next = _Pipeline(self._client, self._permits)
                asyncio.get_running_loop().call_soon(self._next.send)
            return await self._next.answer(arguments)
        finally:
            self._callers -= 1


class _Pipeline:
    """Requests that are sent together, until it is closed for more."""

    # A task of its own sends them: a caller who is cancelled, or whose time is over, takes nothing
    # from the others. The task ends with its last caller at the latest. If it fails, it fails for
    # all who still wait.

    def __init__(self, client: Any, permits: asyncio.Semaphore) -> None:
        self._client = client
        self._permits = permits
        self._requests: dict[asyncio.Future[Any], Arguments] = {}
        self._task: Answers | None = None
        self.is_closed = False

    async def answer(self, arguments: Arguments) -> object:
        waiting = asyncio.get_running_loop().create_future()
        self._requests[waiting] = arguments
        if len(self._requests) == MOST:
            self.is_closed = True
        try:
            answer = await waiting
        except asyncio.CancelledError:
            del self._requests[waiting]
            if self._task is not None and not self._requests:
                self._task.cancel()
                await asyncio.wait([self._task])
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def send(self) -> None:
        """Send the requests whose callers still wait."""
        self.is_closed = True
        sent = dict(self._requests)
        if sent:
            self._task = asyncio.get_running_loop().create_task(self._answers(sent.values()))
            self._task.add_done_callback(lambda task: _hand_out(task, sent))

    async def _answers(self, requests: Iterable[Arguments]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for arguments in requests:
            pipeline.evalsha(*arguments)
        async with self._permits:
            found: list[Any] = await pipeline.execute(raise_on_error=False)
        return found


def _hand_out(task: Answers, callers: Iterable[asyncio.Future[Any]]) -> None:
    """Give each caller who still waits the answer, or what the task failed with."""
    failure = (
        ConnectionError("the pipeline was cancelled") if task.cancelled() else task.exception()
    )
    answers = [failure for _ in callers] if failure else task.result()
    for waiting, answer in zip(callers, answers, strict=True):
        if not waiting.done():
            waiting.set_result(answer)
