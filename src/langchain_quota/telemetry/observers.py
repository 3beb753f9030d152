"""The user's functions that see every decision: for billing, audit, alerts of their own."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from langchain_quota.core.decision import Decision
from langchain_quota.runtime.arguments import is_async, validate_function
from langchain_quota.runtime.sync_async import Mode, sync_and_async
from langchain_quota.telemetry.recorder import Recorder, TaskRecord

Observer = Callable[[Decision], Awaitable[None] | None]


class Observers:
    """Functions that are called with every decision; what one raises is counted and logged."""

    def __init__(self, on_decision: Observer | Sequence[Observer], recorder: Recorder) -> None:
        observers = (on_decision,) if callable(on_decision) else on_decision
        if not isinstance(observers, Sequence) or not all(map(callable, observers)):
            raise TypeError(f"on_decision must be a function or several, not {on_decision!r}")
        for each in observers:
            validate_function("on_decision", each, "decision")
        self._observers: tuple[Observer, ...] = tuple(observers)
        self.present = bool(self._observers)
        """Whether there are observers."""
        self._recorder = recorder

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Itself: a copy of the middleware notifies the same observers."""
        return self

    def check(self, mode: Mode) -> None:
        """Refuse to go on in a sync run, which cannot wait for an async observer."""
        for observer in self._observers if not mode else ():
            if is_async(observer):
                raise _async_error(observer)

    async def _notify(
        self, mode: Mode, decisions: Sequence[Decision], told: TaskRecord | None = None
    ) -> None:
        """Call each observer with each decision, and wait for those that are async."""
        told = told or TaskRecord()
        pairs = [(decision, observer) for decision in decisions for observer in self._observers]
        for decision, observer in pairs[told.notified :]:
            result: Any = None
            try:
                result = observer(decision)
                if mode and inspect.isawaitable(result):
                    result = await result
            except Exception as error:
                self._recorder.record_error("observer", error)
            told.notified += 1
            if mode:
                continue
            if inspect.iscoroutine(result):
                result.close()
            if inspect.isawaitable(result):
                raise _async_error(observer)

    notify, anotify = sync_and_async(_notify)


def _async_error(observer: Observer) -> RuntimeError:
    return RuntimeError(
        f"on_decision={observer!r} is async: call the agent with ainvoke or astream, "
        "and override its async hooks where you override a hook"
    )
