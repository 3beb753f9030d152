"""A timeout that leaves out the time in which the event loop was blocked, without a server."""

import asyncio
import time

import pytest

from langchain_quota.stores.deadline import Deadline


async def expired(deadline: Deadline) -> asyncio.CancelledError:
    """Wait until it is over."""
    deadline.begin()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await asyncio.Event().wait()
    return cancelled.value


def cancellations() -> int:
    """How often the running task was cancelled."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_over() -> None:
    """When the time is over the task goes on as one that nobody has cancelled."""
    deadline = Deadline(0.01)
    error = await expired(deadline)
    assert deadline.end(error)
    assert cancellations() == 0


async def test_in_time() -> None:
    """What ends in time is not cancelled later."""
    deadline = Deadline(0.01)
    deadline.begin()
    assert not deadline.end(None)
    await asyncio.sleep(0.03)
    assert cancellations() == 0


async def test_cancelled_by_others() -> None:
    """A task that others cancel stays cancelled, though the time is over, too."""

    async def ran() -> None:
        deadline = Deadline(0.01)
        error = await expired(deadline)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        assert not deadline.end(error)
        assert cancellations() == 1

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(ran())


async def test_another_error() -> None:
    """What fails when the time is over keeps its own error."""
    deadline = Deadline(0.01)
    await expired(deadline)
    assert not deadline.end(ValueError())
    assert cancellations() == 0


async def test_blocked() -> None:
    """Time in which the event loop was blocked is reported, and counts as one tick."""
    deadline = Deadline(0.16)
    deadline.begin()
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251 - it is what is tested
    await asyncio.sleep(0.001)
    assert not deadline.end(None)
    assert deadline.blocked >= 0.1
    assert cancellations() == 0
