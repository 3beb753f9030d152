"""A timeout that leaves out the time in which the event loop was blocked."""

import asyncio
from types import TracebackType
from typing import Self

_TICKS = 16
"""The ticks of a timeout: connecting takes about as many turns of the event loop."""


class Deadline:
    """`asyncio.timeout`, but time in which the event loop was blocked does not count.

    While the event loop is blocked, a reply waits unread, and `asyncio.timeout` would end first. So
    time passes in ticks, and a late tick is still only one.

    Args:
        seconds: The timeout.

    Attributes:
        blocked: For how long the event loop was blocked, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.blocked = 0.0
        self._tick = seconds / _TICKS
        self._left = _TICKS
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._next()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

    def _next(self) -> None:
        self._due = self._loop.time() + self._tick
        self._timer = self._loop.call_at(self._due, self._passed)

    def _passed(self) -> None:
        self.blocked += self._loop.time() - self._due
        self._left -= 1
        if self._left:
            self._next()
        else:
            # In the loop's next turn: a reply that has arrived in this turn is read first.
            self._timeout.reschedule(self._loop.time())
