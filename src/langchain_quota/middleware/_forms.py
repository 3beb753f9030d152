"""One body for the sync and the async form of an operation: they differ only in what they call."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def in_sync(call: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """A sync function that can be awaited; to await it never waits."""

    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    return called


def stepped(body: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that awaits only what `in_sync` has made.

    Raises:
        RuntimeError: It awaits something else.
    """
    try:
        body.send(None)
    except StopIteration as over:
        return cast("T", over.value)
    body.close()
    raise RuntimeError(f"{body!r} waits, and the sync form of it must not")
