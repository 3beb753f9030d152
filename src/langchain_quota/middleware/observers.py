"""What a user hangs in to see every decision: for billing, audit, alerts of their own."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_quota.decision import Decision
from langchain_quota.telemetry import Telemetry

Observer = Callable[[Decision], Awaitable[None] | None]


class Observers:
    """Functions that are called with every decision; what one raises is counted and logged.

    Args:
        on_decision: One function or several, sync or async.
        telemetry: Counts what they raise.

    Raises:
        TypeError: It is neither a function nor several.
    """

    def __init__(self, on_decision: Observer | Sequence[Observer], telemetry: Telemetry) -> None:
        observers = (on_decision,) if callable(on_decision) else on_decision
        if not isinstance(observers, Sequence) or not all(map(callable, observers)):
            raise TypeError(f"on_decision must be a function or several, not {on_decision!r}")
        self._observers: tuple[Observer, ...] = tuple(observers)
        self._telemetry = telemetry

    def refuse_async(self) -> None:
        """Refuse to go on where nobody can wait for an async observer.

        Raises:
            RuntimeError: One of the observers is async.
        """
        for observer in self._observers:
            if _is_async(observer):
                raise _async_error(observer)

    def tell(self, decisions: Sequence[Decision]) -> None:
        """Call each observer with each decision.

        Raises:
            RuntimeError: One returns an awaitable.
        """
        for decision in decisions:
            for observer in self._observers:
                result: Any = None
                try:
                    result = observer(decision)
                except Exception as error:  # noqa: BLE001 - an observer must not break the agent
                    self._telemetry.failed("observer", error)
                if inspect.iscoroutine(result):
                    result.close()
                if inspect.isawaitable(result):
                    raise _async_error(observer)

    async def atell(self, decisions: Sequence[Decision]) -> None:
        """Call each observer with each decision, and wait for those that are async."""
        for decision in decisions:
            for observer in self._observers:
                try:
                    result = observer(decision)
                    if inspect.isawaitable(result):
                        await result
                except Exception as error:  # noqa: BLE001 - an observer must not break the agent
                    self._telemetry.failed("observer", error)


def _async_error(observer: Observer) -> RuntimeError:
    return RuntimeError(
        f"on_decision={observer!r} is async: call the agent with ainvoke or astream"
    )


def _is_async(observer: Observer) -> bool:
    return inspect.iscoroutinefunction(observer) or inspect.iscoroutinefunction(
        getattr(observer, "__call__", None)  # noqa: B004 - its own type is asked for, not whether
    )
