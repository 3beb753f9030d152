"""One body for the sync and the async form of a method."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

Form = Literal["", "a"]
"""What the names of methods in a form begin with."""


async def ask(form: Form, whom: Any, method: str, *args: Any, **options: Any) -> Any:
    """What a method gives, in a form."""
    given = getattr(whom, form + method)(*args, **options)
    return await given if form else given


def in_sync(call: Callable[P, T]) -> Callable[P, Awaitable[T]]:
    """A sync function that can be awaited; to await it never waits."""

    async def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)

    return called


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine gives that waits for nothing: in the sync form."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        given: T = done.value
        return given
    coroutine.close()
    raise RuntimeError("the sync form of a method waits for an event loop: call the async form")


def forms(
    method: Callable[Concatenate[S, Form, P], Coroutine[Any, Any, T]],
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """The sync and the async method of one body."""

    def called(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        return now(method(self, "", *args, **options))

    def acalled(self: S, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return method(self, "a", *args, **options)

    return called, acalled
