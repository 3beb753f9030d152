"""One body for the sync and the async form of a method."""

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

Form = Literal["", "a"]
"""What the names of methods in a form begin with."""


async def call_in(form: Form, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function gives, which is async in the async form."""
    given = function(*args, **options)
    return await given if form else given


def ask(form: Form, whom: Any, method: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
    """What a method gives, in a form."""
    return call_in(form, getattr(whom, form + method), *args, **options)


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

    def in_sync(self: S, /, *args: P.args, **options: P.kwargs) -> T:
        return now(method(self, "", *args, **options))

    def in_async(self: S, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return method(self, "a", *args, **options)

    return in_sync, in_async
