"""The user's functions that are called with every decision, for billing, audits or alerts."""

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ParamSpec, Self

from langchain_quota.core.decision import Decision
from langchain_quota.runtime.arguments import is_async, validate_function
from langchain_quota.runtime.sync_async import Mode
from langchain_quota.telemetry.decision_log import DecisionLog
from langchain_quota.telemetry.recorder import Recorder, TaskRecord

Observer = Callable[[Decision], Awaitable[None] | None]
LogLine = tuple[Mapping[str, object], Mapping[str, str]]
"""A line of a decision log, and the subjects in it."""
P = ParamSpec("P")


class Observers:
    """The functions and logs of `on_decision`; their exceptions are counted and logged."""

    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, on_decision: Observer | Sequence[Observer], recorder: Recorder) -> None:
        observers = (on_decision,) if callable(on_decision) else on_decision
        if not isinstance(observers, Sequence) or not all(map(callable, observers)):
            raise TypeError(f"on_decision must be a function or several, not {on_decision!r}")
        for observer in observers:
            validate_function("on_decision", observer, "decision")
        self.logs = tuple(log for log in observers if isinstance(log, DecisionLog))
        functions = (observer for observer in observers if observer not in self.logs)
        self._observers: tuple[Observer, ...] = tuple(functions)
        self.present = bool(self._observers)
        """True if there are observers."""
        self._recorder = recorder

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        """Return itself, so that a copy of the middleware notifies the same observers."""
        return self

    def check(self, mode: Mode) -> None:
        """Raise in a sync run if an observer is async, because the run cannot wait for it."""
        for observer in self._observers if not mode else ():
            if is_async(observer):
                raise _async_error(observer)

    def log(self, make: Callable[P, LogLine], *args: P.args, **options: P.kwargs) -> None:
        """Write a line to the decision logs, if there are any."""
        try:
            line, subjects = make(*args, **options) if self.logs else ({}, {})
            for log in self.logs:
                log.write({"time": round(self.clock(), 6), **line}, subjects)
        except Exception as error:
            self._recorder.record_error("observer", error)

    async def notify(
        self, mode: Mode, decisions: Sequence[Decision], record: TaskRecord | None = None
    ) -> None:
        """Call each observer with each decision, and wait for those that are async."""
        record = record or TaskRecord()
        pairs = [(decision, observer) for decision in decisions for observer in self._observers]
        for decision, observer in pairs[record.notified :]:
            result: object = None
            try:
                result = observer(decision)
                if mode and inspect.isawaitable(result):
                    await result
            except Exception as error:
                self._recorder.record_error("observer", error)
            record.notified += 1
            if mode:
                continue
            if inspect.iscoroutine(result):
                result.close()
            if inspect.isawaitable(result):
                raise _async_error(observer)


def _async_error(observer: Observer) -> RuntimeError:
    return RuntimeError(
        f"on_decision={observer!r} is async: call the agent with ainvoke or astream, "
        "and override its async hooks where you override a hook"
    )
