"""A timeout that leaves out the time in which the event loop was blocked."""

import asyncio

_TICKS = 16
"""The number of ticks of a timeout. Connecting takes about as many turns of the event loop."""


class Deadline:
    """Like `asyncio.timeout`, but without the time in which the event loop was blocked."""

    # While the event loop is blocked, a reply waits unread, and `asyncio.timeout` would end before
    # it is read. So this timeout counts ticks of the event loop. A late tick counts as one.

    def __init__(self, seconds: float) -> None:
        self.blocked = 0.0
        """For how many seconds the event loop was blocked."""
        self._tick = seconds / _TICKS
        self._left = _TICKS
        self._expired = False

    def begin(self) -> None:
        """Start the timeout for the task that runs now."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        self._next()

    def end(self, error: BaseException | None) -> bool:
        """Stop the timeout; whether it alone, and nothing else, has cancelled the task."""
        self._timer.cancel()
        return (
            self._expired
            and self._task.uncancel() <= self._cancelling
            and isinstance(error, asyncio.CancelledError)
        )

    def _next(self) -> None:
        self._due = self._loop.time() + self._tick
        self._timer: asyncio.Handle = self._loop.call_at(self._due, self._passed)

    def _passed(self) -> None:
        self.blocked += self._loop.time() - self._due
        self._left -= 1
        if self._left:
            self._next()
        else:
            # Not yet, but in the loop's next turn: a reply that is here already is read first.
            self._timer = self._loop.call_soon(self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
